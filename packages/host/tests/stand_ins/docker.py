"""Plays `docker`: `compose up` runs the commands of its file until a signal, `down` ends what is left of them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> None:
    words = sys.argv[1:]
    record = os.environ.get("ALPAGYM_TEST_DOCKER_LOG")
    if record:
        with open(record, "a") as file:
            file.write(json.dumps(words) + "\n")
    if words[0] == "version":
        print("28.2.2")
    elif words[:2] == ["compose", "version"]:
        print("2.36.0")
    elif words[0] == "compose" and words[-1] == "up":
        up(Path(words[words.index("-f") + 1]))
    elif words[0] == "compose" and "down" in words:
        down(Path(words[words.index("-f") + 1]))
    else:
        print("{}")


def up(file: Path) -> None:
    containers = json.loads(file.read_text())
    # Each in a session of its own: a signal to the launcher's group does not reach it, as with real containers.
    running = {name: subprocess.Popen(argv, start_new_session=True) for name, argv in containers.items()}
    file.with_suffix(".pids").write_text(json.dumps({name: process.pid for name, process in running.items()}))

    def stop(number: int, frame: object) -> None:
        for process in running.values():
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    for process in running.values():
        process.wait()


def down(file: Path) -> None:
    for pid in json.loads(file.with_suffix(".pids").read_text()).values():
        try:
            if "ALPAGYM_TEST_MARK" in Path(f"/proc/{pid}/environ").read_text():
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


main()
