"""Compile the embedded world's kernels in a process of its own, before a run needs them.

The compiler leaves 0.4 to 0.5 GB behind in the process that called it; a run that loads the kernels from the cache
stays that much smaller. The child drives one short episode of the run's own config, so the cache holds what the run
will call; what it has not met is compiled in the run, as if there were no child. A mark beside the kernels says that
this was done.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from alpagym_runtime.children import end_with_parent
from alpagym_runtime.run_config import RunConfig, load_run_config
from alpagym_runtime.telemetry.reporter import Reporter

_POLL_S = 0.2
_TICKS = 3


def compile_ahead(config: RunConfig, directory: Path, reporter: Reporter, check_stop: Callable[[], None]) -> float:
    """Fill the cache of kernels for a run, unless that was done or there is none to fill.

    Args:
        config: the run's.
        directory: the run's, with its `config.yaml`; the compiler's output goes to `logs/compile.log`.
        reporter: shows that it is going on.
        check_stop: raises to give up; the child ends then.

    Returns:
        CPU seconds that it took.

    """
    mark = _mark(config)
    if mark is None or mark.exists():
        return 0.0
    before = _children_cpu_s()
    reporter.stage("compile kernels, once", 1, "child")
    (directory / "logs").mkdir(exist_ok=True)
    with (directory / "logs" / "compile.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "alpagym_runtime.rollouts.compile_ahead", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the run, which then ends its child
        )
    try:
        while child.poll() is None:
            check_stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
    finally:
        child.kill()
        child.wait()
    # Where it failed, the run meets the same and says so better.
    if child.returncode == 0:
        mark.touch()
    reporter.advance()
    return _children_cpu_s() - before


def _mark(config: RunConfig) -> Path | None:
    """The file that says that kernels like this config's are in the cache; None where nothing is to be compiled."""
    if config.simulator.type != "embedded":
        return None
    from alpagym_runtime.kernels import cache_folder
    from alpagym_runtime.simulators.embedded.rendering.compiled import picture_folder

    folder, pictures = cache_folder(), picture_folder()
    if folder is None or pictures is None:
        return None
    # A kernel's signature hardly depends on the config, but pictures are drawn for those who look only.
    if not config.policy.config.spec().cameras:
        return folder / "compiled"
    coded = config.simulator.config.cameras.encoding == "jpeg95"
    return pictures / f"with-{folder.name}{'-jpeg95' if coded else ''}"


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _drive(config: RunConfig, directory: Path) -> None:
    from alpagym_runtime.policies.noisy_expert import LABEL, Noise, NoisyExpert
    from alpagym_runtime.rollouts.collector import Collector
    from alpagym_runtime.rollouts.cores import Cores
    from alpagym_runtime.types import EpisodeRequest, Sampling

    expert = NoisyExpert(config.policy.config.spec(), Noise(1.0, 0.01, 0.9))
    cores = Cores(config, 1, directory)
    core, _ = cores.core(cores.world(config.dataset.split, (LABEL,)), expert.spec)
    request = EpisodeRequest(core.spec.scenes[0], horizon_ticks=_TICKS)
    Collector(core, expert, actor="expert").collect([request], Sampling())
    cores.close()


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)
    _drive(load_run_config(Path(sys.argv[1]) / "config.yaml"), Path(sys.argv[1]))
