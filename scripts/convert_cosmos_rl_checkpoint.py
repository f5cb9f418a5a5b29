#!/usr/bin/env python3
"""The recipe's name and flags for `alpagym checkpoint export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from alpagym_alpamayo_r1.conversion import export
from alpagym_alpamayo_r1.shards import parse_size


def main() -> None:
    """Parse the flags and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cosmos-policy-ckpt", type=Path, required=True, help="folder of model_rank_*.pth")
    parser.add_argument("--base-hf-ckpt", type=Path, required=True, help="converted checkpoint")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--max-shard-size", default="4GB")
    parser.add_argument("--overwrite", action="store_true")
    flags = parser.parse_args()
    export(
        flags.cosmos_policy_ckpt,
        flags.base_hf_ckpt,
        flags.output_dir,
        max_shard_bytes=parse_size(flags.max_shard_size),
        overwrite=flags.overwrite,
    )
    print(flags.output_dir)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as err:
        raise SystemExit(f"error: {err}") from err
