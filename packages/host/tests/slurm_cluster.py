"""A Slurm of two nodes on this machine, in a folder: slurmctld and two slurmd, without munge or root's configuration.

    apt-get install slurm-wlm                                   # or, where that is not allowed, unpacked:
    apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 libhwloc15 libdbus-1-3 libjson-c5
    for package in *.deb; do dpkg -x $package DIR; done
    export ALPAGYM_SLURM=DIR

Partitions: `main` (jobs of `urgent` preempt its own, with `GRACE_S` for a checkpoint), `urgent`.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from alpagym_runtime.children import Children

NEEDS = "needs Slurm: apt-get install slurm-wlm, or unpack it (see this module) and set ALPAGYM_SLURM=DIR"
GRACE_S = 60

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
{plugins}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
KillWait=5
OverTimeLimit=0
MinJobAge=600
SlurmdTimeout=20
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4
SlurmdParameters=config_overrides
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime={grace_s} OverSubscribe=NO
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE PriorityTier=10 PreemptMode=off
"""


class SlurmCluster:
    """See the module's text; its tools find it once `environment` is set.

    Args:
        folder: an empty one with a short path.
        shape: the line of nodes, in place of two with four CPUs each.

    """

    def __init__(self, folder: Path, shape: str = "") -> None:
        self.folder = folder
        self.environment = _tools()
        if self.environment is None:
            raise FileNotFoundError(NEEDS)
        self._children = Children()
        self._daemons: dict[str, object] = {}
        path = self.environment["PATH"]
        self._programs = {name: _find(name, path) for name in ("slurmctld", "slurmd", "slurmstepd")}
        (folder / "state").mkdir()
        plugins = ""
        if root := os.environ.get("ALPAGYM_SLURM"):
            plugins = f"PluginDir={next(Path(root).glob('usr/lib/*/slurm-wlm'))}"
        text = CONFIG.format(
            host=socket.gethostname(),
            user=getpass.getuser(),
            ports=_free_ports(),
            folder=folder,
            plugins=plugins,
            grace_s=GRACE_S,
        )
        if shape:
            text = "\n".join(shape if line.startswith("NodeName=") else line for line in text.splitlines())
            text = text.replace("Nodes=n[1-2]", "Nodes=ALL")
        (folder / "slurm.conf").write_text(text + "\n")
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")

    def start(self) -> None:
        """Bring it up.

        Raises:
            RuntimeError: its nodes are not idle within 30 s; holds the daemons' last words.

        """
        self.start_controller("-c")
        for name in ("n1", "n2"):
            self.start_node(name)
        if not self.until(lambda: self.run("sinfo", "-h", "-o", "%t %D").strip() == "idle 2", 30.0):
            logs = "\n".join(f"== {log}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))
            raise RuntimeError(f"Slurm does not come up: {self.run('sinfo')}\n{logs}")

    def start_controller(self, *options: str) -> None:
        """Start slurmctld (again)."""
        self._start("slurmctld", [self._programs["slurmctld"], "-D", *options])

    def start_node(self, name: str) -> None:
        """Start a node's slurmd (again)."""
        self._start(name, [self._programs["slurmd"], "-D", "-N", name, "-d", self._programs["slurmstepd"]])

    def end_daemon(self, name: str) -> None:
        """End a daemon in order: a slurmctld that is killed forgets jobs of the last seconds."""
        child = self._daemons.pop(name)
        child.process.terminate()
        child.process.wait(60)

    def _start(self, name: str, argv: list[str]) -> None:
        self._daemons[name] = self._children.start(
            name, argv, log=self.folder / f"{name}.out.log", environment={**os.environ, **self.environment}
        )

    def run(self, *argv: str, check: bool = False) -> str:
        """What one of its tools says."""
        done = subprocess.run(
            argv, env={**os.environ, **self.environment}, capture_output=True, text=True, check=check, timeout=120
        )
        return done.stdout + done.stderr

    def state(self, job: str) -> str:
        """Slurm's word for a job's state."""
        found = self.run("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T").splitlines()
        return next((line.split("|")[1] for line in found if line.split("|")[0] == job), "")

    def wait(self, job: str, *states: str, timeout_s: float = 240.0) -> str:
        """Wait until a job is in one of these states; its state then."""
        self.until(lambda: self.state(job) in states, timeout_s)
        return self.state(job)

    @staticmethod
    def until(true: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it becomes true in time."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if true():
                return True
            time.sleep(0.3)
        return true()

    def close(self) -> None:
        """End its jobs and daemons."""
        self.run("scancel", "--user", getpass.getuser())
        self.until(lambda: not self.run("squeue", "-h").strip(), 20.0)
        self._children.close()


def _tools() -> dict[str, str] | None:
    """PATH and libraries of Slurm's programs; None where there are none."""
    root, path = os.environ.get("ALPAGYM_SLURM"), os.environ["PATH"]
    found = {"PATH": f"{path}:/usr/sbin:/sbin"}
    if root:
        found["PATH"] = f"{root}/usr/bin:{root}/usr/sbin:{path}"
        libraries = [str(place) for pattern in ("", "/slurm-wlm") for place in Path(root).glob(f"usr/lib/*{pattern}")]
        found["LD_LIBRARY_PATH"] = ":".join(place for place in libraries if Path(place).is_dir())
    needed = ("slurmctld", "slurmd", "slurmstepd", "sbatch")
    return found if all(_find(name, found["PATH"]) for name in needed) else None


def _find(name: str, path: str) -> str | None:
    """A program; in Debian's packages, before they are configured, a daemon's name ends with -wlm."""
    found = (shutil.which(word, path=folder) for folder in path.split(":") for word in (name, f"{name}-wlm"))
    return next((program for program in found if program), None)


def _free_ports() -> list[int]:
    """Three ports in a row that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + 3):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return [first, first + 1, first + 2]
