"""Which scenes the groups of a step drive.

Every scene comes once in each shuffled pass. A group whose members all fare alike teaches nothing, so a share of the
groups may go to scenes whose last group differed most instead. Both are functions of the seed, the step and the spreads
seen so far, which travel in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from alpagym_runtime.random import generator
from alpagym_runtime.types import Episode


def scenes_of_step(
    scenes: Sequence[str], spreads: Mapping[str, float], groups: int, focus: float, seed: int, step: int
) -> list[str]:
    """A scene for each of a step's groups.

    Args:
        scenes: of the training split.
        spreads: by scene, `spread` of its last group; scenes that never drove are not focused on.
        groups: S, groups a step.
        focus: share of them, rounded down, that is drawn with probability in proportion to the spread, each scene at
            most once a step; the others come in passes.
        seed: the run's.
        step: from 0.

    """
    known = [scene for scene in scenes if spreads.get(scene, 0.0) > 0.0]
    focused = min(int(groups * focus), len(known))
    passing = groups - int(groups * focus)
    chosen: list[str] = []
    if focused:
        weight = np.array([spreads[scene] for scene in known])
        drawn = generator(seed, 8, step).choice(len(known), focused, replace=False, p=weight / weight.sum())
        chosen = [known[i] for i in drawn]
    # A step that has too few scenes to focus on goes through more of the pass; the next step begins where it would.
    for group in range(groups - focused):
        epoch, place = divmod(step * passing + group, len(scenes))
        chosen.append(scenes[int(generator(seed, 3, epoch).permutation(len(scenes))[place])])
    return chosen


def spreads_of(episodes: Sequence[Episode]) -> dict[str, float]:
    """Standard deviation of the reward in each group, by scene; groups without two usable episodes are left out."""
    rewards: dict[tuple[str, int], list[float]] = {}
    for episode in episodes:
        if episode.trainable and np.isfinite(episode.rewards).all():
            key = (episode.request.scene_id, episode.request.group_id)
            rewards.setdefault(key, []).append(float(episode.rewards.sum()))
    return {scene: float(np.std(group)) for (scene, _), group in rewards.items() if len(group) > 1}
