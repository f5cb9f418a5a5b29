"""The command line of AlpaSim's launcher, the Wizard: what a run needs of AlpaSim, in the launcher's own words.

Values go through Hydra's grammar and OmegaConf's interpolation on the other side, so each text is quoted for both: a
path with blanks, `=`, `#`, quotes or `${` arrives as it was.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from alpagym_host.alpasim.checkout import Checkout
from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import RunConfig

ENDPOINT = "generated-runtime-server.yaml"
"""What the launcher writes into its log folder once it knows where the runtime will listen: host and port."""

COMPOSE = "docker-compose.yaml"


def argv(config: RunConfig, checkout: Checkout, log_folder: Path) -> list[str]:
    """The launcher's command line.

    The horizon has one step more than the run decides: the last observation comes with the `drive` that ends it.
    """
    simulator, wizard, dataset = config.simulator.config, config.alpasim.wizard_args, config.dataset
    steps = simulator.warmup_ticks + config.expected_valid_steps + 1
    loop = "runtime.simulation_config."
    words = [
        f"hydra.searchpath=[{','.join(quote(f'file://{folder}') for folder in config_folders())}]",
        f"hydra.run.dir={quote(str(log_folder))}",
        f"deploy={wizard.deploy}",
        f"topology={wizard.topology}",
        "driver_source=external_dynamic",
        f"wizard.run_method={'SLURM' if config.deploy.kind == 'slurm' else 'DOCKER_COMPOSE'}",
        "wizard.run_mode=SERVER",
        "wizard.debug_flags.use_localhost=true",
        f"{loop}send_recording_ground_truth=true",
        f"{loop}skip_driver_during_force_gt={str(simulator.skip_driver_during_force_gt).lower()}",
        f"{loop}force_gt_duration_us={simulator.force_gt_duration_us}",
        f"{loop}control_timestep_us={simulator.control_period_us}",
        f"{loop}n_sim_steps={steps}",
    ]
    if (retries := checkout.retries_key()) is not None:
        # A rollout that begins again has decisions of two attempts; ours begin anew under another id.
        words.append(f"++{retries}=0")
    for group in ("driver", "renderer"):
        if (choice := getattr(wizard, group)) is not None:
            words.append(f"{group}={choice}")
    if wizard.cameras is not None:
        words.append(f"+cameras={wizard.cameras}")
    words += wizard.extra_overrides
    # Last, so that they hold whatever stands before.
    words.append(f"wizard.log_dir={quote(str(log_folder))}")
    if dataset.test_suite_id is not None:
        words.append(f"scenes.test_suite_id={quote(dataset.test_suite_id)}")
    elif dataset.scene_ids is not None:
        words.append(f"scenes.scene_ids=[{','.join(quote(name) for name in dataset.scene_ids)}]")
    return [str(checkout.python), "-m", "alpasim_wizard", *words]


def quote(text: str) -> str:
    r"""A text as a value of a Hydra override that arrives unchanged, also where OmegaConf looks for `${`.

    Hydra: in single quotes, `\'` is a quote, and backslashes count in pairs before a quote. OmegaConf: backslashes
    count in pairs before `${`, and `\${` is no interpolation.
    """
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


def config_folders() -> list[Path]:
    """Folders of the installed packages of AlpaSim configs (its own entry-point group `alpasim.configs`)."""
    found = []
    for entry in sorted(entry_points(group="alpasim.configs"), key=lambda entry: entry.name):
        spec = importlib.util.find_spec(entry.module)
        found += [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []
    return found


@dataclass(frozen=True)
class TopologyFacts:
    """What one of our topologies asks for: GPU numbers of this machine, and rollouts at once."""

    gpus: frozenset[int]
    capacity: int


def topology_facts(name: str) -> TopologyFacts | None:
    """Facts of a topology of an installed package; None for AlpaSim's own, which its checkout holds."""
    from omegaconf import OmegaConf

    for folder in config_folders():
        file = folder / "topology" / f"{name}.yaml"
        if not file.is_file():
            continue
        data: Any = OmegaConf.to_container(OmegaConf.load(file))
        services, endpoints = data["services"], data["runtime"]["endpoints"]
        used: set[int] = set()
        capacities = []
        for service, section in endpoints.items():
            if section.get("skip") or "n_concurrent_rollouts" not in section:
                continue
            gpus = services[service].get("gpus") or []
            used |= set(gpus)
            places = max(1, len(gpus)) * services[service]["replicas_per_container"]
            capacities.append(places * section["n_concurrent_rollouts"])
        return TopologyFacts(frozenset(used), min(capacities))
    return None


def check_topology(name: str, checkout: Path) -> None:
    """Refuse a topology that neither an installed package nor the checkout has.

    Raises:
        ConfigError: names those that there are.

    """
    places = [*config_folders(), checkout / "src/wizard/configs"]
    known = sorted({file.stem for place in places for file in place.glob("topology/*.yaml")})
    if name not in known:
        hint = "; pip install alpagym-alpasim-configs" if name.startswith("alpagym_") else ""
        raise ConfigError(
            f"there is no {name!r}; there are: {', '.join(known)}{hint}", key="alpasim.wizard_args.topology"
        )
