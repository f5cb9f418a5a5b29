"""Our rollout backend: Cosmos-RL asks for drives of prompts, our collector makes them in its own slots."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cosmos_rl.rollout.generation_mixin import RolloutGenerationMixin
from cosmos_rl.rollout.rollout_base import RolloutBase, RolloutRegistry
from cosmos_rl.rollout.schema import RolloutResult

from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.rollouts.cores import Cores
from alpagym_runtime.trainers.cosmos.config import CosmosTrainerConfig
from alpagym_runtime.trainers.cosmos.digests import Digests, WeightsError
from alpagym_runtime.trainers.cosmos.groups import Driven, Groups, credited
from alpagym_runtime.trainers.cosmos.journal import Presence
from alpagym_runtime.trainers.cosmos.learning import DTYPES, precision
from alpagym_runtime.trainers.cosmos.packer import Packer
from alpagym_runtime.trainers.cosmos.place import device_of, run_of
from alpagym_runtime.trainers.cosmos.prompts import Prompts, number_of
from alpagym_runtime.trainers.cosmos.tables import ROLLOUT
from alpagym_runtime.trainers.run import build_policy
from alpagym_runtime.transport.picture_memory import Allocate, picture_memory, plain_memory
from alpagym_runtime.types import Sampling


@RolloutRegistry.register(ROLLOUT, allow_override=True)
class AlpagymRollout(RolloutGenerationMixin, RolloutBase):  # type: ignore[misc]
    """See the module's text."""

    def post_init_hook(self, **kwargs: Any) -> None:
        """Build the policy; the weights come from the policy worker, and nothing is driven before they are there."""
        self._model_param_map: dict[str, Any] = {}
        self._cores: Cores | None = None
        self._groups: Groups | None = None
        self._version: int | None = None
        self._allocate: Allocate = plain_memory
        config, directory = run_of(self.config)
        self._run, self._directory = config, directory
        self._policy = build_policy(config, device_of(config))
        self._policy.module.to(DTYPES[config.cosmos.train.master_dtype])
        self._digests = Digests(directory)
        self._presence = Presence(directory, "rollout")
        sampling = config.cosmos.rollout.sampling_config
        self._sampling = Sampling("sample", sampling.temperature, sampling.top_p)
        self._groups = Groups(
            Prompts.read(config, directory),
            self._make_collector,
            config.rollout.group_size,
            config.cosmos.rollout.redraws,
            config.cosmos.rollout.episode_s,
        )
        self.setup_generation(thread_name="alpagym-prompts")
        atexit.register(self.shutdown)  # in colocated mode nobody else calls it

    def init_engine(self, quantization: Any = None, seed: Any = None, load_format: Any = None, **kwargs: Any) -> None:
        """Nothing is left to do: the simulator is built with the first prompts."""
        self._engine_initialized = True

    def get_underlying_model(self) -> torch.nn.Module:
        """What Cosmos-RL writes new weights into."""
        module: torch.nn.Module = self._policy.module
        return module

    def set_underlying_model(self, model: torch.nn.Module) -> None:
        """Colocated: drive with the trainer's own module."""
        self._policy.module = model

    def rollout_generation(self, payloads: Sequence[Any], *args: Any, **kwargs: Any) -> list[RolloutResult]:
        """Drives of each prompt, with the weights of `current_weight_version`."""
        if isinstance(packer := kwargs.get("data_packer"), Packer):
            self._allocate = picture_memory(packer.transport)
        version = int(kwargs.get("current_weight_version", 0))
        if version != self._version:
            self._adopt(version)
        results: list[RolloutResult] = super().rollout_generation(payloads, *args, **kwargs)
        return results

    def _adopt(self, version: int) -> None:
        """Drive with what was written into the module, if that is the version that it is taken for."""
        module = self._policy.module
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # they may have come in another stream than we read them in
        try:
            self._digests.require(version, dict(module.named_parameters()))
        except WeightsError as err:
            self._presence.failed(str(err))
            raise
        # Weights were written in place: what a policy derived from the old ones goes.
        self._policy.load(module.state_dict(), version)
        self._version = version

    def _prepare_sample(self, payload: Any, **_: Any) -> int:
        return number_of(payload.prompt)

    def _generate(self, batch: Sequence[int], *, stream: Any = None, is_validation: bool = False) -> list[list[Driven]]:
        assert self._groups is not None
        began_s = time.monotonic()
        trainer = self._run.trainer.config
        assert isinstance(trainer, CosmosTrainerConfig)
        with precision(device_of(self._run), self._run.cosmos.train.param_dtype):
            groups = self._groups.drive(batch, self._sampling)
        self._presence.did(sum(map(len, groups)), time.monotonic() - began_s)
        return [credited(members, trainer) for members in groups]

    def _postprocess(
        self, raw: list[list[Driven]], payloads: Sequence[Any], *, is_validation: bool = False
    ) -> list[RolloutResult]:
        return [RolloutResult(completions=members, weight_version=self._version) for members in raw]

    def _on_generation_error(self, err: BaseException, payloads: Sequence[Any]) -> Any:
        """End the worker: an empty answer would leave its episodes on Cosmos-RL's books for ever."""
        self._presence.failed(f"{type(err).__name__}: {err}")
        raise err

    def _make_collector(self) -> tuple[Collector, Callable[[], None]]:
        rollout = self._run.rollout
        slots = min(rollout.slots, self._run.cosmos.rollout.batch_size * rollout.group_size)
        cores = Cores(self._run, slots, self._directory)
        core, _ = cores.core(cores.world("train"), self._policy.spec)
        collector = Collector(
            core,
            self._policy,
            min_ready=rollout.min_ready,
            timeout_s=rollout.timeout_s,
            retries=rollout.retries,
            config_hash=self._run.config_hash,
            allocate=self._allocate,
        )
        return collector, cores.close

    def shutdown(self) -> None:
        """Close the simulator; also of a backend that is half built, and more than once."""
        self.shutdown_generation()
        if self._groups is not None:
            self._groups.close()
