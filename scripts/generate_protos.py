#!/usr/bin/env python3
"""Generate the wire messages from `protos/`, or with --check compare them with what is committed.

grpcio-tools is pinned and runs in an environment of its own: as a dependency it would cap protobuf for everybody.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "packages/runtime/src/alpagym_runtime/simulators/alpasim/wire"
TOOLS = "grpcio-tools==1.76.0"


def generate(folder: Path) -> dict[str, str]:
    """File name -> text of every generated module and stub; imports among them made relative."""
    sources = sorted((ROOT / "protos/alpagym/v0").glob("*.proto"))
    command = ["uv", "run", "--no-project", "--isolated", "--with", TOOLS, "python", "-m", "grpc_tools.protoc"]
    command += [f"-I{ROOT / 'protos'}", f"--python_out={folder}", f"--pyi_out={folder}", *map(str, sources)]
    subprocess.run(command, check=True)
    return {
        path.name: re.sub(r"^from alpagym\.v0 import", "from . import", path.read_text(), flags=re.MULTILINE)
        for path in sorted((folder / "alpagym/v0").iterdir())
    }


def main() -> int:
    """Write, or compare with --check."""
    with tempfile.TemporaryDirectory() as folder:
        texts = generate(Path(folder))
    if "--check" in sys.argv[1:]:
        have = {path.name: path.read_text() for path in OUT.glob("*_pb2.py*")}
        wrong = sorted(name for name in texts.keys() | have.keys() if texts.get(name) != have.get(name))
        print(f"differs from protos/: {', '.join(wrong)}; run scripts/generate_protos.py" if wrong else "up to date")
        return bool(wrong)
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.glob("*_pb2.py*"):
        old.unlink()
    for name, text in texts.items():
        (OUT / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
