"""`RunConfig`: everything that a run depends on, as dataclasses; the frozen copy in the run directory is its YAML.

The host composes it, every process reads it. A section whose `type` names a plugin is validated against that plugin's
own config dataclass (design: "Plugins are config dataclasses"). This module imports the standard library and
alpagym_plugins only, so a login node can validate any experiment.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from alpagym_plugins import ConfigError, ConfigErrors, PluginError, check_choice, check_range, load
from alpagym_runtime.deploy_config import AlpasimSection, DeploySection, LearnerSection, TopologySection
from alpagym_runtime.simulators.pai.config import parse_chunks
from alpagym_runtime.telemetry.config import ConsoleConfig, JsonlConfig
from alpagym_runtime.trainers.cosmos.config import CosmosSection

SCHEMA_VERSION = 1


@dataclass
class RunSection:
    """Name, seed and place of a run."""

    name: str = "run"
    seed: int = 1
    root: str = "tmp/alpagym-runs"
    torch_threads: int = 1

    def __post_init__(self) -> None:
        check_range("seed", self.seed, minimum=0, maximum=2**63 - 1)
        check_range("torch_threads", self.torch_threads, minimum=1, maximum=1024)
        if not self.root:
            raise ConfigError("must not be empty", key="root")


@dataclass
class DatasetSection:
    """Which scenes. The same section means the same scenes in every process.

    Attributes:
        source: procedural | road | commonroad | files | pai; simulators that have scenes of their own ignore it.
        path: folder or file of recordings or maps, for sources that read them.
        scene_ids: exactly these scenes, in all splits; null takes the source's splits.
        test_suite_id: all scenes of one of AlpaSim's suites, for an AlpaSim that is started for the run.
        split: what `evaluate` drives: train | val | test; roads also have hard | bench.
        train_scenes, val_scenes, test_scenes: how many of each an endless source makes.
        clip_index: (pai, as all that follow) the index of clips, relative to `path`.
        chunk_ids: only clips of these chunks: 3 | 0-3 (the end is excluded) | a list; null takes all.
        train_chunks, val_chunks, test_chunks: chunks that make up a split; null takes the index's own column.
        allow_overlap: clips may be in train and in another split; else that is an error.
        every_split: all clips are in every split: to learn a few by heart, and to measure on them.
        reasoning: the table of reasoning, relative to `path`; null reads none.
        key_frame: default (`key_frame_us` of each clip) | events (those of the reasoning table).
        key_frame_us: the default key frame, clip-relative.
        events: all | first: which of a clip's events are samples.
        skip_bad: leave out clips whose files are missing or torn, and count them; else they are an error.
        revision: of a hub cache; null takes refs/main.

    """

    source: str = "procedural"
    path: str | None = None
    scene_ids: list[str] | None = None
    test_suite_id: str | None = None
    split: str = "test"
    train_scenes: int = 448
    val_scenes: int = 128
    test_scenes: int = 256
    clip_index: str = "clip_index.parquet"
    chunk_ids: Any = None
    train_chunks: Any = None
    val_chunks: Any = None
    test_chunks: Any = None
    allow_overlap: bool = False
    every_split: bool = False
    reasoning: str | None = None
    key_frame: str = "default"
    key_frame_us: int = 5_100_000
    events: str = "all"
    skip_bad: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("procedural", "road", "commonroad", "files", "pai"))
        suites = ("hard", "bench") if self.source == "road" else ()
        check_choice("split", self.split, ("train", "val", "test", *suites))
        for key in ("train_scenes", "val_scenes", "test_scenes"):
            check_range(key, getattr(self, key), minimum=1, maximum=1_000_000)
        if self.source == "commonroad" and not self.path:
            raise ConfigError("commonroad needs a folder or file of CommonRoad XML: dataset.path=DIR", key="path")
        if self.source == "files" and not self.path:
            raise ConfigError("files needs a folder or file of .usdz or .xodr: dataset.path=DIR", key="path")
        if self.source == "pai" and not self.path:
            raise ConfigError("pai needs the dataset's folder: dataset.path=DIR", key="path")
        for key in ("chunk_ids", "train_chunks", "val_chunks", "test_chunks"):
            parse_chunks(getattr(self, key), key)
            if self.every_split and key != "chunk_ids" and getattr(self, key) is not None:
                raise ConfigError("means nothing beside every_split=true; use chunk_ids", key=key)
        check_choice("key_frame", self.key_frame, ("default", "events"))
        check_choice("events", self.events, ("all", "first"))
        check_range("key_frame_us", self.key_frame_us, minimum=0, maximum=20_000_000)
        if self.scene_ids is not None and not self.scene_ids:
            raise ConfigError("is empty; give at least one scene or null", key="scene_ids")
        if self.scene_ids is not None and self.test_suite_id is not None:
            raise ConfigError("and scene_ids exclude each other; set one of them to null", key="test_suite_id")


@dataclass
class TermSection:
    """One reward term: `type` names the plugin, `scale` multiplies its value, the other keys are the plugin's."""

    type: str
    scale: float
    config: Any


