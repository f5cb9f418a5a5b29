"""`torchrun -m alpagym_alpamayo_r1.evaluate --config-name sft_stage1|2 evaluate.eval_ckpt=DIR …`: published metrics.

Prints `val/count` and `val/metric/<name>` (m); the rows behind them are in `evaluation-<n>` below `paths.output_dir`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from alpagym_alpamayo_r1.recipe import Recipe, run_config
from alpagym_alpamayo_r1.recipe_command import Lines, Stop, start
from alpagym_runtime.files import write_atomic
from alpagym_runtime.run_config import to_mapping
from alpagym_runtime.trainers.run import Run
from alpagym_runtime.trainers.team import Team


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    start(evaluate, "alpagym_alpamayo_r1.evaluate", sys.argv[1:] if arguments is None else arguments, evaluating=True)


def evaluate(recipe: Recipe, team: Team, device: str) -> int:
    """Evaluate in this process of a team; the exit code."""
    from omegaconf import OmegaConf

    config = run_config(recipe, evaluating=True, device=device, processes=team.size)
    output = Path(recipe.values["paths"]["output_dir"]).expanduser().absolute()
    number = 0
    if team.writes:
        number = 1 + max((int(n) for p in output.glob("evaluation-*") if (n := p.name[11:]).isdigit()), default=0)
        (output / f"evaluation-{number}").mkdir(parents=True)
    directory = output / f"evaluation-{team.gather(number)[0]}"
    if team.writes:
        write_atomic(directory / "command", b"evaluate")
        write_atomic(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(to_mapping(config))).encode())
    stop = Stop()
    outcome = Run(config, directory, Lines() if team.writes else None, stop, team).evaluate()
    if team.writes and outcome.completed:
        _show(outcome.summary["evaluations"]["final"]["open_loop"])
    return 0 if outcome.completed else 128 + stop.number


def _show(metrics: dict[str, Any]) -> None:
    print(f"val/count {metrics['count']}")
    for name in sorted(metrics.keys() - {"count", "samples"}):
        if metrics[name] is not None:
            print(f"val/metric/{name} {metrics[name]:.4f}")


if __name__ == "__main__":
    main()
