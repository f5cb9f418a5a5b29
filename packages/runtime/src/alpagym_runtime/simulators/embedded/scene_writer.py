"""Writes scenes as files; `scene_files` says what is in them and reads them."""

from __future__ import annotations

import dataclasses
import json
import math
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from alpagym_runtime.simulators.embedded.archive import write_members
from alpagym_runtime.simulators.embedded.lane_map import LaneMap, Stop
from alpagym_runtime.simulators.embedded.opendrive_writer import write_opendrive
from alpagym_runtime.simulators.embedded.scene import KINDS, STEP_US, Scene
from alpagym_runtime.simulators.embedded.scene_layout import (
    CLASSES,
    HEIGHT_M,
    MAP,
    METADATA,
    OWN,
    RIG,
    START_US,
    TRACKS,
    VERSION,
)


def write_scene(scene: Scene, path: Path, lane_map: LaneMap | None = None) -> None:
    """Write one scene; `.usdz` gives a zip, another name a new folder.

    Args:
        scene: any scene of the embedded world.
        path: written whole or not at all; a zip is replaced, a folder must not exist.
        lane_map: the map; the scene's own if None. Without any, AlpaSim cannot load the file, we can.

    """
    lane_map = scene.lane_map if lane_map is None else lane_map
    times = (START_US + STEP_US * np.arange(len(scene.ego_log))).tolist()
    members = {
        METADATA: _metadata(scene, times),
        RIG: _json(_rig(scene, times)),
        TRACKS: _json(_tracks(scene)),
        OWN: _json(_own(scene)),
    }
    if lane_map is not None:
        members[MAP] = write_opendrive(lane_map, scene.scene_id)
    write_members(path, members)


def _json(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def _metadata(scene: Scene, times: list[int]) -> bytes:
    """YAML that is JSON too, so that every id stays the text that it is."""
    content_hash = scene.content_hash
    data = {
        "scene_id": scene.scene_id,
        "version_string": f"alpagym-{VERSION}",
        "training_date": "2026-01-01",
        "dataset_hash": content_hash,
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, content_hash)),
        "is_resumable": False,
        "sensors": {"camera_ids": [], "lidar_ids": []},
        "logger": {"name": "none", "run_id": "none", "run_url": "none"},
        "time_range": {"start": float(times[0]), "end": float(times[-1])},
        "training_step_outputs": {},
    }
    return (json.dumps(data, indent=2) + "\n").encode()


def _rig(scene: Scene, times: list[int]) -> Any:
    vehicle = scene.vehicle
    poses = []
    for x, y, yaw, _ in scene.ego_log.tolist():
        c, s = math.cos(yaw), math.sin(yaw)
        poses.append([[c, -s, 0.0, x], [s, c, 0.0, y], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    box = {
        "centroid": [vehicle.centre_offset_m, 0.0, HEIGHT_M / 2.0],
        "dim": [vehicle.length_m, vehicle.width_m, HEIGHT_M],
        "rot": [0.0, 0.0, 0.0],
    }
    trajectory = {
        "sequence_id": "sequence",
        "T_rig_world_timestamps_us": times,
        "T_rig_worlds": poses,
        "cameras_frame_timestamps_us": {},
        "rig_bbox": box,
    }
    identity = np.eye(4).tolist()
    return {
        "world_to_nre": {"matrix": identity},
        "T_world_base": identity,
        "camera_calibrations": {},
        "rig_trajectories": [trajectory],
    }


def _tracks(scene: Scene) -> Any:
    actors = scene.actors
    data: dict[str, list[Any]] = {
        name: [] for name in ("tracks_id", "tracks_label_class", "tracks_flags", "tracks_timestamps_us", "tracks_poses")
    }
    for a in range(len(actors.first)):
        steps = range(int(actors.first[a]), int(actors.last[a]) + 1)
        data["tracks_id"].append(str(a))
        data["tracks_label_class"].append(CLASSES[KINDS[actors.kind[a]]])
        data["tracks_flags"].append(["CONTROLLABLE"] if KINDS[actors.kind[a]] != "static" else [])
        data["tracks_timestamps_us"].append([START_US + STEP_US * k for k in steps])
        rows = actors.tracks[a, steps.start : steps.stop].tolist()
        data["tracks_poses"].append(
            [[x, y, HEIGHT_M / 2.0, 0.0, 0.0, math.sin(yaw / 2.0), math.cos(yaw / 2.0)] for x, y, yaw, _ in rows]
        )
    sizes = [[length, width, HEIGHT_M] for length, width in actors.size.tolist()]
    return {"sequence": {"tracks_data": data, "cuboidtracks_data": {"cuboids_dims": sizes}}}


def _stops(stops: tuple[Stop, ...]) -> list[list[float | None]]:
    return [[s.arc_m, s.signal_group, *(v if math.isfinite(v) else None for v in s.conflict)] for s in stops]


def _own(scene: Scene) -> Any:
    actors = scene.actors
    valid = [slice(int(f), int(last) + 1) for f, last in zip(actors.first, actors.last, strict=True)]
    agents = [
        dataclasses.asdict(agent) | {"path": agent.path.tolist(), "stops": _stops(agent.stops)}
        for agent in scene.agents
    ]
    signals = scene.signals
    return {
        "version": VERSION,
        "scene_id": scene.scene_id,
        "family": scene.family,
        "handover": int(scene.handover),
        "speed_limit_mps": float(scene.speed_limit_mps),
        "vehicle": dataclasses.asdict(scene.vehicle),
        "route": scene.route.tolist(),
        "area": {"band_height_m": float(scene.area.band_height_m), "segments": scene.area.segments.tolist()},
        "ego": scene.ego_log[:, 2:].tolist(),
        "tracks": {
            "steps": int(actors.tracks.shape[1]),
            "kinds": [KINDS[k] for k in actors.kind],
            "yaw_speed": [actors.tracks[a, part, 2:].tolist() for a, part in enumerate(valid)],
        },
        "agents": agents,
        "signals": {
            "cycle_s": float(signals.cycle_s),
            "yellow_s": float(signals.yellow_s),
            "green_s": signals.green_s.tolist(),
            "heads": signals.heads.tolist(),
        },
        "stops": _stops(scene.stops),
    }
