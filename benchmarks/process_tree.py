"""What a process and its descendants take, watched from beside it; on GPUs what nvidia-smi shows."""

from __future__ import annotations

import statistics
import subprocess
import threading
from typing import Any

import psutil

_EVERY_S = 4.0


class Tree(threading.Thread):
    """Watches from `start` to `end`: most memory together, most of one, how many; of each GPU busy time and memory."""

    def __init__(self, pid: int, gpus: bool) -> None:
        super().__init__(name="tree", daemon=True)
        self._process, self._gpus, self._over = psutil.Process(pid), gpus, threading.Event()
        self._peak_mb, self._peak_of_one_mb, self._processes = 0.0, 0.0, 0
        self._gpu_busy: dict[str, list[float]] = {}
        self._gpu_mb: dict[str, float] = {}

    def run(self) -> None:
        """Until `end`."""
        while not self._over.wait(_EVERY_S):
            sizes = []
            try:
                everybody = [self._process, *self._process.children(recursive=True)]
            except psutil.Error:
                return
            for process in everybody:
                try:
                    # A page that several share counts once, in parts.
                    sizes.append(process.memory_full_info().pss / 1e6)
                except psutil.Error:
                    continue
            self._peak_mb = max(self._peak_mb, sum(sizes))
            self._peak_of_one_mb = max(self._peak_of_one_mb, *sizes, 0.0)
            self._processes = max(self._processes, len(sizes))
            if self._gpus:
                self._look_at_gpus()

    def _look_at_gpus(self) -> None:
        query = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            index, busy, used = (part.strip() for part in line.split(","))
            self._gpu_busy.setdefault(index, []).append(float(busy))
            self._gpu_mb[index] = max(self._gpu_mb.get(index, 0.0), float(used))

    def end(self) -> dict[str, Any]:
        """What was seen."""
        self._over.set()
        self.join()
        seen: dict[str, Any] = {
            "peak_mb_of_all": round(self._peak_mb),
            "peak_mb_of_one": round(self._peak_of_one_mb),
            "processes": self._processes,
        }
        if self._gpus:
            seen["gpu_busy_percent"] = {gpu: round(statistics.mean(busy), 1) for gpu, busy in self._gpu_busy.items()}
            seen["gpu_peak_mb"] = self._gpu_mb
        return seen
