#!/usr/bin/env python3
"""The recipe's name and flags for `alpagym checkpoint convert --to training`; names must be local already."""

from __future__ import annotations

import argparse
from pathlib import Path

from alpagym_alpamayo_r1.conversion import convert, local_directory


def main() -> None:
    """Parse the flags and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=None, help="default: /tmp/<model>_training")
    parser.add_argument("--vlm-name-or-path", default="nvidia/Cosmos-Reason2-8B")
    parser.add_argument("--alpamayo-model", default="nvidia/Alpamayo-1.5-10B")
    flags = parser.parse_args()
    source = local_directory(flags.alpamayo_model)
    output = flags.output_dir or Path("/tmp") / f"{Path(flags.alpamayo_model).name}_training"
    has_words = (source / "tokenizer_config.json").is_file()
    convert(source, output, "training", backbone=None if has_words else local_directory(flags.vlm_name_or_path))
    print(output)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as err:
        raise SystemExit(f"error: {err}") from err
