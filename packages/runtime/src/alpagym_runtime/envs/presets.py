"""Reward presets by name, for environments that are made without a run config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alpagym_plugins import check_choice
from alpagym_runtime.run_config import RewardSection, reward_from_mapping

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "driving": {
        "progress": {"type": "progress", "scale": 1.0, "full_at": 0.8},
        "collision": {"type": "collision", "scale": -1.0},
        "off_road": {"type": "off_road", "scale": -1.0},
        "pace": {
            "type": "measure",
            "scale": -0.03,
            "measure": "along_track_error_m",
            "absolute": True,
            "dead_band": 3.0,
            "span": 7.0,
        },
    },
    "distance_to_gt": {"distance_to_gt": {"type": "distance_to_gt", "scale": -0.01}},
    "metrics": {
        "progress": {"type": "progress", "scale": 1.0},
        "collision": {"type": "collision", "scale": -10.0, "once": True},
    },
    "progress_safety": {
        "progress": {"type": "progress", "scale": 1.0},
        "collision": {"type": "collision", "scale": -10.0, "once": True},
        "off_road": {"type": "off_road", "scale": -5.0, "once": True},
        "distance_to_gt": {"type": "distance_to_gt", "scale": -0.01},
    },
}
"""For closed-loop worlds. The same values as the host's `conf/reward/*.yaml`; a test keeps them equal."""

OPEN_LOOP_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "pai_motion": {"pai_motion": {"type": "pai_motion", "scale": 1.0}},
    "pai_joint": {"pai_joint_corrected": {"type": "pai_joint", "scale": 1.0, "variant": "corrected"}},
    "pai_joint_published": {"pai_joint_published": {"type": "pai_joint", "scale": 1.0, "variant": "published"}},
}
"""For the open-loop world, likewise."""


def reward_section(reward: str | Mapping[str, Any]) -> RewardSection:
    """A preset's name, or a mapping `name -> {type, scale, …}`, as a validated section."""
    if isinstance(reward, str):
        known = PRESETS | OPEN_LOOP_PRESETS
        check_choice("reward", reward, known)
        reward = known[reward]
    return reward_from_mapping({"terms": reward})
