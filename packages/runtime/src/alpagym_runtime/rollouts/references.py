"""Drivers that an evaluation is held against: the recording, and three that try to get away without driving.

A reward can pay for standing still, a score can be had by creeping. Whether they do in these scenes is measured beside
every policy, where the world costs next to nothing: in the embedded one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from alpagym_runtime.policies.config import ConstantSpeedConfig, LogReplayConfig, RouteFollowerConfig
from alpagym_runtime.rollouts.statistics import compare, summarise
from alpagym_runtime.rollouts.table import Row
from alpagym_runtime.types import Policy, PolicySpec

FILE = "references.parquet"
RECORDING = "recording"
CHEATS = ("parking", "creeping", "weaving")
_CONFIGS: dict[str, LogReplayConfig | ConstantSpeedConfig | RouteFollowerConfig] = {
    RECORDING: LogReplayConfig(),
    "parking": ConstantSpeedConfig(speed_factor=0.0),
    "creeping": RouteFollowerConfig(desired_speed_mps=1.5),
    "weaving": RouteFollowerConfig(weave_m=1.0, weave_period_s=2.0),
}
"""The same as the host's `conf/policy/*.yaml`; a test keeps them equal."""


def reference_spec() -> PolicySpec:
    """One spec for all of them, so that one simulator serves them."""
    return replace(_CONFIGS["creeping"].spec(), privileged=_CONFIGS[RECORDING].spec().privileged)


def drive_references(drive: Callable[[Policy], list[Row]]) -> dict[str, list[Row]]:
    """Rows by name; `drive` evaluates a policy on the scenes in question."""
    return {name: drive(config.build()) for name, config in _CONFIGS.items()}


def hold_against(
    references: Mapping[str, Sequence[Row]], evaluations: Mapping[str, Sequence[Row]], resamples: int
) -> dict[str, dict[str, Any]]:
    """What summary.json says of each reference: its own summary, and by how much the evaluations are ahead of it.

    Returns:
        By name what `summarise` gives, and `ahead`: by evaluation the paired differences evaluation − reference of
        `driving_score` and `reward`, each with its interval.

    """
    found = {}
    for name, rows in references.items():
        ahead = {key: compare([rows], [others], resamples) for key, others in evaluations.items()}
        found[name] = summarise(rows, resamples) | {
            "ahead": {key: {k: value[k] for k in ("driving_score", "reward")} for key, value in ahead.items()}
        }
    return found
