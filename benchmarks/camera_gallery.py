"""Makes the pictures of docs/gallery.md.

    uv run python benchmarks/camera_gallery.py [--commonroad FOLDER]

Writes docs/media/{contact_sheet,weather,plans,labels}.webp and drive.mp4, drive.webp; the same bytes each time on one
build and CPU family.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.geometry import local_to_rig
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.camera_config import PAI_CAMERAS, CamerasConfig
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.dataset import CommonRoad, Procedural, Roads, SceneSource
from alpagym_runtime.simulators.embedded.maps import KINDS
from alpagym_runtime.simulators.embedded.views import draw_plan, look, recorded_moment, show
from alpagym_runtime.types import Ended, EpisodeRequest, PolicySpec
from alpagym_runtime.video import VideoWriter

Picture = NDArray[np.uint8]
MEDIA = Path(__file__).parents[1] / "docs" / "media"
SMALL = (150, 240)


def titled(picture: Picture, text: str) -> Picture:
    """The picture with words in its upper left corner."""
    out = picture.copy()
    (width, height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.45, 1)
    cv2.rectangle(out, (0, 0), (width + 10, height + 10), (24, 24, 26), -1)
    cv2.putText(out, text, (5, height + 5), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (255, 255, 255), 1, cv2.LINE_AA)
    return out


def save(name: str, rows: list[list[Picture]], quality: int) -> None:
    """Rows of pictures as one WebP."""
    sheet = np.concatenate([np.concatenate(row, axis=1) for row in rows])
    cv2.imwrite(str(MEDIA / name), sheet[..., ::-1], [cv2.IMWRITE_WEBP_QUALITY, quality])
    print(name, sheet.shape, (MEDIA / name).stat().st_size >> 10, "KB")


def contact_sheet(commonroad: Path | None) -> None:
    """A row a kind of scene: PAI's four cameras and a plain front one."""
    sources: list[tuple[SceneSource, str]] = []
    roads, procedural = Roads({"train": 22}), Procedural({"train": 8})
    sources += [(roads, f"road-train-{k + len(KINDS):06d}") for k in range(len(KINDS))]
    sources.append((procedural, "procedural-train-000001"))
    if commonroad is not None:
        recorded = CommonRoad(str(commonroad))
        sources.append((recorded, recorded.ids("train")[0]))
    rows = []
    for source, scene_id in sources:
        scene = source.load(scene_id)
        moment = recorded_moment(scene, min(34, len(scene.ego_log) - 1))
        cameras = (PAI_CAMERAS[0], PAI_CAMERAS[1], PAI_CAMERAS[2], PAI_CAMERAS[3], "front")
        row = [look(moment, name, SMALL, CamerasConfig(antialias=2)).rgb for name in cameras]
        row[0] = titled(row[0], scene.family)
        rows.append(row)
    rows[0] = [
        titled(p, n.removeprefix("camera_")) if k else p for k, (p, n) in enumerate(zip(rows[0], cameras, strict=True))
    ]
    save("contact_sheet.webp", rows, 72)


def weather() -> None:
    """One moment in each weather."""
    moment = recorded_moment(Roads({"test": 4}).load("road-test-000003"), 22)
    kinds = ("clear", "low_sun", "dusk", "fog")
    pictures = [
        titled(look(moment, "front_wide", (240, 400), CamerasConfig(weather=kind, antialias=2)).rgb, kind)
        for kind in kinds
    ]
    save("weather.webp", [pictures[:2], pictures[2:]], 80)


def labels() -> None:
    """Colours, depth, instances and classes of one picture."""
    moment = recorded_moment(Roads({"test": 4}).load("road-test-000002"), 30)
    view = look(moment, "front_wide", (200, 320), CamerasConfig(weather="clear", antialias=2))
    depth = cv2.applyColorMap((255 - np.minimum(view.depth_m, 60.0) * 4.2).astype(np.uint8), cv2.COLORMAP_VIRIDIS)
    rng = np.random.default_rng(5)
    table = rng.integers(40, 255, (4096, 3)).astype(np.uint8)
    table[0] = 20
    instance, classes = table[view.instance % 4096], table[view.semantic.astype(int) * 7 + 1]
    save("labels.webp", [[view.rgb, depth[..., ::-1]], [instance, classes]], 85)


def drives(scene_id: str, ticks: int) -> tuple[list[Picture], list[Picture]]:
    """The expert drives: `show` each tick, and the front camera with its plan."""
    spec = PolicySpec(("ego_dynamics_rig",))
    config = EmbeddedConfig(control_period_us=100_000, cameras=CamerasConfig(antialias=2))
    simulator = config.build(spec, DatasetSection("road", scene_ids=[scene_id]), 1, ("target_plan_rig",))
    slot, shown, stills = np.zeros(1, np.int64), [], []
    simulator.start(slot, [EpisodeRequest(scene_id, horizon_ticks=ticks)])
    for tick in range(ticks):
        batch = simulator.receive(1, 10.0)
        if tick:
            shown.append(show(simulator, 0, "both", 400))
            moment, ahead = simulator.moment(0), simulator.plan(0)
            view = look(moment, "front_wide", (240, 400), simulator.camera_options)
            stills.append(view.rgb if ahead is None else draw_plan(view, local_to_rig(ahead[:, :2], moment.pose)))
        if batch.ended[0] != Ended.RUNNING:
            break
        simulator.send(slot, plan_decision(batch.labels["target_plan_rig"]), np.zeros(1, bool))
    simulator.close()
    return shown, stills


def plans() -> None:
    """Stills with plans."""
    pictures = [drives(f"road-test-{k:06d}", 14)[1][-1] for k in (2, 7, 8, 9)]
    save("plans.webp", [pictures[:2], pictures[2:]], 80)


def video() -> None:
    """A short drive, as a video and as an animation that a page shows at once."""
    shown, _ = drives("road-test-000014", 64)
    with VideoWriter(MEDIA / "drive.mp4", 10, options={"crf": "27"}) as writer:
        for picture in shown:
            writer.write(picture)
    with VideoWriter(MEDIA / "drive.webp", 5, options={"quality": "55"}) as writer:
        for picture in shown[::2]:
            writer.write(cv2.resize(picture, (624, 240), interpolation=cv2.INTER_AREA))
    for name in ("drive.mp4", "drive.webp"):
        print(name, len(shown), "ticks", (MEDIA / name).stat().st_size >> 10, "KB")


def main() -> None:
    """Make all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commonroad", type=Path)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    contact_sheet(arguments.commonroad)
    weather()
    labels()
    plans()
    video()


if __name__ == "__main__":
    main()
