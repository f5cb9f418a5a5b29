"""Checks of the machine: GPUs, containers, Redis, disk, ports, AlpaSim, W&B, Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from alpagym_host.alpasim.checkout import cached, present
from alpagym_host.doctor_types import Context, Finding

_PROBE = "alpagym_runtime.trainers.gpu_probe"
# Importing torch takes this long on a slow disk, whatever the time-out of an answer.
_TORCH_START_S = 60.0
_ALPASIM_BYTES = 150e9
_OTHER_CONTAINERS = ("podman", "apptainer", "singularity", "enroot")


def gpus(context: Context) -> Iterator[Finding]:
    """nvidia-smi, then torch and NCCL in a process of their own, since either may hang."""
    machine = context.machine
    wanted = context.config.topology.gpus_per_node if context.config.deploy.kind == "local" else 0
    if not machine.gpus:
        remedy = "install the NVIDIA driver" if machine.tool("nvidia-smi") is None else "nvidia-smi"
        yield Finding("GPUs", context.missing(wanted > 0), machine.gpus_text, remedy)
        return
    yield Finding("GPUs", "ok", f"{machine.gpus_text}, driver {machine.gpus[0].driver}")
    if machine.version("torch") is None:
        yield Finding("GPUs", context.missing(wanted > 0), "torch is not installed", "uv sync")
        return
    answer = machine.ask(sys.executable, "-m", _PROBE, timeout_s=_TORCH_START_S + context.timeout_s)
    found = _json(answer.text) if answer.ok else None
    if found is None:
        yield Finding("GPUs", "wrong", f"torch does not answer: {answer.first_line}", f"{sys.executable} -m {_PROBE}")
        return
    if not found["available"]:
        text = f"torch {found['torch']} sees no GPU: {found['error'] or 'it is a CPU build'}"
        yield Finding("GPUs", "wrong", text, "uv sync, or a driver for its CUDA version")
        return
    text = f"torch {found['torch']}, CUDA {found['cuda']}, NCCL {found['nccl']}, {found['devices']} usable"
    yield Finding("GPUs", "ok", text)
    if found["devices"] < 2:
        return
    pairs = found["devices"] * (found["devices"] - 1)
    text = f"peer-to-peer: {len(found['peers'])} of {pairs} pairs"
    yield Finding("GPUs", "ok" if len(found["peers"]) == pairs else "warn", text, "nvidia-smi topo -p2p r")
    nccl = machine.ask(sys.executable, "-m", _PROBE, "--nccl", "2", timeout_s=_TORCH_START_S + context.timeout_s)
    found = _json(nccl.text) if nccl.ok else None
    if found is None:
        text = f"NCCL between two GPUs: {nccl.first_line}"
        yield Finding("GPUs", "wrong", text, "NCCL_P2P_DISABLE=1, and NCCL_DEBUG=INFO tells why")
    else:
        text = f"NCCL between two GPUs: {found['gigabytes_per_s']:.0f} GB/s of all-reduce, sums are right"
        yield Finding("GPUs", "ok", text)


def containers(context: Context) -> Iterator[Finding]:
    """Docker with Compose and the NVIDIA runtime, or which other tool there is."""
    machine, needed = context.machine, context.starts_alpasim
    trouble = machine.docker_trouble
    others = [name for name in _OTHER_CONTAINERS if machine.tool(name)]
    if trouble is not None:
        also = f"; there is {', '.join(others)}, which AlpaSim's launcher does not use" if others else ""
        yield Finding("containers", context.missing(needed), f"{trouble.message}{also}", trouble.remedy)
        return
    version = machine.ask("docker", "version", "--format", "{{.Server.Version}}").first_line
    compose = machine.ask("docker", "compose", "version", "--short").first_line
    yield Finding("containers", "ok", f"Docker {version}, Compose {compose}")
    runtimes = _json(machine.ask("docker", "info", "--format", "{{json .Runtimes}}").text) or {}
    if "nvidia" not in runtimes and machine.gpus:
        remedy = "apt-get install nvidia-container-toolkit && sudo nvidia-ctk runtime configure"
        yield Finding("containers", "wrong" if needed else "warn", "Docker has no NVIDIA runtime", remedy)


def redis(context: Context) -> Iterator[Finding]:
    """redis-server, which Cosmos-RL starts."""
    answer = context.machine.ask("redis-server", "--version")
    if answer.ok:
        yield Finding("Redis", "ok", answer.first_line)
    else:
        yield Finding("Redis", context.missing(context.uses_cosmos), answer.first_line, "apt-get install redis-server")


def disk(context: Context) -> Iterator[Finding]:
    """Room for runs, for AlpaSim, and in shared memory."""
    root = Path(context.config.run.root).expanduser().absolute()
    free = context.machine.free_bytes(root)
    if free is None:
        yield Finding("disk", "warn", f"{root} is on no file system that can be read", "run.root=DIR")
        return
    place = next(parent for parent in (root, *root.parents) if parent.exists())
    if not os.access(place, os.W_OK):
        yield Finding("disk", "wrong", f"{place} cannot be written to", "run.root=DIR")
    text = f"{free / 1e9:.0f} GB free for {root}"
    yield Finding("disk", "wrong" if free < 1 << 30 else "ok", text, "run.root=DIR on another disk")
    if context.starts_alpasim:
        cache = Path(
            context.config.alpasim.checkout_cache or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        ).expanduser()
        room = context.machine.free_bytes(cache.absolute())
        if room is not None and room < _ALPASIM_BYTES:
            text = f"{room / 1e9:.0f} GB free for AlpaSim's images and scenes in {cache}; 100 to 150 GB are usual"
            yield Finding("disk", "warn", text, "alpasim.checkout_cache=DIR on another disk")
    if context.config.transport.type == "shared_memory":
        room, limit = context.machine.free_bytes(Path("/dev/shm")), context.config.transport.config.limit_mb * 1e6
        if room is not None and room < limit:
            text = f"/dev/shm has {room / 1e6:.0f} MB free; transport.limit_mb is {limit / 1e6:.0f}"
            yield Finding("disk", "warn", text, f"transport.limit_mb={int(room / 2e6)}, or docker run --shm-size=16g")


def ports(context: Context) -> Iterator[Finding]:
    """Ports with a fixed number that this run listens on."""
    wanted = {}
    if context.uses_cosmos:
        wanted["cosmos.controller_port"] = context.config.cosmos.controller_port
    if context.config.simulator.type == "alpasim" and context.config.simulator.config.server.port:
        wanted["simulator.server.port"] = context.config.simulator.config.server.port
    if not wanted:
        yield Finding("ports", "ok", "the run takes free ones")
    for key, port in wanted.items():
        if context.machine.port_is_free(port):
            yield Finding("ports", "ok", f"{port} ({key}) is free")
        else:
            yield Finding("ports", "wrong", f"{port} ({key}) is taken{_holder(port)}", f"{key}={port + 1}")


def alpasim(context: Context) -> Iterator[Finding]:
    """The AlpaSim that runs, or the checkout that one is started from."""
    simulator, section, machine = context.config.simulator, context.config.alpasim, context.machine
    if simulator.type == "alpasim" and simulator.config.addresses:
        for address in simulator.config.addresses:
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=context.timeout_s).close()
                yield Finding("AlpaSim", "ok", f"{address} accepts connections")
            except OSError as err:
                text = f"{address} does not answer: {err}"
                yield Finding("AlpaSim", "wrong", text, "start it with driver_source=external_dynamic: docs/alpasim.md")
        return
    here = present(section)
    if section.repo_path is None and here is None:
        text = f"no checkout is named; {section.repo_ref} of {section.repo_url} would be cloned to {cached(section)}"
        yield Finding("AlpaSim", "ok" if context.starts_alpasim else "off", text)
        return
    folder = here or Path(section.repo_path or "").expanduser()
    if not (folder / "pyproject.toml").is_file() or not (folder / "src").is_dir():
        text = f"{folder} is no checkout of AlpaSim (pyproject.toml and src/)"
        yield Finding(
            "AlpaSim", context.missing(context.starts_alpasim), text, f"git clone {section.repo_url} {folder}"
        )
        return
    revision = machine.ask("git", "-C", str(folder), "rev-parse", "--short", "HEAD")
    at = revision.first_line if revision.ok else "an unknown revision"
    yield Finding("AlpaSim", "ok", f"{folder} at {at}")
    if not (folder / ".venv" / "bin" / "python").exists():
        yield Finding("AlpaSim", "warn", "it has no .venv yet", f"uv sync --project {folder}")


def wandb(context: Context) -> Iterator[Finding]:
    """Whether W&B takes our key, where the run uses it online."""
    used = {name: part.config for name, part in context.config.logging.loggers.items() if part.type == "wandb"}
    if not used:
        version = context.machine.version("wandb")
        yield Finding("W&B", "off", f"not used by this run; wandb {version or 'is not installed'}")
    for name, section in used.items():
        problems = list(section.preflight(context.config, context.machine))
        for problem in problems:
            key = problem.under(f"logging.loggers.{name}").key
            yield Finding("W&B", "wrong", f"{key}: {problem.message}", problem.remedy)
        if not problems:
            says = "the server takes the key" if section.mode_now == "online" else "nothing is sent"
            yield Finding("W&B", "ok", f"{name}: {section.mode_now}, {says}")


def slurm(context: Context) -> Iterator[Finding]:
    """Slurm's tools, whether its controller answers, and the partition."""
    machine, needed = context.machine, context.config.deploy.kind == "slurm"
    found = machine.ask("sbatch", "--version")
    if not found.ok:
        remedy = "start it on a login node of the cluster"
        yield Finding("Slurm", context.missing(needed), found.first_line, remedy)
        return
    listed = machine.ask("sinfo", "--noheader", "--format=%R")
    if not listed.ok:
        text = f"{found.first_line}, but sinfo says: {listed.first_line}"
        yield Finding("Slurm", "wrong" if needed else "warn", text, "systemctl status slurmctld")
        return
    partitions = sorted(set(listed.text.split()))
    yield Finding("Slurm", "ok", f"{found.first_line}, partitions: {', '.join(partitions)}")
    wanted = context.config.deploy.slurm.partition
    if needed and wanted is not None and not wanted.startswith("YOUR_") and wanted not in partitions:
        text = f"there is no partition {wanted!r}"
        yield Finding("Slurm", "wrong", text, f"deploy.slurm.partition={partitions[0] if partitions else '…'}")


def _holder(port: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                name = psutil.Process(connection.pid).name() if connection.pid else "another user's process"
                return f" by {name}" + (f" (process {connection.pid})" if connection.pid else "")
    return ""


def _json(text: str) -> dict | None:  # type: ignore[type-arg]
    for line in reversed(text.strip().splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            return found if isinstance(found, dict) else None
    return None
