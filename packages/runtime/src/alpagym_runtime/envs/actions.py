"""Gymnasium actions in Box(-1, 1) and what they mean to the simulator."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.unicycle import KNOT_TIMES_S, PLAN_STEPS, roll_out
from alpagym_runtime.types import Decision

ACTION_SIZES = {"unicycle": 2 * len(KNOT_TIMES_S), "plan": 3 * PLAN_STEPS, "control": 2}

ACCELERATION_SCALE_MPS2 = 6.0
CURVATURE_SCALE_PM = 0.25
STEERING_SCALE_RAD = 0.6
PLAN_SCALE = np.array([100.0, 50.0, np.pi])
CONTROL_SCALE = np.array([ACCELERATION_SCALE_MPS2, STEERING_SCALE_RAD])
KNOT_SCALE = np.array([ACCELERATION_SCALE_MPS2, CURVATURE_SCALE_PM])[:, None]


def check_action_type(action_type: str) -> None:
    """Raise a ConfigError that lists the types."""
    if action_type not in ACTION_SIZES:
        raise ConfigError(f"must be one of {', '.join(ACTION_SIZES)}, got {action_type!r}", key="action_type")


def decision_from_actions(action_type: str, actions: NDArray[np.float32], speed_mps: NDArray[Any]) -> Decision:
    """Decisions of N rows.

    Args:
        action_type: unicycle (2 × 8 values: acceleration × 6 m/s2, curvature × 0.25 1/m at the plan's knots) | plan
            (64 × 3: x × 100 m, y × 50 m, yaw × pi) | control (acceleration × 6 m/s2, steering × 0.6 rad for one tick).
        actions: [N,D] in [-1, 1]; values outside are clipped.
        speed_mps: [N], the present speed.

    """
    values = np.minimum(np.maximum(np.asarray(actions, np.float64), -1.0), 1.0)
    count = len(values)
    none, control = _no_plan(count), None
    plan = none.plan_rig
    if action_type == "control":
        control = (values * CONTROL_SCALE).astype(np.float32)
    elif action_type == "plan":
        plan = (values.reshape(count, PLAN_STEPS, 3) * PLAN_SCALE).astype(np.float32)
    else:
        plan = roll_out(values.reshape(count, 2, len(KNOT_TIMES_S)) * KNOT_SCALE, speed_mps)
    return Decision(plan, none.log_prob, none.log_prob_mask, none.version, control)


@lru_cache(maxsize=64)
def _no_plan(count: int) -> Decision:
    """What stands beside a control, or beside a plan without a distribution; nobody may write to it."""
    decision = plan_decision(np.zeros((count, PLAN_STEPS, 3), np.float32))
    for array in (decision.plan_rig, decision.log_prob, decision.log_prob_mask, decision.version):
        array.flags.writeable = False
    return decision
