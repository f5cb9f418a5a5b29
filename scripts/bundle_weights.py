#!/usr/bin/env python3
"""Put the best weights of a run of the default camera policy into the waypoint package (policy=waypoint_trained)."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import alpagym_waypoint
from alpagym_host.compose import compose
from alpagym_runtime.files import write_atomic
from alpagym_runtime.trainers.checkpoints import load_weights
from alpagym_runtime.trainers.run import load_into

TARGET = Path(alpagym_waypoint.__file__).with_name("bundled.safetensors")


def main() -> None:
    """Check that the weights fit the default policy, then replace the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run directory; its checkpoints/best is taken")
    parser.add_argument("--output", type=Path, default=TARGET)
    flags = parser.parse_args()
    best = flags.run / "checkpoints" / "best"
    load_into(compose([]).policy.config.build("cpu"), load_weights(best), 0, str(best))
    data = (best / "model.safetensors").read_bytes()
    write_atomic(flags.output, data)
    print(f"{flags.output}: {len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as err:
        raise SystemExit(f"error: {err}") from err
