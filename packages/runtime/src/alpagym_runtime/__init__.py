"""AlpaGym's runtime: everything that runs a driving episode and trains on it.

Importing this package registers its Gymnasium environments; it loads neither torch nor any trainer.
"""

from gymnasium import register as _register
from gymnasium.envs.registration import registry as _registry

_ENVS = "alpagym_runtime.envs"


def _embedded(name: str, **arguments: str) -> None:
    single, vector = f"{_ENVS}.driving_env:DrivingEnv", f"{_ENVS}.vector_env:DrivingVectorEnv"
    _register(f"alpagym/{name}", single, vector_entry_point=vector, kwargs=arguments)


if "alpagym/Embedded-v0" not in _registry:
    _embedded("Embedded-v0")
    _embedded("Embedded-Nested-v0", layout="nested")
    _embedded("Embedded-LowDim-v0", layout="low_dim")
    _embedded("Embedded-LeRobot-v0", layout="lerobot")
    _register(
        "alpagym/Offline-v0",
        entry_point=f"{_ENVS}.offline_env:OfflineEnv",
        vector_entry_point=f"{_ENVS}.offline_env:offline_vector_env",
    )
    _register(
        "alpagym/AlpaSim-v0",
        entry_point=f"{_ENVS}.alpasim_env:AlpasimEnv",
        vector_entry_point=f"{_ENVS}.alpasim_env:AlpasimVectorEnv",
    )
    _register(
        "alpagym/PAI-v0",
        entry_point=f"{_ENVS}.pai_env:PaiEnv",
        vector_entry_point=f"{_ENVS}.pai_env:PaiVectorEnv",
    )
