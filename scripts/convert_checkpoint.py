#!/usr/bin/env python3
"""The recipe's name and flags for `alpagym checkpoint convert --to 1.5 | 1`."""

from __future__ import annotations

import argparse
from pathlib import Path

from alpagym_alpamayo_r1.conversion import convert


def main() -> None:
    """Parse the flags and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("to", choices=("to-a15", "to-a1"))
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    flags = parser.parse_args()
    convert(flags.input, flags.output, {"to-a15": "1.5", "to-a1": "1"}[flags.to], overwrite=flags.overwrite)
    print(flags.output)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as err:
        raise SystemExit(f"error: {err}") from err
