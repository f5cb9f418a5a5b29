"""AlpaGym's runtime: everything that runs a driving episode and trains on it.

Importing this package registers its Gymnasium environments; it loads neither torch nor any trainer.
"""

from gymnasium import register as _register
from gymnasium.envs.registration import registry as _registry

_ENTRY = "alpagym_runtime.envs.driving_env:DrivingEnv"

if "alpagym/Embedded-v0" not in _registry:
    _register("alpagym/Embedded-v0", _ENTRY)
    _register("alpagym/Embedded-Nested-v0", _ENTRY, kwargs={"nested": True})
    _register("alpagym/Offline-v0", "alpagym_runtime.envs.offline_env:OfflineEnv")
    _register("alpagym/AlpaSim-v0", "alpagym_runtime.envs.alpasim_env:AlpasimEnv")
