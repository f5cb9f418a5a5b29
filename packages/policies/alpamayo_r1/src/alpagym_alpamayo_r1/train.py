"""`torchrun -m alpagym_alpamayo_r1.train --config-name sft_stage1 key=value …`: the published SFT, as a run of ours.

`paths.output_dir` becomes a run directory with a folder `checkpoint-<step>` for each checkpoint; the same command goes
on where it stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from alpagym_alpamayo_r1.recipe import Recipe, run_config
from alpagym_alpamayo_r1.recipe_command import Lines, Stop, start
from alpagym_plugins import ConfigError
from alpagym_runtime.files import write_atomic
from alpagym_runtime.run_config import RunConfig, load_run_config, to_mapping
from alpagym_runtime.trainers.run import Run
from alpagym_runtime.trainers.team import Team


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    start(train, "alpagym_alpamayo_r1.train", sys.argv[1:] if arguments is None else arguments, evaluating=False)


def train(recipe: Recipe, team: Team, device: str) -> int:
    """Train in this process of a team; the exit code."""
    config = run_config(recipe, evaluating=False, device=device, processes=team.size)
    directory = Path(recipe.values["paths"]["output_dir"]).expanduser().absolute()
    problem = _prepare(directory, config) if team.writes else ""
    if problem := next(filter(None, team.gather(problem)), ""):
        raise ConfigError(problem, key="paths.output_dir")
    stop = Stop()
    outcome = Run(config, directory, Lines() if team.writes else None, stop, team).train()
    if team.writes:
        newest = max(directory.glob("checkpoint-*"), key=lambda place: int(place.name[11:]), default=None)
        print(f"{'done' if outcome.completed else 'stopped'}: {newest or directory}", flush=True)
    return 0 if outcome.completed else 128 + stop.number


def _prepare(directory: Path, config: RunConfig) -> str:
    """Make the run directory, or find it as it was; what is wrong, else empty."""
    from omegaconf import OmegaConf

    file = directory / "config.yaml"
    if file.is_file():
        if load_run_config(directory).config_hash == config.config_hash:
            return ""
        return f"{directory} holds a run with other settings; give another directory, or the settings of {file}"
    if directory.exists() and any(directory.iterdir()):
        return f"{directory} is not empty and no run; give another directory"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "command", b"train")
    write_atomic(file, OmegaConf.to_yaml(OmegaConf.create(to_mapping(config))).encode())
    return ""


if __name__ == "__main__":
    main()
