"""The process of a supervised run that works: `python -m alpagym_host.launch.trainer RUN_DIR`, for the supervisor only.

It starts from the frozen config alone. The supervisor holds the directory's lock for it, and when the supervisor is
killed it keeps a checkpoint and ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from alpagym_host.launch.local import work
from alpagym_host.run_dir import command_of
from alpagym_runtime.children import end_with_parent
from alpagym_runtime.run_config import load_run_config


def main() -> int:
    """Work until the end or a signal; the exit code."""
    end_with_parent()
    directory = Path(sys.argv[1])
    return work(load_run_config(directory), directory, command_of(directory), Console())


if __name__ == "__main__":
    from alpagym_host.cli import errors_as_messages

    with errors_as_messages():
        sys.exit(main())
