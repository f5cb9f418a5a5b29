"""Episodes for other tools: video, JSON, Parquet, LeRobotDataset v3, Rerun.

Each exporter takes episodes one by one and holds one at a time. A library that the core does not need is imported when
it is used; if it is missing, the error names what to install.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from alpagym_runtime.episodes.birds_eye import draw
from alpagym_runtime.episodes.format import EpisodeFile
from alpagym_runtime.errors import ConfigError, PluginError
from alpagym_runtime.files import replacing, strict, write_atomic
from alpagym_runtime.types import Episode, Ragged
from alpagym_runtime.video import VideoWriter

Files = Sequence[EpisodeFile]


def export(files: Files, kind: str, output: Path) -> None:
    """Write episodes as `kind` (a key of `EXPORTERS`) to a file or folder that does not exist yet.

    Raises:
        ConfigError: the output exists, or the episodes do not fit the format.
        PluginError: the format's library is not installed; says how to get it.

    """
    if kind not in EXPORTERS:
        raise ConfigError(f"no format {kind!r}; there are {', '.join(sorted(EXPORTERS))}", key="--to")
    if output.exists():
        raise ConfigError(f"{output} exists; remove it or choose another name", key="--output")
    if not files:
        raise ConfigError("no episode was chosen; loosen --where")
    output.parent.mkdir(parents=True, exist_ok=True)
    EXPORTERS[kind](files, output)


def library(module: str, need: str, install: str) -> Any:
    """An optional library, or an error that says what it is needed for and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise PluginError(f"{need} needs {module.partition('.')[0]}, which is not installed: {install}") from err


# ---------------------------------------------------------------- JSON and Parquet


def to_json(files: Files, output: Path) -> None:
    """One strict JSON document: a list of episodes, without pictures; NaN and infinities become null."""
    document = [
        {
            "id": file.path.stem,
            **{name: value for name, value in file.meta.items() if name != "columns"},
            "columns": {
                name: _listed(file.column(name)) for name, about in file.columns.items() if about["kind"] != "frames"
            },
        }
        for file in files
    ]
    write_atomic(output, (json.dumps(strict(document), allow_nan=False) + "\n").encode())


def _listed(column: Any) -> Any:
    if isinstance(column, Ragged):
        bounds = zip(column.offsets[:-1].tolist(), column.offsets[1:].tolist(), strict=True)
        return [column.values[a:b].tolist() for a, b in bounds]
    if isinstance(column, tuple):
        value, valid = column
        return [v if ok else None for v, ok in zip(value.tolist(), valid.tolist(), strict=True)]
    return column.tolist()


def to_parquet(files: Files, output: Path) -> None:
    """One table, a row a tick, without pictures: `episode`, `tick`, then the columns of the episode files.

    Truth values are bool; a tensor is a flat list, and its shape is in the field's metadata (`shape`).
    """
    tables = [tick_table(file) for file in files]
    table = pa.concat_tables(tables, promote_options="default")
    with replacing(output) as temporary:
        pq.write_table(table, temporary)


def tick_table(file: EpisodeFile) -> pa.Table:
    """An episode's ticks as an Arrow table without pictures."""
    with pa.memory_map(str(file.path)) as source:
        table = pa.ipc.open_file(source).read_all()
        arrays = [pa.array([file.path.stem] * len(table)), pa.array(range(len(table)))]
        fields = [pa.field("episode", pa.string()), pa.field("tick", pa.int64())]
        for name in table.column_names:
            about = file.columns[name]
            if about["kind"] == "frames":
                continue
            column = _plain_column(table[name], about)
            arrays.append(column)
            fields.append(pa.field(name, column.type, metadata={"shape": json.dumps(about.get("shape", []))}))
        # Copies: the map is closed on return.
        return pa.table(arrays, schema=pa.schema(fields)).take(pa.array(range(len(table)), pa.int64()))


def _plain_column(column: pa.ChunkedArray, about: Mapping[str, Any]) -> pa.ChunkedArray:
    """Without extension types, and lists of any length: Parquet's reader refuses a null among lists of a fixed one."""
    truth = about.get("dtype") == "|b1" and about["kind"] == "array"
    if about["kind"] != "array" or not about["shape"]:
        return column.cast(pa.bool_()) if truth else column
    item = pa.bool_() if truth else column.type.value_type
    return pa.chunked_array([chunk.storage.cast(pa.list_(item)) for chunk in column.chunks])


