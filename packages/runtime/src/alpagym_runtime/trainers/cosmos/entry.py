"""What every process of a Cosmos-RL job runs: `-m alpagym_runtime.trainers.cosmos.entry --config TOML`.

Cosmos-RL's launcher says in COSMOS_ROLE which part it plays. This module registers our parts and hands over.
"""

from __future__ import annotations

import os

from alpagym_runtime.trainers.cosmos.place import run_of, transport_of
from alpagym_runtime.trainers.cosmos.tables import FOLDER
from alpagym_runtime.trainers.cosmos.version import require_version


def main() -> None:
    """Play the role that the environment names, to its end."""
    require_version()
    config, directory = run_of()
    if config.cosmos.device == "cpu":
        from alpagym_runtime.trainers.cosmos import double

        double.install()
    from alpagym_runtime.trainers.cosmos import housekeeping

    housekeeping.keep_to_this_machine(directory)
    housekeeping.read_often()
    if os.environ.get("COSMOS_ROLE") == "Policy":
        housekeeping.wait_for_commands()
    if config.cosmos.train.train_policy.data_dispatch_as_rank_in_mesh:
        housekeeping.wait_for_everybody()
    housekeeping.end_with_owner(directory / FOLDER)

    from cosmos_rl.launcher.worker_entry import main as play

    from alpagym_runtime.trainers.cosmos import backend, policy_worker  # noqa: F401 - they register themselves
    from alpagym_runtime.trainers.cosmos.model import register_model
    from alpagym_runtime.trainers.cosmos.packer import Packer, reward
    from alpagym_runtime.trainers.cosmos.prompts import Prompts
    from alpagym_runtime.transport.config import NcclConfig

    register_model()
    role = os.environ.get("COSMOS_ROLE", "Controller")
    transport = transport_of(config, directory, role)
    if isinstance(config.transport.config, NcclConfig):
        from alpagym_runtime.trainers.cosmos import weights_first

        if role == "Policy":
            weights_first.hold_episodes_while_sending(transport, directory)  # type: ignore[arg-type]  # it receives
        elif role == "Rollout":
            weights_first.tell_when_ready(directory)
    if config.cosmos.mode == "colocated_separated" and role != "Controller":
        from alpagym_runtime.trainers.cosmos.shared_gpu import pass_weights_within_the_gpu

        pass_weights_within_the_gpu()
    packer = Packer(transport)
    prompts = Prompts.read(config, directory)
    play(
        dataset=lambda _: prompts,
        val_dataset=lambda _: prompts,
        data_packer=packer,
        val_data_packer=packer,  # else one is made that wants a tokenizer
        reward_fns=[reward],
        val_reward_fns=[reward],
        # dapo compares these; without one it drops every group.
        filter_reward_fns=[0] if config.cosmos.train.train_policy.variant == "dapo" else None,
    )


if __name__ == "__main__":
    main()