@dataclass
class RewardSection:
    """The reward is the sum of scale · term."""

    terms: dict[str, TermSection] = field(default_factory=dict)


@dataclass
class RolloutSection:
    """How episodes are made.

    Attributes:
        slots: episodes that run side by side.
        group_size: G, episodes of one scene and world seed that are compared.
        scenes_per_step: S, groups of a training step.
        minimum_group: a group with fewer valid episodes is dropped and counted.
        retries: further attempts after a transient failure of the simulator.
        min_ready: slots to wait for before a forward; 0 takes half of the running ones.
        timeout_s: longest wait for them.
        groups: what `alpagym rollout` drives: this many groups; 0 drives a group in each scene of dataset.split.
        mode: how its policy draws: sample | mean (then one drive a group: all would be equal).
        temperature: of its exploration.
        workers: processes that drive; 0 and 1 drive in the trainer's own, except with deploy=ray or slurm.
        device: where a worker's policy computes: cpu | cuda (workers take turns on their machine's GPUs).
        restarts: how often a worker that ends is started again without driving an episode to its end in between.
        straggler_s: a worker that has an episode for longer than this is ended and started again.

    """

    slots: int = 256
    group_size: int = 8
    scenes_per_step: int = 32
    minimum_group: int = 2
    retries: int = 2
    min_ready: int = 0
    timeout_s: float = 30.0
    groups: int = 0
    mode: str = "sample"
    temperature: float = 1.0
    workers: int = 0
    device: str = "cpu"
    restarts: int = 3
    straggler_s: float = 900.0

    def __post_init__(self) -> None:
        check_range("slots", self.slots, minimum=1, maximum=65536)
        check_range("group_size", self.group_size, minimum=2, maximum=4096)
        check_range("scenes_per_step", self.scenes_per_step, minimum=1, maximum=65536)
        check_range("minimum_group", self.minimum_group, minimum=2, maximum=self.group_size)
        check_range("retries", self.retries, minimum=0, maximum=100)
        check_range("min_ready", self.min_ready, minimum=0, maximum=self.slots)
        check_range("timeout_s", self.timeout_s, above=0)
        check_range("groups", self.groups, minimum=0)
        check_choice("mode", self.mode, ("sample", "mean"))
        check_range("temperature", self.temperature, above=0, maximum=100)
        check_range("workers", self.workers, minimum=0, maximum=min(self.slots, 4096))
        check_choice("device", self.device, ("cpu", "cuda"))
        check_range("restarts", self.restarts, minimum=0, maximum=1000)
        check_range("straggler_s", self.straggler_s, above=0)

    @property
    def slots_of_worker(self) -> int:
        """Episodes that one worker drives side by side: its part of `slots`, rounded up."""
        return -(-self.slots // max(self.workers, 1))


@dataclass
class EvaluationSection:
    """How a policy is measured: every scene of the split once a seed, with its mean action.

    Attributes:
        seeds: of the drives; with several, each scene is driven once a seed.
        every_updates: training steps between evaluations on val, which choose the best checkpoint; 0: none.
        bootstrap: resamples behind an interval.
        videos: whether the best, median and worst drive of the final evaluation are driven again and filmed.
        references: whether the recording and policies that park, creep and weave drive its scenes too, for the report;
            in the embedded world only, where that takes seconds.
        samples: open-loop worlds only: plans drawn a scene and seed, for the minADE family; 0 takes the mean plan.
        temperature, top_p: of these draws; the defaults are the published ones.

    """

    seeds: list[int] = field(default_factory=lambda: [1])
    every_updates: int = 10
    bootstrap: int = 2000
    videos: bool = True
    references: bool = True
    samples: int = 0
    temperature: float = 0.6
    top_p: float = 0.98

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ConfigError("needs at least one seed", key="seeds")
        if len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"names a seed twice: {self.seeds}", key="seeds")
        check_range("every_updates", self.every_updates, minimum=0)
        check_range("bootstrap", self.bootstrap, minimum=100, maximum=1_000_000)
        check_range("samples", self.samples, minimum=0, maximum=1024)
        check_range("temperature", self.temperature, above=0, maximum=100)
        check_range("top_p", self.top_p, above=0, maximum=1)