# ---------------------------------------------------------------- pictures


def pictures(episode: Episode) -> Iterator[NDArray[np.uint8]]:
    """A picture [h,w,3] RGB a moment: the newest of each camera side by side, or bird's-eye where there are none."""
    names = sorted(n.removesuffix("_frame_id") for n in episode.observation if n.endswith("_frame_id"))
    cameras = [episode.observation[name] for name in names if name in episode.observation]
    for t in range(len(episode.observation["time_us"])):
        yield side_by_side([camera[t, -1] for camera in cameras]) if cameras else birds_eye(episode, t)


def birds_eye(episode: Episode, t: int) -> NDArray[np.uint8]:
    """The bird's-eye picture of row t with the plan that was made there."""
    row = {name: array[t] for name, array in episode.observation.items()}
    decided = episode.decisions is not None and t < len(episode.decisions)
    plan = episode.decisions.plan_rig[t] if decided and episode.decisions is not None else None
    target = episode.labels["target_plan_rig"][t] if decided and "target_plan_rig" in episode.labels else None
    return draw(row, plan, target)


def side_by_side(parts: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Pictures [h,w,3] in one row; lower ones are black below."""
    height = max(part.shape[0] for part in parts)
    padded = [np.pad(part, ((0, height - part.shape[0]), (0, 0), (0, 0))) for part in parts]
    return np.concatenate(padded, axis=1)


def frames_per_second(episode: Episode) -> Fraction:
    """Moments a second of the recording; 5 for an episode of one moment."""
    time_us = episode.observation.get("time_us", np.zeros(0, np.int64))
    steps = np.diff(time_us)
    return Fraction(1_000_000, int(np.median(steps))) if len(steps) and np.median(steps) > 0 else Fraction(5)


def to_video(files: Files, output: Path) -> None:
    """One H.264 video of all episodes, one after the other, at the speed of the first one's clock."""
    episodes = (file.episode() for file in files)
    shown = (episode for episode in episodes if "time_us" in episode.observation)
    first = next(shown, None)
    if first is None:
        raise ConfigError("the chosen episodes hold no observation to show")
    size: tuple[int, int] | None = None
    with VideoWriter(output, frames_per_second(first), container="mp4") as video:
        for episode in chain([first], shown):
            for picture in pictures(episode):
                size = size or picture.shape[:2]
                video.write(_fit(picture, *size))


def _fit(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    out = np.zeros((height, width, 3), np.uint8)
    rows, columns = min(height, picture.shape[0]), min(width, picture.shape[1])
    out[:rows, :columns] = picture[:rows, :columns]
    return out


# ---------------------------------------------------------------- robot-learning formats


def to_lerobot(files: Files, output: Path) -> None:
    """A LeRobotDataset v3: a frame a decision; `action` is the plan, flattened; pictures become videos."""
    module = library(
        "lerobot.datasets.lerobot_dataset", "export to LeRobotDataset", "uv sync --group lerobot (Python >= 3.12)"
    )
    dataset: Any = None
    for file in files:
        episode = file.episode()
        if episode.decisions is None or not len(episode):
            continue
        columns = _lerobot_columns(episode)
        if dataset is None:
            fps = frames_per_second(episode)
            if fps.denominator != 1:
                raise ConfigError(f"LeRobotDataset wants whole frames a second, these episodes have {float(fps):.3f}")
            features = {
                name: {
                    "dtype": "video" if array.ndim == 4 else str(array.dtype),
                    "shape": array.shape[1:],
                    "names": ["height", "width", "channels"] if array.ndim == 4 else None,
                }
                for name, array in columns.items()
            }
            dataset = module.LeRobotDataset.create(
                f"alpagym/{output.name}", int(fps), features, root=output, robot_type="car", use_videos=True
            )
        for t in range(len(episode)):
            row = {name: array[t] for name, array in columns.items()}
            dataset.add_frame({**row, "task": f"drive {episode.request.scene_id}"})
        dataset.save_episode()
    if dataset is None:
        raise ConfigError("the chosen episodes hold no decision")
    dataset.finalize()


def _lerobot_columns(episode: Episode) -> dict[str, NDArray[Any]]:
    """Arrays [T,...] under LeRobot's names; vectors are flat there."""
    assert episode.decisions is not None
    count = len(episode)
    columns: dict[str, NDArray[Any]] = {"action": episode.decisions.plan_rig.reshape(count, -1)}
    for name, array in episode.observation.items():
        if array.ndim == 5:
            columns[f"observation.images.{name.removeprefix('camera_')}"] = array[:count, -1]
        elif name == "ego_dynamics_rig":
            columns["observation.state"] = array[:count]
        elif (array.dtype.kind == "f" and array.size) or array.dtype == np.bool_:
            columns[f"observation.{name}"] = array[:count].reshape(count, -1)
    log_prob = np.where(episode.decisions.log_prob_mask, episode.decisions.log_prob, 0.0).sum(axis=1)
    columns["next.reward"] = episode.rewards.astype(np.float32)[:, None]
    columns["next.done"] = (np.arange(count) == count - 1)[:, None]
    columns["behaviour_log_prob"] = log_prob.astype(np.float32)[:, None]
    columns["time_us"] = episode.observation["time_us"][:count, None].astype(np.int64)
    return columns


def to_rerun(files: Files, output: Path) -> None:
    """A Rerun recording (.rrd): route, road users, history and plan in the rig frame, pictures, terms and measures."""
    rr = library("rerun", "export to Rerun", "pip install 'alpagym-runtime[rerun]'")
    rr.init("alpagym", spawn=False)
    rr.save(str(output))
    for number, file in enumerate(files):
        episode, root = file.episode(), f"episode_{number}"
        observation = episode.observation
        if "time_us" not in observation:
            continue
        begun = int(observation["time_us"][0])
        for t, time_us in enumerate(observation["time_us"].tolist()):
            rr.set_time("drive", duration=(time_us - begun) * 1e-6)
            _log_rig(rr, root, episode, t)
            for name, paid in episode.terms.items():
                if t:
                    rr.log(f"{root}/terms/{name}", rr.Scalars(float(paid[t - 1])))
            for name, series in episode.measures.items():
                if t < len(series.value) and series.valid[t]:
                    rr.log(f"{root}/measures/{name}", rr.Scalars(float(series.value[t])))
    rr.disconnect()


def _log_rig(rr: Any, root: str, episode: Episode, t: int) -> None:
    observation = episode.observation
    for name, array in observation.items():
        if array.ndim == 5:
            rr.log(f"{root}/{name}", rr.Image(array[t, -1]))
    lines = {}
    if "route_rig" in observation:
        lines["route"] = observation["route_rig"][t][observation["route_mask"][t]]
    if "ego_history_rig" in observation:
        lines["history"] = observation["ego_history_rig"][t][observation["ego_history_mask"][t]][:, :2]
    if episode.decisions is not None and t < len(episode.decisions):
        lines["plan"] = episode.decisions.plan_rig[t, :, :2]
    actors = np.zeros((0, 9), np.float32)
    if "actors_rig" in observation:
        actors = observation["actors_rig"][t][observation["actors_mask"][t]]
    log_lines(rr, root, lines, actors)


def log_lines(rr: Any, root: str, lines: Mapping[str, NDArray[Any]], actors_rig: NDArray[Any]) -> None:
    """Lines [P,2] and road users [A,9] of the rig frame below `root`/rig, at Rerun's present time."""
    for name, points in lines.items():
        # Rerun's second axis points down, ours to the left.
        rr.log(f"{root}/rig/{name}", rr.LineStrips2D([np.stack([-points[:, 1], -points[:, 0]], axis=1)]))
    centres = np.stack([-actors_rig[:, 1], -actors_rig[:, 0]], axis=1)
    rr.log(f"{root}/rig/actors", rr.Points2D(centres, radii=actors_rig[:, 6] / 2 if len(actors_rig) else 0.5))


EXPORTERS: dict[str, Callable[[Files, Path], None]] = {
    "json": to_json,
    "lerobot": to_lerobot,
    "parquet": to_parquet,
    "rerun": to_rerun,
    "video": to_video,
}
