"""Options of the AlpaSim world and of its driver server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_plugins import ConfigError, Problem, check_choice, check_range

if TYPE_CHECKING:
    from alpagym_runtime.machine import Machine
    from alpagym_runtime.run_config import RunConfig
    from alpagym_runtime.simulators.alpasim.simulator import AlpasimSimulator

INSTALL_UV = "https://docs.astral.sh/uv/getting-started/installation/"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass
class ServerConfig:
    """The egodriver server: where it listens and what it bears.

    Attributes:
        host: address to listen on; anything but loopback is open to the network without encryption, and warns.
        port: 0 takes a free one.
        max_message_mib: largest gRPC message in MiB, received or sent; a larger one gets RESOURCE_EXHAUSTED.
        idle_timeout_s: a session that neither sends nor waits for us this long is closed, its episode void.
        drive_timeout_s: longest that a `drive` call waits for a decision; then DEADLINE_EXCEEDED.
        decode_threads: threads that decode pictures.
        samples: answer with the plan among `sampled_trajectories` too, for AlpaSim's minADE (wants 5 s or more).

    """

    host: str = "127.0.0.1"
    port: int = 0
    max_message_mib: int = 64
    idle_timeout_s: float = 120.0
    drive_timeout_s: float = 600.0
    decode_threads: int = 2
    samples: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("must not be empty", key="host")
        check_range("port", self.port, minimum=0, maximum=65535)
        check_range("max_message_mib", self.max_message_mib, minimum=1, maximum=2047)
        check_range("idle_timeout_s", self.idle_timeout_s, above=0)
        check_range("drive_timeout_s", self.drive_timeout_s, above=0)
        check_range("decode_threads", self.decode_threads, minimum=1, maximum=256)


@dataclass
class AlpasimConfig:
    """NVIDIA AlpaSim, spoken to over gRPC; it calls the driver server that this opens.

    Attributes:
        address: HOST:PORT of a running AlpaSim runtime, or several with commas; rollouts go where there is room. Empty:
            one is started as the section `alpasim` says.
        control_period_us: AlpaSim's `control_timestep_us`; a drive that says otherwise fails.
        force_gt_duration_us: AlpaSim's own; the recording drives so long after the first frame.
        skip_driver_during_force_gt: AlpaSim's own; False: the policy is asked in the warm-up too (never trained on).
        driver_host: name under which AlpaSim reaches this process; null: `server.host`.
        connect_timeout_s: longest wait for an AlpaSim to answer at the start.
        rollout_timeout_s: longest that one rollout may take.
        frames: arrived: `TickBatch.frames` holds each picture that was seen, as it came; none.
        server: the driver server.

    """

    address: str = ""
    control_period_us: int = 100_000
    force_gt_duration_us: int = 1_700_000
    skip_driver_during_force_gt: bool = True
    driver_host: str | None = None
    connect_timeout_s: float = 30.0
    rollout_timeout_s: float = 600.0
    frames: str = "arrived"
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        check_range("control_period_us", self.control_period_us, minimum=10_000, maximum=2_000_000)
        check_range("force_gt_duration_us", self.force_gt_duration_us, minimum=0, maximum=600_000_000)
        if self.force_gt_duration_us % self.control_period_us:
            raise ConfigError(
                f"must be a multiple of control_period_us = {self.control_period_us}, got {self.force_gt_duration_us}",
                key="force_gt_duration_us",
            )
        check_range("connect_timeout_s", self.connect_timeout_s, above=0)
        check_range("rollout_timeout_s", self.rollout_timeout_s, above=0)
        check_choice("frames", self.frames, ("arrived", "none"))
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigError(f"must be HOST:PORT, got {address!r}", key="address")

    @property
    def addresses(self) -> list[str]:
        """The runtimes' addresses."""
        return [part.strip() for part in self.address.split(",") if part.strip()]

    @property
    def warmup_ticks(self) -> int:
        """Control steps that the recording drives."""
        return self.force_gt_duration_us // self.control_period_us

    def located(self, directory: Path) -> AlpasimConfig:
        """These options with the address of the AlpaSim that was started for the run of a directory.

        Raises:
            SimulatorError: none has been, or it no longer beats.

        """
        if self.addresses:
            return self
        from alpagym_runtime.endpoints import Registry, own_address
        from alpagym_runtime.errors import SimulatorError

        found = Registry(directory).wait("alpasim", self.connect_timeout_s)
        if not found:
            raise SimulatorError(
                f"no AlpaSim is published in {Registry(directory).folder}, and simulator.address names none; one is "
                f"started by: alpagym resume {directory}",
                code="NO_RUNTIME",
            )
        located = replace(self, address=",".join(endpoint.address for endpoint in found))
        if all(endpoint.host.startswith("127.") for endpoint in found) or not self.server.host.startswith("127."):
            return located
        # It runs on another node, and calls our drivers.
        return replace(located, server=replace(self.server, host=own_address()))

    def gpus(self, config: RunConfig) -> dict[str, int]:
        """GPUs that are AlpaSim's alone, where one is started for the run."""
        topology = config.topology
        own = topology.alpasim_nodes * topology.gpus_per_node + topology.train_nodes * topology.alpasim_gpus
        return {"AlpaSim": 0 if self.addresses else own}

    def preflight(self, config: RunConfig, machine: Machine) -> Iterator[Problem]:
        """Where an AlpaSim is to be started: what it drives, what it needs, where it comes from."""
        dataset = config.dataset
        if self.addresses:
            if dataset.test_suite_id is not None:
                yield Problem(
                    "dataset.test_suite_id",
                    dataset.test_suite_id,
                    f"the AlpaSim at {self.address} was started with its scenes",
                    "dataset.test_suite_id=null",
                )
            return
        if dataset.scene_ids is None and dataset.test_suite_id is None:
            yield Problem(
                "dataset.scene_ids",
                None,
                "an AlpaSim is started for this run, and needs to know its scenes",
                "dataset.scene_ids=[ID,…] or dataset.test_suite_id=SUITE, or simulator.address=HOST:PORT",
            )
        section = config.alpasim
        if section.repo_path is not None:
            folder = Path(section.repo_path).expanduser()
            if not (folder / "pyproject.toml").is_file() or not (folder / "src").is_dir():
                yield Problem(
                    "alpasim.repo_path",
                    section.repo_path,
                    "is no checkout of AlpaSim (pyproject.toml and src/)",
                    f"git clone {section.repo_url} {folder}",
                )
        elif machine.tool("git") is None and config.deploy.kind == "local":
            yield Problem("alpasim.repo_url", section.repo_url, "git is not on PATH", "apt-get install git git-lfs")
        built = section.repo_path is not None and (Path(section.repo_path).expanduser() / ".venv/bin/python").exists()
        if config.deploy.kind == "local" and machine.tool("uv") is None and not built:
            what = "uv, which builds AlpaSim's environment, is not on PATH"
            yield Problem("alpasim.repo_path", section.repo_path, what, INSTALL_UV)
        if config.deploy.kind == "local" and (trouble := machine.docker_trouble) is not None:
            yield Problem(
                "simulator.address",
                self.address,
                f"AlpaSim runs in containers, and {trouble.message}",
                f"{trouble.remedy}; or name one that runs: simulator.address=HOST:PORT",
            )

    def build(self, policy_spec: Any, dataset: Any, slots: int, labels: Sequence[str]) -> AlpasimSimulator:
        """A simulator with `slots` slots over AlpaSim's scenes, computing what `policy_spec` and `labels` name."""
        from alpagym_runtime.simulators.alpasim.simulator import AlpasimSimulator

        return AlpasimSimulator(self, policy_spec, dataset, slots, labels)
