"""The published open-loop rewards: one number for one plan, with gates.

Source: rewards of NVlabs/alpamayo-recipes (formulas), written anew; the sign of the reasoning's part: its issue 29.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.rewards.base import Float, Term, require
from alpagym_runtime.rewards.pai_config import PaiDistanceConfig, PaiJointConfig, PaiMotionConfig
from alpagym_runtime.rewards.reasoning import ReasoningGrader, make_grader
from alpagym_runtime.simulators.pai.completion import reasoning_of
from alpagym_runtime.types import Decision, Ragged, SimulatorSpec, TickBatch

GATES = ("", "ade", "reasoning", "score")
"""Which gate failed, by code; "" none."""

NEEDS = ("ade_m", "comfort")


class PaiMotion(Term):
    """See `PaiMotionConfig`."""

    def __init__(self, config: PaiMotionConfig, simulator_spec: SimulatorSpec) -> None:
        self.needs = require(simulator_spec, "pai_motion", *NEEDS)
        self._config = config

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], in [-1, 0]."""
        return self.explain(batch, decisions)["reward"]

    def explain(self, batch: TickBatch, decisions: Decision | None) -> dict[str, Float]:
        """By name [n]: reward, traj_L2 m, comfort_reward, gate (a code of `GATES`)."""
        config = self._config
        ade, comfort = _of(batch, "ade_m"), _of(batch, "comfort")
        gate = np.where(ade < config.ade_limit_m, 0.0, 1.0)
        value = -config.l2_weight * ade / config.ade_limit_m + config.comfort_weight * comfort
        return {"reward": _gated(batch, gate, value), "traj_L2": ade, "comfort_reward": comfort, "gate": gate}


class PaiDistance(Term):
    """See `PaiDistanceConfig`."""

    def __init__(self, config: PaiDistanceConfig, simulator_spec: SimulatorSpec) -> None:
        self.needs = require(simulator_spec, "pai_distance", "ade_m")
        self._config = config

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], in [-1, 0]; -1 where the distance is undefined."""
        share = 1.0 / (1.0 + _of(batch, "ade_m") / self._config.half_at_m)
        return np.where(batch.driven, share - 1.0, 0.0)


class PaiJoint(Term):
    """See `PaiJointConfig`. Reads the completion (trace `text`) and the label `cot_utf8`."""

    reads_text = True

    def __init__(
        self, config: PaiJointConfig, simulator_spec: SimulatorSpec, grader: ReasoningGrader | None = None
    ) -> None:
        self.needs = require(simulator_spec, "pai_joint", *NEEDS)
        self._config = config
        self._grader = grader or make_grader(config.grader, config.grader_path, config.grader_device)

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n]; at least -1."""
        return self.explain(batch, decisions)["reward"]

    def explain(self, batch: TickBatch, decisions: Decision | None) -> dict[str, Float]:
        """By name [n]: reward, traj_L2 m, comfort_reward, reasoning_score, gate (a code of `GATES`)."""
        config = self._config
        ade, comfort = _of(batch, "ade_m"), _of(batch, "comfort")
        words, score = self._scores(batch, decisions)
        gate = np.where(~words, 2.0, np.where(score > config.score_limit, 0.0, 3.0))
        gate = np.where(ade < config.ade_limit_m, gate, 1.0)
        sign = 1.0 if config.variant == "corrected" else -1.0
        value = -config.l2_weight * ade / config.ade_limit_m + config.comfort_weight * comfort
        value = value + config.reasoning_weight * sign * score / -config.score_limit
        return {
            "reward": _gated(batch, gate, value),
            "traj_L2": ade,
            "comfort_reward": comfort,
            "reasoning_score": score,
            "gate": gate,
        }

    def _scores(self, batch: TickBatch, decisions: Decision | None) -> tuple[NDArray[np.bool_], Float]:
        """Whether there are words on both sides [n], and the score [n]; -1 where there are none."""
        trace = None if decisions is None else decisions.trace.get("text")
        if not isinstance(trace, Ragged) or "cot_utf8" not in batch.labels:
            raise SimulatorError(
                "pai_joint reads the completion (the policy's trace 'text') and the label 'cot_utf8'; one of them is "
                "missing: use a policy that reasons, with dataset.reasoning set",
                code="MISSING_TEXT",
                permanent=True,
            )
        score, words = np.full(len(batch), -1.0), np.zeros(len(batch), bool)
        asked = []
        for row in np.flatnonzero(batch.driven).tolist():
            data = np.asarray(trace.values[trace.offsets[row] : trace.offsets[row + 1]], np.uint8)
            cot = reasoning_of(data.tobytes().decode(errors="replace"))
            mask = batch.labels["cot_utf8_mask"][row]
            reference = batch.labels["cot_utf8"][row][mask].tobytes().decode()
            if cot and reference:
                asked.append((row, cot, reference))
        if asked:
            rows = np.array([row for row, _, _ in asked])
            graded = self._grader.score([cot for _, cot, _ in asked], [reference for _, _, reference in asked])
            score[rows], words[rows] = np.asarray(graded, np.float64) - 1.0, True
        return words, score


def _of(batch: TickBatch, name: str) -> Float:
    return np.where(batch.measures.valid[name], batch.measures.values[name], np.inf if name == "ade_m" else -1.0)


def _gated(batch: TickBatch, gate: Float, value: Float) -> Float:
    return np.where(batch.driven, np.where(gate == 0.0, value, -1.0), 0.0)
