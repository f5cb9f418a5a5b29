"""`alpagym serve`: the embedded world as an AlpaSim in this process, until a signal or `shut_down`."""

from __future__ import annotations

import json
import logging
import re
import signal
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import RunConfig, to_mapping


def serve(
    config: RunConfig,
    console: Console,
    *,
    host: str,
    port: int,
    slots: int,
    drivers: list[str],
    sessions_per_driver: int,
    force_gt_ms: int,
    steps: int,
    ask_in_warm_up: bool,
    drive_timeout_s: float,
    log_dir: Path | None,
    cameras: list[str],
) -> None:
    """Serve until SIGINT, SIGTERM or a client's `shut_down`.

    Raises:
        ConfigError: the simulator is not the embedded one, or an option does not fit it.

    """
    from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
    from alpagym_runtime.simulators.embedded.server import ServeOptions, WorldServer, build_world, declare_cameras
    from alpagym_runtime.simulators.embedded.server_rollout import RolloutOptions

    simulator = config.simulator.config
    if not isinstance(simulator, EmbeddedConfig):
        raise ConfigError(f"serves the embedded world only, got {config.simulator.type!r}", key="simulator")
    for address in drivers:
        name, _, digits = address.rpartition(":")
        if not name or not digits.isdigit() or not 0 < int(digits) < 65536:
            raise ConfigError(f"must be HOST:PORT, got {address!r}", key="--driver")
    period_us = simulator.control_period_us
    if force_gt_ms * 1000 % period_us:
        raise ConfigError(
            f"must be a multiple of simulator.control_period_us = {period_us}, got {force_gt_ms} ms",
            key="--force-gt-ms",
        )
    sizes = {}
    for camera in cameras:
        found = re.fullmatch(r"([^=]+)=([0-9]{1,5})x([0-9]{1,5})", camera)
        if found is None:
            raise ConfigError(f"must be NAME=HEIGHTxWIDTH, such as front=320x512, got {camera!r}", key="--camera")
        sizes[found[1]] = (int(found[2]), int(found[3]))
    rollout = RolloutOptions(
        period_us,
        force_gt_ms * 1000,
        steps,
        pose_reporting_interval_us=simulator.pose_reporting_interval_us,
        skip_driver_during_force_gt=not ask_in_warm_up,
        zero_dynamics=simulator.alpasim_quirks,
        drive_timeout_s=drive_timeout_s,
        cameras=declare_cameras(simulator.cameras, sizes),
    )
    if steps <= rollout.warmup_ticks:
        raise ConfigError(
            f"must exceed the {rollout.warmup_ticks} steps that the recording drives, got {steps}", key="--steps"
        )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    console.print("compiling and loading the first scene", highlight=False)
    world = build_world(simulator, config.dataset, slots, rollout, sizes)
    whole = to_mapping(config)
    identity = json.dumps([whole["simulator"], whole["dataset"]], sort_keys=True)
    options = ServeOptions(
        rollout,
        host=host,
        port=port,
        drivers=tuple(drivers),
        sessions_per_driver=sessions_per_driver,
        identity=identity,
    )
    open_log = None
    if log_dir is not None:
        from alpagym_runtime.simulators.embedded.server_asl import AslLog

        log_dir.mkdir(parents=True, exist_ok=True)
        open_log = partial(AslLog, log_dir)
    server = WorldServer(options, world, open_log)

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.append(signum)

    stopped: list[int] = []
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    server.start()
    try:
        told = f"{len(world.spec.scenes)} scenes at {host}:{server.port}, {slots} rollouts at once"
        console.print(told, highlight=False, soft_wrap=True)
        while not stopped and not server.wait(0.2):
            pass
    finally:
        server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
        counts = server.counts
        console.print(f"{counts.succeeded} rollouts, {counts.failed} failed", highlight=False)
