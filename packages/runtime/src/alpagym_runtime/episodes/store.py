"""A store: a folder of episode files with an index that can be asked, and rules what stays.

    <store>/data/<id>.arrow          an episode; its name holds nothing of the scene's, so any scene id is safe
    <store>/index/<writer>-<n>.parquet   rows of the index; parts are added, never rewritten
    <store>/configs/<hash>.yaml      the frozen configs that the receipts name, for `alpagym replay`

The files are the truth. The index is made from them: an episode that a killed writer did not index, or whose part of
the index is damaged, is read again. Any number of writers may use one store; each has parts of its own.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from alpagym_plugins import nearest
from alpagym_runtime.episodes.format import EpisodeFile, FrameMode, save
from alpagym_runtime.errors import ConfigError, CorruptFileError
from alpagym_runtime.files import remove_partials, replacing, write_atomic
from alpagym_runtime.types import Ended, Episode

FLUSH_EVERY = 256
"""Episodes between two parts of the index; a killed writer's are read again from their files."""

LONGEST_WRITE_S = 3600.0
BAD_ENDS = ("collision", "offroad", "failed")
_ID = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}-[0-9]{6,12}")
_HASH = re.compile(r"[0-9a-f]{8,64}")
_CONDITION = re.compile(r"\s*(?P<name>[\w/.-]+)\s*(?P<op>==|=|!=|>=|<=|>|<)\s*(?P<value>.*?)\s*")
REMEDY = "free some space, keep fewer episodes (store.keep_last), or choose another folder (store.path)"

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("written_us", pa.int64()),
        ("removed", pa.bool_()),
        ("scene_id", pa.string()),
        ("world_seed", pa.uint64()),
        ("policy_seed", pa.uint64()),
        ("group_id", pa.int64()),
        ("member", pa.int64()),
        ("attempt", pa.int64()),
        ("ended", pa.string()),
        ("failure", pa.string()),
        ("ticks", pa.int64()),
        ("driving_score", pa.float64()),
        ("reward", pa.float64()),
        ("initial_fault", pa.bool_()),
        ("actor", pa.string()),
        ("mode", pa.string()),
        ("version", pa.int64()),
        ("frames", pa.string()),
        ("bytes", pa.int64()),
        ("config_hash", pa.string()),
    ]
)
"""Columns that every row has; `term/<name>` and `measure/<name>` come with the episodes."""


@dataclass(frozen=True)
class Keep:
    """What stays in a store: an episode that any rule wants. Without any rule everything does.

    Attributes:
        last: this many of the newest.
        best, worst: this many of the highest and of the lowest driving score.
        failures: every collision, every drive that left the road, every failed episode.

    """

    last: int = 0
    best: int = 0
    worst: int = 0
    failures: bool = False

    def chosen(self, rows: pa.Table) -> set[str]:
        """Ids of the rows that stay."""
        ids = rows["id"].to_pylist()
        if not (self.last or self.best or self.worst or self.failures):
            return set(ids)
        stay = set(ids[-self.last :]) if self.last else set()
        scored = rows.filter(pc.is_valid(rows["driving_score"])).sort_by([("driving_score", "descending")])
        ranked = scored["id"].to_pylist()
        stay |= set(ranked[: self.best]) | set(ranked[len(ranked) - min(self.worst, len(ranked)) :])
        if self.failures:
            stay |= set(rows.filter(pc.is_in(rows["ended"], pa.array(BAD_ENDS)))["id"].to_pylist())
        return stay


