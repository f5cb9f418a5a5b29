"""`alpagym drive`: a policy as a plain AlpaSim driver in this process, until a signal."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import FrameType

from rich.console import Console

from alpagym_host.compose import compose
from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import Plugin, load_run_config
from alpagym_runtime.types import Policy, TrainablePolicy


def build_policy(name: str | None, checkpoint: Path | None, overrides: list[str], device: str) -> tuple[Policy, str]:
    """The policy and its name: a policy's own defaults with overrides on top, or the one that a run trained.

    Raises:
        ConfigError: neither was named, or the checkpoint does not say which policy it is.

    """
    if name is None and checkpoint is None:
        raise ConfigError("name a policy: --policy NAME, or --checkpoint RUN_DIR or its checkpoint")
    if name is not None:
        section = compose([f"policy={name}", *overrides]).policy
    else:
        assert checkpoint is not None
        section = _trained(checkpoint, overrides)
    policy = section.config.build(device)
    if checkpoint is not None:
        if not isinstance(policy, TrainablePolicy):
            raise ConfigError(f"{section.type!r} has no weights to load", key="--checkpoint")
        from alpagym_runtime.trainers.checkpoints import load_weights

        policy.load(load_weights(checkpoint), 0)
    return policy, section.type


def _trained(checkpoint: Path, overrides: list[str]) -> Plugin:
    for folder in (checkpoint, *checkpoint.resolve().parents[:2]):
        if (folder / "config.yaml").is_file():
            return compose(overrides, load_run_config(folder)).policy
    raise ConfigError(
        f"no config.yaml at or above {checkpoint}: say which policy it is with --policy", key="--checkpoint"
    )


def serve(
    policy: Policy,
    name: str,
    console: Console,
    *,
    host: str,
    port: int,
    sessions: int,
    max_batch: int,
    window_ms: float | None,
    seed: int,
    samples: bool,
    decode_threads: int,
    stats: Path | None,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    from alpagym_runtime.simulators.alpasim.config import ServerConfig
    from alpagym_runtime.simulators.alpasim.drive import PolicyDriver

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    config = ServerConfig(host=host, port=port, samples=samples, decode_threads=decode_threads)
    window_s = None if window_ms is None else window_ms * 1e-3
    driver = PolicyDriver(policy, config, sessions=sessions, max_batch=max_batch, window_s=window_s, seed=seed)

    def stop(signum: int, frame: FrameType | None) -> None:
        driver.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    driver.start()
    try:
        console.print(f"{name} drives at {host}:{driver.server.port}", highlight=False, soft_wrap=True)
        driver.serve(stats)
    finally:
        driver.close()
        for number, handler in before.items():
            signal.signal(number, handler)
