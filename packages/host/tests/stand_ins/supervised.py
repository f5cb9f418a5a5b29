"""`alpagym train` with a trainer that is a stand-in: ROOT or an existing run directory, then overrides."""

import sys
from pathlib import Path

from rich.console import Console

from alpagym_host import run_dir
from alpagym_host.cli import errors_as_messages
from alpagym_host.compose import compose
from alpagym_host.launch.supervise import prepare, supervise
from alpagym_runtime.run_config import load_run_config

place, overrides = Path(sys.argv[1]), sys.argv[2:]
with errors_as_messages():
    console = Console(width=100)
    if (place / "config.yaml").is_file():
        config, directory = load_run_config(place), place.resolve()
        checkout = prepare(config, console)
    else:
        config = compose([f"run.root={place}", *overrides])
        checkout = prepare(config, console)
        directory = run_dir.create(config, "train")
    trainer = [sys.executable, str(Path(__file__).with_name("trainer.py"))]
    sys.exit(supervise(config, directory, "train", console, checkout, trainer))