class EpisodeStore:
    """See the module's text.

    Args:
        path: the store's folder; made at the first `add`.
        frames: what becomes of pictures.
        keep: what stays, looked at whenever the index grows.

    """

    def __init__(self, path: Path, *, frames: FrameMode = "seen", keep: Keep | None = None) -> None:
        self.path, self._frames, self._keep = Path(path), frames, keep or Keep()
        self._writer, self._numbers, self._parts = uuid4().hex[:8], itertools.count(), itertools.count()
        self._fresh: list[dict[str, Any]] = []
        self._read: dict[str, pa.Table] = {}
        self._recovered: dict[str, dict[str, Any]] = {}
        self._configs: set[str] = set()
        self.problems: list[str] = []

    # ------------------------------------------------------------ writing

    def add(self, episode: Episode, config: str | None = None) -> str:
        """Write an episode; returns its id.

        Args:
            episode: what to keep; void ones too.
            config: the frozen config behind `receipt.config_hash` as YAML, kept once.

        Raises:
            OSError: the disk is full or read-only; earlier episodes are whole.

        """
        if not self._fresh:
            self._prepare()
        number = next(self._numbers)
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{self._writer}-{number:06d}"
        if episode.receipt is not None and config is not None:
            self._write_config(episode.receipt.config_hash, config)
        size = save(episode, self._data / f"{name}.arrow", self._frames, remedy=REMEDY)
        self._fresh.append(_row(name, episode, self._frames, size, time.time_ns() // 1000))
        if len(self._fresh) >= FLUSH_EVERY:
            self.flush()
        return name

    def flush(self) -> None:
        """Add what was written since the last time to the index, and remove what no rule keeps."""
        if self._fresh or self._recovered:
            fresh = [*self._recovered.values(), *self._fresh]
            self._append(fresh)
            self._fresh, self._recovered = [], {}
        if self._keep != Keep() and self._data.is_dir():
            rows = self.rows()
            self.remove(sorted(set(rows["id"].to_pylist()) - self._keep.chosen(rows)))

    def close(self) -> None:
        """Flush; the store can be written to again."""
        if self._fresh:
            self.flush()

    def remove(self, ids: Sequence[str]) -> None:
        """Delete episodes; their rows stay in the index, marked as removed."""
        if not ids:
            return
        for name in ids:
            self.file_of(name).unlink(missing_ok=True)
        now = time.time_ns() // 1000
        self._append([{"id": name, "written_us": now, "removed": True} for name in ids])

    # ------------------------------------------------------------ asking

    def rows(self, where: Iterable[str] = (), *, removed: bool = False) -> pa.Table:
        """The index, oldest first: `SCHEMA`, then `term/…` and `measure/…` (aggregated).

        Args:
            where: conditions that all hold, such as `ended=collision|offroad`, `driving_score>=0.8`, `version=3`.
            removed: also the rows of episodes that a rule or `remove` deleted.

        Raises:
            ConfigError: there is no store here, or a condition cannot be read; says what can be asked.

        """
        if not self._data.is_dir():
            raise ConfigError(f"{self.path} is no episode store (no folder data); `alpagym rollout` makes one")
        parts = self._index_parts()
        parts += [pa.Table.from_pylist(self._fresh, _schema_of(self._fresh))] if self._fresh else []
        table = pa.concat_tables([SCHEMA.empty_table(), *parts], promote_options="default")
        gone = set(table.filter(table["removed"])["id"].to_pylist())
        present = {path.stem for path in self._data.glob("*.arrow") if _ID.fullmatch(path.stem)} - gone
        table = table.filter(pc.invert(table["removed"]))
        if not removed:
            table = table.filter(pc.is_in(table["id"], pa.array(sorted(present), pa.string())))
        missing = present - set(table["id"].to_pylist())
        if missing:
            self._recover(missing)
            found = [self._recovered[name] for name in sorted(missing) if name in self._recovered]
            if found:
                table = pa.concat_tables(
                    [table, pa.Table.from_pylist(found, _schema_of(found))], promote_options="default"
                )
        table = table.sort_by([("written_us", "ascending"), ("id", "ascending")]).drop_columns(["removed"])
        if len(table):
            # Two parts may hold one episode, where two readers recovered it.
            ids = np.array(table["id"].to_pylist())
            table = table.take(pa.array(np.sort(np.unique(ids, return_index=True)[1])))
        for condition in where:
            table = table.filter(_mask(table, condition))
        return table

    def file_of(self, name: str) -> Path:
        """The path of an episode's file.

        Raises:
            ConfigError: the id has not the form of an id.

        """
        if not _ID.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} is no episode id; `alpagym episodes list` prints them")
        return self._data / f"{name}.arrow"

    def open(self, name: str) -> EpisodeFile:
        """An episode's file, mapped."""
        path = self.file_of(name)
        if not path.exists():
            raise ConfigError(f"{self.path} has no episode {name}; `alpagym episodes list` prints what there is")
        return EpisodeFile(path)

    def read(self, name: str, *, frames: bool = True) -> Episode:
        """A whole episode."""
        return self.open(name).episode(frames=frames)

    # ------------------------------------------------------------ inside

    @property
    def _data(self) -> Path:
        return self.path / "data"

    def _prepare(self) -> None:
        for folder in ("data", "index", "configs"):
            try:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            except OSError as err:
                raise OSError(f"cannot make {self.path / folder}: {err.strerror}; {REMEDY}") from err
            remove_partials(self.path / folder, older_than_s=LONGEST_WRITE_S)

    def _write_config(self, config_hash: str, config: str) -> None:
        if config_hash in self._configs or not _HASH.fullmatch(config_hash):
            return
        path = self.path / "configs" / f"{config_hash}.yaml"
        if not path.exists():
            write_atomic(path, config.encode())
        self._configs.add(config_hash)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        path = self.path / "index" / f"{self._writer}-{next(self._parts):06d}.parquet"
        try:
            with replacing(path) as temporary:
                pq.write_table(pa.Table.from_pylist(rows, _schema_of(rows)), temporary)
        except OSError as err:
            raise OSError(
                f"cannot write {path} (index of {len(rows)} episodes): {err.strerror or err}; {REMEDY}"
            ) from err

    def _index_parts(self) -> list[pa.Table]:
        parts = []
        for path in sorted((self.path / "index").glob("*.parquet")):
            if path.name.startswith("."):
                continue
            if path.name not in self._read:
                try:
                    self._read[path.name] = pq.read_table(path)
                except (pa.ArrowException, OSError) as err:
                    # The episodes are whole; their rows are made again.
                    self.problems.append(f"{path} ({path.stat().st_size} bytes) is damaged and ignored: {err}")
                    self._read[path.name] = SCHEMA.empty_table()
            parts.append(self._read[path.name])
        return parts

    def _recover(self, names: Iterable[str]) -> None:
        for name in sorted(set(names) - self._recovered.keys()):
            path = self._data / f"{name}.arrow"
            try:
                file = EpisodeFile(path)
                written_us = path.stat().st_mtime_ns // 1000
                self._recovered[name] = _row(
                    name, file.episode(frames=False), file.meta["frames"], file.size, written_us
                )
            except FileNotFoundError:
                continue  # another process has just removed it
            except CorruptFileError as err:
                if str(err) not in self.problems:
                    self.problems.append(str(err))


def find_store(path: Path) -> Path:
    """The store that a path means: itself, or the folder `episodes` of a run directory.

    Raises:
        ConfigError: it is neither.

    """
    for candidate in (path, path / "episodes"):
        if (candidate / "data").is_dir():
            return candidate
    what = "is no episode store and no run directory with episodes" if path.exists() else "does not exist"
    raise ConfigError(f"{path} {what}; `alpagym rollout` makes one, and store.record makes others keep theirs")


def best_of_group(rows: pa.Table, count: int) -> pa.Table:
    """The `count` best rows of each group by driving score, then reward; in the order of `rows`.

    A group is what shares config, scene, world seed and group id. Void rows and initial faults are in no group.
    """
    groups: dict[tuple[Any, ...], list[tuple[float, float, int]]] = {}
    names = ("config_hash", "scene_id", "world_seed", "group_id", "driving_score", "reward", "initial_fault")
    columns = [rows[name].to_pylist() for name in names]
    for i, (*key, score, reward, fault) in enumerate(zip(*columns, strict=True)):
        if score is not None and not fault:
            groups.setdefault(tuple(key), []).append((-score, -(reward or 0.0), i))
    chosen = sorted(i for members in groups.values() for *_, i in sorted(members)[:count])
    return rows.take(pa.array(chosen, pa.int64()))


def _row(name: str, episode: Episode, frames: str, size: int, written_us: int) -> dict[str, Any]:
    request, failed = episode.request, episode.ended == Ended.FAILED
    score = float(episode.driving_score)
    decisions = episode.decisions
    row: dict[str, Any] = {
        "id": name,
        "written_us": written_us,
        "removed": False,
        "scene_id": request.scene_id,
        "world_seed": request.world_seed,
        "policy_seed": request.policy_seed,
        "group_id": request.group_id,
        "member": request.member,
        "attempt": request.attempt,
        "ended": episode.ended.name.lower(),
        "failure": episode.failure.text if episode.failure else None,
        "ticks": len(episode),
        "driving_score": None if failed or np.isnan(score) else score,
        "reward": None if failed else float(episode.rewards.sum()),
        "initial_fault": bool(episode.initial_fault),
        "actor": episode.actor,
        "mode": episode.sampling.mode,
        "version": int(decisions.version.max()) if decisions is not None and len(decisions) else None,
        "frames": frames,
        "bytes": size,
        "config_hash": episode.receipt.config_hash if episode.receipt else None,
    }
    row |= {f"term/{name}": float(values.sum()) for name, values in episode.terms.items()}
    return row | {f"measure/{name}": series.aggregate() for name, series in episode.measures.items()}


def _schema_of(rows: list[dict[str, Any]]) -> pa.Schema:
    extra = dict.fromkeys(name for row in rows for name in row if SCHEMA.get_field_index(name) < 0)
    return pa.schema([*SCHEMA, *(pa.field(name, pa.float64()) for name in extra)])


def _mask(table: pa.Table, condition: str) -> Any:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ConfigError(f"cannot read {condition!r}; write NAME OP VALUE with OP one of = != >= <= > <", key="where")
    name, op, text = match["name"], match["op"], match["value"]
    if name not in table.column_names:
        near = nearest(name, table.column_names)
        hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(table.column_names)}"
        raise ConfigError(f"episodes have no {name!r}; {hint}", key="where")
    column = table[name]
    try:
        values = [pa.scalar(_value(part.strip(), column.type), column.type) for part in text.split("|")]
    except (ValueError, pa.ArrowException) as err:
        raise ConfigError(f"{condition!r}: {name} is of type {column.type}, {text!r} is not", key="where") from err
    if op in ("=", "==", "!="):
        found = pc.is_in(column, pa.array([v.as_py() for v in values], column.type))
        return pc.and_(pc.is_valid(column), pc.invert(found)) if op == "!=" else found
    if len(values) > 1:
        raise ConfigError(f"{condition!r}: alternatives with | go with = and != only", key="where")
    compare = {">=": pc.greater_equal, "<=": pc.less_equal, ">": pc.greater, "<": pc.less}[op]
    return compare(column, values[0])


def _value(text: str, kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind):
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _no(text)
    if pa.types.is_integer(kind):
        return int(text)
    return float(text) if pa.types.is_floating(kind) else text


def _no(text: str) -> Any:
    raise ValueError(text)
