"""An HTML page of one episode, or of two side by side: pictures, bird's-eye, plan and every term, under one slider.

The page holds everything it shows; it loads nothing and runs in any browser, offline.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.episodes.birds_eye import EGO_BOX_M, SPAN_M
from alpagym_runtime.episodes.format import EpisodeFile
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.files import strict, write_atomic
from alpagym_runtime.types import Episode

PICTURE_WIDTH_PX = 480
JPEG_QUALITY = 85


def write_page(files: list[EpisodeFile], output: Path) -> None:
    """Write the page of one or two episodes."""
    write_atomic(output, page(files).encode())


def page(files: list[EpisodeFile]) -> str:
    """The page as text.

    Raises:
        ConfigError: more than two episodes, or one that holds no observation.

    """
    if not 1 <= len(files) <= 2:
        raise ConfigError(f"the viewer shows one episode or two side by side, got {len(files)}")
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("alpagym_runtime.episodes", "."), autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False}
    panels = [_panel(file) for file in files]
    scenes = " | ".join(dict.fromkeys(panel["facts"]["scene"] for panel in panels))
    template = environment.get_template("viewer.html.j2")
    return template.render(title=scenes, data=strict({"panels": panels, "span_m": SPAN_M, "ego_box_m": EGO_BOX_M}))


def _panel(file: EpisodeFile) -> dict[str, Any]:
    """What the page shows of one episode: facts, a list of moments, series by name."""
    episode = file.episode()
    observation = episode.observation
    if "time_us" not in observation:
        failure = f" ({episode.failure.text})" if episode.failure else ""
        raise ConfigError(f"{file.path} holds no observation to show: it {episode.ended.name.lower()}{failure}")
    request, receipt = episode.request, episode.receipt
    versions = [] if episode.decisions is None else np.unique(episode.decisions.version).tolist()
    facts = {
        "scene": request.scene_id,
        "episode": file.path.stem,
        "ended": episode.ended.name.lower(),
        "driving score": f"{episode.driving_score:.3f}",
        "reward": f"{episode.rewards.sum():.4f}",
        "actor": f"{episode.actor}, {episode.sampling.mode}, weights {', '.join(map(str, versions)) or '–'}",
        "seeds": f"world {request.world_seed}, policy {request.policy_seed}, attempt {request.attempt}",
        "group": f"{request.group_id}, member {request.member}",
    }
    if receipt is not None:
        facts["config"] = receipt.config_hash[:12]
    start_us = int(observation["time_us"][0])
    return {
        "facts": facts,
        "moments": [_moment(episode, t, start_us) for t in range(len(observation["time_us"]))],
        "terms": {name: values.tolist() for name, values in episode.terms.items()},
        "measures": {
            name: [v if ok else None for v, ok in zip(series.value.tolist(), series.valid.tolist(), strict=True)]
            for name, series in episode.measures.items()
            if len(series.value) == len(observation["time_us"])
        },
    }


def _moment(episode: Episode, t: int, start_us: int) -> dict[str, Any]:
    observation, decisions = episode.observation, episode.decisions
    moment: dict[str, Any] = {"time_s": (int(observation["time_us"][t]) - start_us) * 1e-6, "pictures": {}}
    for name, array in observation.items():
        if array.ndim == 5:
            moment["pictures"][name.removeprefix("camera_")] = _data_uri(array[t, -1])
    if "route_rig" in observation:
        moment["route"] = _points(observation["route_rig"][t][observation["route_mask"][t]])
    if "ego_history_rig" in observation:
        moment["history"] = _points(observation["ego_history_rig"][t][observation["ego_history_mask"][t]][:, :2])
    if "ego_dynamics_rig" in observation:
        moment["speed_mps"] = round(float(observation["ego_dynamics_rig"][t, 0]), 2)
    if "actors_rig" in observation:
        actors = observation["actors_rig"][t][observation["actors_mask"][t]]
        moment["actors"] = np.round(actors[:, [0, 1, 2, 5, 6, 7, 8]].astype(np.float64), 3).tolist()
    if decisions is not None and t < len(decisions):
        moment["plan"] = _points(decisions.plan_rig[t, :, :2])
        moment["log_prob"] = float(np.where(decisions.log_prob_mask[t], decisions.log_prob[t], 0.0).sum())
        if "target_plan_rig" in episode.labels:
            moment["target"] = _points(episode.labels["target_plan_rig"][t, :, :2])
    return moment


def _points(points: NDArray[Any]) -> list[list[float]]:
    rounded: list[list[float]] = np.round(np.asarray(points, np.float64), 2).tolist()
    return rounded


def _data_uri(picture: NDArray[np.uint8]) -> str:
    import cv2

    height, width = picture.shape[:2]
    if width > PICTURE_WIDTH_PX:
        size = (PICTURE_WIDTH_PX, max(1, height * PICTURE_WIDTH_PX // width))
        picture = np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)
    data = cv2.imencode(".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]
    return "data:image/jpeg;base64," + base64.b64encode(data.tobytes()).decode()