@dataclass
class CheckpointSection:
    """When weights are kept.

    Attributes:
        every_updates: a checkpoint every so many training steps (and at the end of each stage).
        keep: how many of the newest stay.
        path: a checkpoint to start from (its weights only); null starts fresh.

    """

    every_updates: int = 20
    keep: int = 3
    path: str | None = None

    def __post_init__(self) -> None:
        check_range("every_updates", self.every_updates, minimum=1)
        check_range("keep", self.keep, minimum=1)


@dataclass
class StoreSection:
    """Which episodes are kept as files, and what of them; results do not depend on it.

    Attributes:
        path: the store's folder; null takes `episodes` in the run directory.
        record: whose episodes are kept: rollout, evaluate, train.
        frames: pictures: seen (pixels, each frame once, losslessly) | arrived (as the simulator encoded them) | none.
        labels: privileged labels to keep beside them, such as target_plan_rig; the simulator computes them for it.
        keep_last: this many of the newest stay; with all four rules off everything does.
        keep_best, keep_worst: this many of the highest and lowest driving score stay.
        keep_failures: every collision, every drive that left the road and every failed episode stays.

    """

    path: str | None = None
    record: list[str] = field(default_factory=lambda: ["rollout"])
    frames: str = "seen"
    labels: list[str] = field(default_factory=list)
    keep_last: int = 0
    keep_best: int = 0
    keep_worst: int = 0
    keep_failures: bool = False

    def __post_init__(self) -> None:
        for i, purpose in enumerate(self.record):
            check_choice(f"record[{i}]", purpose, ("rollout", "evaluate", "train"))
        check_choice("frames", self.frames, ("seen", "arrived", "none"))
        for key in ("keep_last", "keep_best", "keep_worst"):
            check_range(key, getattr(self, key), minimum=0)
        if self.path == "":
            raise ConfigError("must not be empty; null takes the run directory", key="path")


@dataclass
class Plugin:
    """A plugin section after validation: `type` is the entry point's name, `config` its config dataclass."""

    type: str
    config: Any


def _default_loggers() -> dict[str, Plugin]:
    return {"console": Plugin("console", ConsoleConfig()), "jsonl": Plugin("jsonl", JsonlConfig())}


@dataclass
class LoggingSection:
    """Where numbers go: any name -> a logger, whose `type` names the plugin."""

    loggers: dict[str, Plugin] = field(default_factory=_default_loggers)


