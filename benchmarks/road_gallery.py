"""One drive of the expert on each kind of road, side by side, as an animated picture.

uv run python benchmarks/road_gallery.py docs/media/roads.webp
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from alpagym_runtime.policies.config import ExpertConfig
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.birds_eye import draw
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator
from alpagym_runtime.types import Ended, EpisodeRequest, Sampling

COLUMNS, TILE_PX, FRAMES = 4, 220, 75


def main() -> None:
    """Drive and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--suite", default="test")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first scene; eleven follow each other by kind"
    )
    options = parser.parse_args()
    policy = ExpertConfig().build()
    ids = [f"road-{options.suite}-{options.first + k:06d}" for k in range(11)]
    dataset = DatasetSection("road", scene_ids=ids)
    simulator = EmbeddedSimulator(EmbeddedConfig(control_period_us=100_000, end_on=[]), policy.spec, dataset, len(ids))
    slots = np.arange(len(ids))
    simulator.start(slots, [EpisodeRequest(scene_id, horizon_ticks=FRAMES) for scene_id in ids])
    tiles = [np.zeros((TILE_PX, TILE_PX, 3), np.uint8)] * (-(-len(ids) // COLUMNS) * COLUMNS)
    frames = []
    for _ in range(FRAMES):
        batch = simulator.receive(len(slots), 1.0)
        for slot in batch.slots.tolist():
            small = cv2.resize(draw(simulator, slot), (TILE_PX, TILE_PX), interpolation=cv2.INTER_AREA)
            name = simulator.scene_family(ids[slot])
            cv2.putText(small, name, (6, 14), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (255, 255, 255), 1, cv2.LINE_AA)
            tiles[slot] = small
        rows = [np.hstack(tiles[k : k + COLUMNS]) for k in range(0, len(tiles), COLUMNS)]
        frames.append(Image.fromarray(np.vstack(rows)))
        going = np.flatnonzero(batch.ended == Ended.RUNNING)
        if not len(going):
            break
        observation = {"target_plan_rig": batch.labels["target_plan_rig"][going]}
        decisions = policy.act(observation, np.zeros(len(going), np.uint64), Sampling("mean"))
        simulator.send(batch.slots[going], decisions, np.zeros(len(going), bool))
    options.target.parent.mkdir(parents=True, exist_ok=True)
    # Every other tick: half the bytes, and as easy to follow.
    first, *others = frames[::2]
    first.save(options.target, save_all=True, append_images=others, duration=200, loop=0, quality=50, method=4)


if __name__ == "__main__":
    main()
