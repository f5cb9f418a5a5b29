"""Plays `uv sync --project DIR`: makes an environment whose Python finds the launcher of that checkout."""

import shlex
import sys
from pathlib import Path

words = sys.argv[1:]
if words[0] != "sync":
    sys.exit(f"error: unexpected {words}")
project = Path(words[words.index("--project") + 1])
python = project / ".venv" / "bin" / "python"
python.parent.mkdir(parents=True)
source = shlex.quote(str(project / "src" / "wizard"))
python.write_text(f'#!/bin/sh\nPYTHONPATH={source} exec {shlex.quote(sys.executable)} "$@"\n')
python.chmod(0o755)
(project / ".venv" / "uv-words").write_text(" ".join(words))
print("Installed 214 packages")
