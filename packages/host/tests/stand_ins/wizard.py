"""Plays AlpaSim's launcher: reads its overrides as Hydra does, writes its files, and starts containers with `docker`.

What the containers do, ALPAGYM_TEST_WIZARD says: serve (the embedded world, `alpagym serve`), fake (FakeAlpaSim),
die (ends before anything listens), silent (never says where it listens), deaf (says it, and nobody listens there).
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

FAKE = """
import sys, threading
from alpagym_runtime.testing.fake_alpasim import FakeAlpaSim
with FakeAlpaSim(scenes=sys.argv[2].split(","), port=int(sys.argv[1])):
    print("fake runtime listens", flush=True)
    threading.Event().wait()
"""
STUBBORN = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()"


def main() -> None:
    received = {}
    for override in OverridesParser.create().parse_overrides(sys.argv[1:]):
        received[override.key_or_group] = override.value()
    config = OmegaConf.to_container(OmegaConf.create(received), resolve=True)
    folder = Path(config["wizard.log_dir"])
    mode = os.environ["ALPAGYM_TEST_WIZARD"]
    about = {"argv": sys.argv[1:], "config": config, "project": os.environ.get("COMPOSE_PROJECT_NAME")}
    (folder / "received.json").write_text(json.dumps(about))
    print("launcher: composing", flush=True)
    if mode == "die":
        print("renderer-0  | RuntimeError: CUDA error: out of memory", flush=True)
        for number in range(300):
            print(f"physics-0   | INFO step {number}", flush=True)
        sys.exit("subprocess.CalledProcessError: docker compose up returned non-zero exit status 1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scenes = config.get("scenes.scene_ids", ["clip-a", "clip-b"])
    loop = "runtime.simulation_config."
    runtime = {
        "serve": [
            *(sys.executable, "-m", "alpagym_host.cli", "serve", f"--port={port}", "--slots=4"),
            *(f"--camera={camera}" for camera in os.environ.get("ALPAGYM_TEST_CAMERAS", "front=48x96").split(",")),
            f"--host={os.environ.get('ALPAGYM_TEST_HOST', '127.0.0.1')}",
            f"simulator.control_period_us={config[loop + 'control_timestep_us']}",
            f"--force-gt-ms={config[loop + 'force_gt_duration_us'] // 1000}",
            f"--steps={config[loop + 'n_sim_steps']}",
            f"dataset.scene_ids=[{','.join(scenes)}]",
        ],
        "fake": [sys.executable, "-c", FAKE, str(port), ",".join(scenes)],
    }.get(mode)
    containers = {"renderer-0": [sys.executable, "-c", STUBBORN]}
    if runtime is not None:
        containers["runtime-0"] = runtime
    (folder / "docker-compose.yaml").write_text(json.dumps(containers))
    if mode != "silent":
        (folder / "generated-runtime-server.yaml").write_text(f"host: localhost\nport: {port}\n")
    subprocess.run(["docker", "compose", "-f", str(folder / "docker-compose.yaml"), "up"], check=True, cwd=folder)


if __name__ == "__main__":
    main()
