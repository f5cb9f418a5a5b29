"""What a Slurm job asks for, as dataclass; the job's script is rendered from it (alpagym_host.slurm)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from alpagym_plugins import ConfigError, check_choice, check_range

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=.+)?")
# Options of sbatch that have a key of their own: given twice, the later one would win unseen.
_OPTION_KEYS = {
    **{
        name: f"deploy.slurm.{name.replace('-', '_')}" for name in ("partition", "account", "qos", "constraint", "time")
    },
    **{name: f"deploy.slurm.{name.replace('-', '_')}" for name in ("job-name", "exclusive", "cpus-per-task", "mem")},
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gres"), "topology"),
    **dict.fromkeys(("requeue", "no-requeue"), "deploy.requeues"),
    **dict.fromkeys(("output", "error", "chdir", "open-mode"), "the run directory"),
    **dict.fromkeys(("wrap", "parsable", "test-only", "hold"), "the script itself"),
    "signal": "deploy.slurm.warn_s",
    "export": "deploy.slurm.export_env",
    "export-file": "deploy.slurm.export_env",
    "array": "the values of a sweep: --multirun",
}


@dataclass
class SlurmSection:
    """A Slurm job: where it runs, in which container, with which environment.

    Attributes:
        partition, account, qos, constraint: as sbatch takes them; null leaves them out.
        time: limit, such as 04:00:00.
        warn_s: how long before that limit the run is asked to keep a checkpoint, s.
        job_name: any line of text.
        exclusive: whole nodes.
        cpus_per_task: of each task; null leaves it to Slurm.
        mem: of each node, such as 64G; null leaves it to Slurm.
        extra: further options of sbatch, one an item, such as --reservation=NAME.
        parallel: of a sweep, how many jobs may run at once; 0: as many as there is room for.
        python: the interpreter that has AlpaGym on the nodes; null: the one that submits, in a container python3.
        container: what runs container_image: pyxis (srun --container-image, with enroot) | apptainer.
        container_image: a .sqsh or .sif file, or a registry's reference with tag; null runs without a container.
        container_cache: folder that a reference is fetched into, once; null leaves that to the container's own cache.
        container_mounts: SRC[:DST[:FLAGS]], absolute. The run directory and the folder of the submission need one.
        env: variables of the job, written into its script; not for secrets.
        export_env: NAMES of variables that the job gets from where it is submitted; values are never written down.

    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str = "04:00:00"
    warn_s: int = 120
    job_name: str = "alpagym"
    exclusive: bool = True
    cpus_per_task: int | None = None
    mem: str | None = None
    extra: list[str] = field(default_factory=list)
    parallel: int = 0
    python: str | None = None
    container: str = "pyxis"
    container_image: str | None = None
    container_cache: str | None = None
    container_mounts: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    export_env: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        from alpagym_runtime.secrets import is_secret_name

        if not re.fullmatch(r"(\d+-)?\d{1,2}(:\d{2}){0,2}|\d+", self.time):
            raise ConfigError(f"must be a Slurm time limit such as 04:00:00 or 1-12, got {self.time!r}", key="time")
        check_range("warn_s", self.warn_s, minimum=1, maximum=65_535)  # sbatch's own limit
        if self.warn_s >= self.limit_s:
            raise ConfigError(
                f"the run would be asked to stop as it begins: must be below time={self.time} ({self.limit_s} s), "
                f"got {self.warn_s}",
                key="warn_s",
            )
        check_range("parallel", self.parallel, minimum=0, maximum=100_000)
        check_choice("container", self.container, ("pyxis", "apptainer"))
        if self.cpus_per_task is not None:
            check_range("cpus_per_task", self.cpus_per_task, minimum=1)
        for key in (
            *("partition", "account", "qos", "constraint", "job_name", "mem"),
            *("python", "container_image", "container_cache"),
        ):
            if (value := getattr(self, key)) is not None:
                _check_line(key, value)
        for i, mount in enumerate(self.container_mounts):
            if not mount.startswith("/") and not mount.startswith("YOUR_"):
                raise ConfigError(f"must be absolute: /SRC[:/DST[:FLAGS]], got {mount!r}", key=f"container_mounts[{i}]")
            if "," in mount:
                raise ConfigError("has a comma, which separates mounts; one an item", key=f"container_mounts[{i}]")
            _check_line(f"container_mounts[{i}]", mount)
        for name, value in self.env.items():
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{name!r} is no name of a variable: letters, digits and _", key="env")
            if "\0" in value:
                raise ConfigError("holds a NUL byte, which no variable can", key=f"env.{name}")
            if is_secret_name(name):
                text = "is the name of a secret, and this value would be written into the job's script"
                raise ConfigError(f"{text}; set it where you submit, and name it in export_env", key=f"env.{name}")
            if name in self.export_env:
                raise ConfigError("is in export_env too; which of the two holds?", key=f"env.{name}")
        for i, name in enumerate(self.export_env):
            if not _NAME.fullmatch(name):
                # The text may be NAME=SECRET, so it is not repeated.
                raise ConfigError(
                    "must be the name of a variable and nothing else; its value is taken when the job is submitted",
                    key=f"export_env[{i}]",
                )
        for i, option in enumerate(self.extra):
            _check_line(f"extra[{i}]", option)
            found = _OPTION.match(option)
            if found is None:
                raise ConfigError(f"must be --OPTION or --OPTION=VALUE of sbatch, got {option!r}", key=f"extra[{i}]")
            if (name := found["name"]) in _OPTION_KEYS:
                raise ConfigError(f"--{name} is set from {_OPTION_KEYS[name]}", key=f"extra[{i}]")

    @property
    def limit_s(self) -> int:
        """The time limit, s. Slurm's forms: M | M:S | H:M:S | D-H | D-H:M | D-H:M:S."""
        days, dash, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        if dash:
            hours, minutes, seconds = (*parts, 0, 0)[:3]
        else:
            # Without days the last two are minutes and seconds, and one number is minutes.
            hours, minutes, seconds = [(0, *parts, 0), (0, *parts), tuple(parts)][len(parts) - 1]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_line(key: str, text: str) -> None:
    """What becomes a line of a script, or part of one."""
    if not text or not text.isprintable():
        raise ConfigError(f"must be one line of printable text, got {text!r}", key=key)