@dataclass
class RunConfig:
    """A whole run. `simulator`, `policy`, `transport` and `trainer` are plugin sections."""

    run: RunSection
    simulator: Plugin
    dataset: DatasetSection
    policy: Plugin
    reward: RewardSection
    rollout: RolloutSection
    transport: Plugin
    trainer: Plugin
    evaluation: EvaluationSection
    checkpoint: CheckpointSection
    store: StoreSection = field(default_factory=StoreSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    deploy: DeploySection = field(default_factory=DeploySection)
    topology: TopologySection = field(default_factory=TopologySection)
    learner: LearnerSection = field(default_factory=LearnerSection)
    alpasim: AlpasimSection = field(default_factory=AlpasimSection)
    cosmos: CosmosSection = field(default_factory=CosmosSection)
    expected_valid_steps: int = 35

    def __post_init__(self) -> None:
        _check_horizon(self.expected_valid_steps)

    @property
    def has_workers(self) -> bool:
        """Whether episodes are driven by processes besides the trainer's."""
        return self.rollout.workers >= (2 if self.deploy.kind == "local" else 1)

    @property
    def config_hash(self) -> str:
        """SHA-256 of the frozen config without what results do not depend on.

        That is name, place, store, logging, deploy, and how many workers drive.
        """
        data = {k: v for k, v in to_mapping(self).items() if k not in ("store", "logging", "deploy")}
        data["run"] = {k: v for k, v in data["run"].items() if k not in ("name", "root")}
        data["rollout"] = {k: v for k, v in data["rollout"].items() if k not in ("workers", "restarts", "straggler_s")}
        # An AlpaSim that is started again, for `resume`, listens elsewhere.
        data["simulator"].pop("address", None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


PLUGIN_SECTIONS = {
    "simulator": "simulators",
    "policy": "policies",
    "transport": "transports",
    "trainer": "trainers",
}


# ---------------------------------------------------------------- mapping -> RunConfig


def from_mapping(data: Mapping[str, Any]) -> RunConfig:
    """A validated `RunConfig` from plain data (resolved: no interpolations).

    Raises:
        ConfigError: names the full dotted key, the value, and the nearest valid key or the range.
        PluginError: a `type` that is not installed or cannot be imported.

    """
    data = dict(data)
    version = data.pop("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"this config has schema {version}, this program reads {SCHEMA_VERSION}", key="schema_version"
        )
    _refuse_none_text(data, "")
    errors: list[Exception] = []
    values: dict[str, Any] = {}
    try:
        _check_keys(data, [f.name for f in fields(RunConfig)], "")
    except ConfigError as err:
        errors.append(err)
    for f in fields(RunConfig):
        try:
            if f.name in data or _required(f):
                values[f.name] = _section(f.name, data.get(f.name))
        except (ConfigError, PluginError) as err:
            errors.append(err)
    if not errors:
        return RunConfig(**values)
    if len(errors) == 1:
        raise errors[0]
    raise ConfigErrors(errors)


def _check_horizon(steps: int) -> None:
    check_range("expected_valid_steps", steps, minimum=1, maximum=100_000)


def _section(name: str, data: Any) -> Any:
    if name in PLUGIN_SECTIONS:
        return _plugin(PLUGIN_SECTIONS[name], data, name)
    if name == "reward":
        return reward_from_mapping(data)
    if name == "logging":
        return logging_from_mapping(data)
    hint = _hints(RunConfig)[name]
    if name == "expected_valid_steps":
        steps = _convert(data, hint, name)
        _check_horizon(steps)
        return steps
    return build_section(hint, {} if data is None else data, name)


def load_run_config(path: Path) -> RunConfig:
    """The frozen config of a run directory or a YAML file."""
    from omegaconf import OmegaConf

    file = path / "config.yaml" if path.is_dir() else path
    try:
        data = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except FileNotFoundError as err:
        raise ConfigError(f"{file} does not exist; is {path} a run directory?") from err
    except Exception as err:  # OmegaConf passes on the errors of the YAML parser, which is no dependency of ours
        raise ConfigError(f"{file} cannot be read: {err}") from err
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no mapping")
    return from_mapping(typing.cast("dict[str, Any]", data))


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """Plain data that `from_mapping` reads back to an equal config; every default is written out."""
    data = dataclasses.asdict(config)
    for name in PLUGIN_SECTIONS:
        data[name] = {"type": data[name]["type"], **data[name]["config"]}
    data["reward"] = {
        "terms": {
            name: {"type": term["type"], "scale": term["scale"], **term["config"]}
            for name, term in data["reward"]["terms"].items()
        }
    }
    data["logging"] = {
        "loggers": {
            name: {"type": logger["type"], **logger["config"]} for name, logger in data["logging"]["loggers"].items()
        }
    }
    return {"schema_version": SCHEMA_VERSION, **data}


def build_section(cls: type, data: Any, key: str) -> Any:
    """An instance of a config dataclass from a mapping; errors carry the full dotted key below `key`."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"must be a mapping, got {data!r}", key=key)
    hints = _hints(cls)
    _check_keys(data, [f.name for f in fields(cls)], key)
    values = {name: _convert(value, hints[name], f"{key}.{name}") for name, value in data.items()}
    missing = [f.name for f in fields(cls) if f.name not in values and _required(f)]
    if missing:
        raise ConfigError("is required", key=f"{key}.{missing[0]}")
    try:
        return cls(**values)
    except ConfigError as err:
        raise err.under(key) from err


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _plugin(group: str, data: Any, key: str) -> Plugin:
    if not isinstance(data, Mapping) or not data.get("type"):
        raise ConfigError("needs a `type` that names an installed plugin", key=f"{key}.type")
    rest = {k: v for k, v in data.items() if k != "type"}
    if not isinstance(data["type"], str):
        raise ConfigError(f"must be a plugin's name, got {data['type']!r}; quote it", key=f"{key}.type")
    return Plugin(data["type"], build_section(load(group, data["type"]), rest, key))


def reward_from_mapping(data: Any) -> RewardSection:
    """A validated reward section from `{terms: {name: {type, scale, …}}}`."""
    if not isinstance(data, Mapping):
        raise ConfigError("must be a mapping with `terms`", key="reward")
    _check_keys(data, ["terms"], "reward")
    terms = data.get("terms")
    if not isinstance(terms, Mapping) or not terms:
        raise ConfigError("needs at least one term", key="reward.terms")
    built = {}
    for name, term in terms.items():
        key = f"reward.terms.{name}"
        if not isinstance(term, Mapping):
            raise ConfigError(f"must be a mapping with `type` and `scale`, got {term!r}", key=key)
        rest = {k: v for k, v in term.items() if k != "scale"}
        if "scale" not in term:
            raise ConfigError("is required: the term's weight in the sum", key=f"{key}.scale")
        scale = _convert(term["scale"], float, f"{key}.scale")
        check_range(f"{key}.scale", scale)
        plugin = _plugin("rewards", rest, key)
        built[str(name)] = TermSection(plugin.type, scale, plugin.config)
    return RewardSection(built)


def logging_from_mapping(data: Any) -> LoggingSection:
    """A validated logging section from `{loggers: {name: {type, …}}}`."""
    if not isinstance(data, Mapping):
        raise ConfigError("must be a mapping with `loggers`", key="logging")
    _check_keys(data, ["loggers"], "logging")
    loggers = data.get("loggers")
    if not isinstance(loggers, Mapping):
        raise ConfigError("must be a mapping of loggers, {} for none", key="logging.loggers")
    built = {str(name): _plugin("loggers", logger, f"logging.loggers.{name}") for name, logger in loggers.items()}
    return LoggingSection(built)


def _check_keys(data: Mapping[str, Any], known: list[str], key: str) -> None:
    for name in data:
        if name == "_target_":
            raise ConfigError("is refused: a config names plugins by `type`, never code", key=_join(key, name))
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            # `lr` is too short to resemble `optm_lr`, and is what it means.
            close = close or [other for other in known if str(name) in other.split("_")]
            hint = f"did you mean {_join(key, close[0])}?" if close else f"known here: {', '.join(known)}"
            raise ConfigError(f"unknown key; {hint}", key=_join(key, str(name)))


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _refuse_none_text(data: Any, key: str) -> None:
    """The text "None" is what `key=None` gives on a command line; it never means anything but null."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            _refuse_none_text(value, _join(key, str(name)))
    elif isinstance(data, (list, tuple)):
        for i, value in enumerate(data):
            _refuse_none_text(value, f"{key}[{i}]")
    elif data == "None":
        raise ConfigError("is the text 'None'; use null", key=key)


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the annotated type; no silent change of meaning (text stays text, a bool is no number)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if type(None) in arguments:
        if value is None:
            return None
        (hint,) = [a for a in arguments if a is not type(None)]
        return _convert(value, hint, key)
    if value is None:
        raise ConfigError(f"must be {_spell(hint)}, got null", key=key)
    if is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else build_section(hint, value, key)
    if origin in (list, tuple) or hint is list:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"must be a list, got {value!r}", key=key)
        item = arguments[0] if arguments else Any
        return [_convert(v, item, f"{key}[{i}]") for i, v in enumerate(value)]
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"must be a mapping, got {value!r}", key=key)
        item = arguments[1] if arguments else Any
        return {str(k): _convert(v, item, f"{key}.{k}") for k, v in value.items()}
    if hint is str:
        if not isinstance(value, str):
            raise ConfigError(f"must be text but was read as {_spell(type(value))} {value!r}; quote it", key=key)
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"must be true or false, got {value!r}", key=key)
        return value
    if hint is int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value):  # from ${oc.env:NAME}
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"must be a whole number, got {value!r}", key=key)
        return value
    if hint is float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise ConfigError(f"must be a number, got {value!r}", key=key) from None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"must be a number, got {value!r}", key=key)
        try:
            return float(value)
        except OverflowError:
            raise ConfigError("must be a number below 1e308", key=key) from None
    raise ConfigError(f"has a type that configs cannot hold: {hint!r}", key=key)


def _spell(hint: Any) -> str:
    return {str: "text", int: "the whole number", float: "the number", bool: "the truth value"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )
