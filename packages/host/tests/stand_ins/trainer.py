"""Plays the trainer: two workers, one of them deaf to SIGTERM; keeps a checkpoint when asked to stop.

What else it does, ALPAGYM_TEST_TRAINER says: wait, done, crash, stubborn (never ends by itself).
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

WORKER = """
import signal, sys, threading
if int(sys.argv[1]):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Event().wait()
"""


def main() -> int:
    directory, mode = Path(sys.argv[1]), os.environ.get("ALPAGYM_TEST_TRAINER", "wait")
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if mode == "stubborn" else asked.set())
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(number)]) for number in range(2)]
    print("trainer: works", flush=True)
    (directory / "begun").write_text(" ".join(str(worker.pid) for worker in workers))
    if mode == "crash":
        print("error: the weights are all NaN", file=sys.stderr, flush=True)
        return 3
    if mode != "done":
        while not asked.wait(0.05):
            pass
        (directory / "checkpoint").write_text("kept")
    for worker in workers:
        worker.kill()
    return 143 if asked.is_set() else 0


if __name__ == "__main__":
    sys.exit(main())
