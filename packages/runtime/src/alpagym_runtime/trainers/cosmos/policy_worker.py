"""Our trainer inside a policy worker of Cosmos-RL: its weights, its steps, its checkpoints."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from cosmos_rl.policy.model.base import IdentityWeightMapper
from cosmos_rl.policy.trainer.base import Trainer, TrainerRegistry
from cosmos_rl.utils.checkpoint import CheckpointMananger
from torch import Tensor

from alpagym_runtime.deploy_config import LearnerSection
from alpagym_runtime.trainers.checkpoints import load_weights
from alpagym_runtime.trainers.cosmos.digests import Digests, refuse_buffers
from alpagym_runtime.trainers.cosmos.journal import Journal, Presence, Step
from alpagym_runtime.trainers.cosmos.learning import DTYPES, Lesson, learn, rate_share
from alpagym_runtime.trainers.cosmos.place import device_of, run_of
from alpagym_runtime.trainers.cosmos.replicas import Replicas
from alpagym_runtime.trainers.cosmos.sharing import Own, own_part
from alpagym_runtime.trainers.cosmos.tables import FOLDER, INITIAL, TRAINER
from alpagym_runtime.trainers.learner import Learner
from alpagym_runtime.trainers.run import build_policy
from alpagym_runtime.trainers.team import ALONE, Team


@TrainerRegistry.register(TRAINER, allow_override=True)
class AlpagymTrainer(Trainer):  # type: ignore[misc]
    """See the module's text."""

    def __init__(self, config: Any, parallel_dims: Any, **kwargs: Any) -> None:
        kwargs.pop("device", None)
        super().__init__(config, parallel_dims, **kwargs)
        self._run, self._directory = run_of(config)
        self.device = torch.device(device_of(self._run))
        cosmos = self._run.cosmos
        policy = self._policy = build_policy(self._run, str(self.device))
        policy.load(load_weights(self._directory / FOLDER / INITIAL), 0)
        policy.module.to(DTYPES[cosmos.train.master_dtype])
        refuse_buffers(policy.module)
        self._reference = copy.deepcopy(policy.module) if cosmos.train.train_policy.kl_beta > 0.0 else None
        self.model = policy.module
        self.model.weight_mapper = self._mapper = IdentityWeightMapper(None)
        named = dict(self.model.named_parameters())
        self.model.trainable_params = [name for name, p in named.items() if p.requires_grad]
        self.model.weight_sync_transforms = list(named.items())
        self.map_w_from_policy_to_rollout = named
        self._total = 1
        # A replica of several GPUs: each holds the weights whole, for the rollouts, and a share of what is trained.
        spread = cosmos.policy.parallelism.gpus_per_replica > 1
        self._ranks = Team(dist.get_rank(), dist.get_world_size()) if spread else ALONE
        self._learner = Learner(policy, LearnerSection(shard="always" if spread else "never"), self._ranks)
        self.optimizer = self.build_optimizers()
        self._scheduler = self.build_lr_schedulers()
        self.ckpt_manager = CheckpointMananger(config, parallel_dims, self.global_rank)
        self._journal, self._digests = Journal(self._directory), Digests(self._directory)
        self._presence = Presence(self._directory, "policy")
        if self._ranks.writes:
            self._digests.put(0, named)

    @property
    def weight_mapper(self) -> Any:
        """Names are the same on both sides."""
        return self._mapper

    def build_optimizers(self) -> torch.optim.Optimizer:
        """Adam over what is trained."""
        return torch.optim.Adam(self._learner.parameters(), lr=self._run.cosmos.train.optm_lr)

    def build_lr_schedulers(self) -> Any:
        """A rise, then a line; how long is known with the first step."""

        def share(done: int) -> float:
            return rate_share(self._run.cosmos, done + 1, self._total)

        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, share)

    def update_lr_schedulers(self, total_steps: int) -> None:
        """Cosmos-RL tells before each step how many there will be."""
        self._total = total_steps
        for group, base in zip(self.optimizer.param_groups, self._scheduler.base_lrs, strict=True):
            group["lr"] = base * rate_share(self._run.cosmos, self._scheduler.last_epoch + 1, total_steps)

    def step_training(
        self,
        rollouts: Sequence[Any],
        current_step: int,
        total_steps: int,
        remain_samples_num: int,
        do_save_checkpoint: bool = False,
        inter_policy_nccl: Any = None,
        is_master_replica: bool = True,
    ) -> dict[str, Any]:
        """Train on the drives of a step, keep what is due, and tell of it."""
        try:
            return self._train(
                rollouts,
                current_step,
                total_steps,
                remain_samples_num,
                do_save_checkpoint,
                inter_policy_nccl,
                is_master_replica,
            )
        except Exception as err:
            self._presence.failed(f"{type(err).__name__} in step {current_step}: {err}")
            raise

    def _train(
        self,
        rollouts: Sequence[Any],
        current_step: int,
        total_steps: int,
        remain_samples_num: int,
        do_save_checkpoint: bool,
        inter_policy_nccl: Any,
        is_master_replica: bool,
    ) -> dict[str, Any]:
        began_s = time.monotonic()
        lessons = [
            Lesson(self.data_packer.get_policy_input(r.prompt, r.completion), float(r.advantage)) for r in rollouts
        ]
        fetched_s = time.monotonic()
        several = self._run.cosmos.policy.parallelism.n_init_replicas > 1 and inter_policy_nccl is not None
        name = inter_policy_nccl.replica_name if several else ""
        team = Replicas(inter_policy_nccl, name, self.device, self._ranks) if several else self._ranks
        rate = self.optimizer.param_groups[0]["lr"]
        with self._learner.training():
            numbers = learn(self._run, self._policy, self.optimizer, lessons, current_step, self._reference, team)
        self._scheduler.step()
        seconds = time.monotonic() - began_s
        numbers |= {
            "learning_rate": rate,
            "seconds_fetch": fetched_s - began_s,
            "seconds_train": seconds - (fetched_s - began_s),
        }
        self._presence.did(len(rollouts), seconds)
        if is_master_replica:
            # First: rollouts compare with it, and a step that is told of has its checkpoint and its weights.
            if self._ranks.writes:
                self._digests.put(current_step, dict(self.model.named_parameters()))
            if do_save_checkpoint:
                self.save_checkpoint(
                    current_step, total_steps, remain_samples_num, is_final=current_step == total_steps
                )
            elif self._wanted(current_step, total_steps) and self._ranks.writes:
                self._journal.export(current_step, self.model.state_dict())
            self._ranks.gather(None)  # each rank has kept its part
            if self._ranks.writes:
                self._journal.add(Step(current_step, total_steps, seconds, numbers))
        loss = float(numbers.get("loss", 0.0))
        return {
            "train/loss_avg": loss,
            "train/loss_max": loss,
            "train/learning_rate": rate,
            "train/iteration_time": seconds,
            "train/grad_norm": float(numbers.get("gradient_norm", 0.0)),
            "train_step": current_step,
        }

    def _wanted(self, step: int, total: int) -> bool:
        """Whether the run's process evaluates or keeps a checkpoint at a step."""
        config = self._run
        intervals = (config.checkpoint.every_updates, config.evaluation.every_updates)
        return step == total or any(every and step % every == 0 for every in intervals)

    def save_checkpoint(
        self, current_step: int, total_steps: int, remain_samples_num: int, *, is_final: bool = False
    ) -> None:
        """Everything that training goes on from; the weights alone for the run's own process."""
        if self._ranks.writes:
            self._journal.export(current_step, self.model.state_dict())
        self.ckpt_manager.save_checkpoint(
            model=self.model,
            optimizer=Own(self.optimizer),
            scheduler=self._scheduler,
            step=current_step,
            total_steps=total_steps,
            remain_samples_num=remain_samples_num,
            is_final=is_final,
        )
        self.ckpt_manager.save_check(step=current_step)

    def weight_resume(self) -> dict[str, Any]:
        """Go on from the newest checkpoint where that is asked for; what Cosmos-RL compares comes back unchanged."""
        if not self.config.train.resume:
            return {}

        def scheduler(training_steps: int, **_: Any) -> Any:
            self._total = training_steps
            return self.build_lr_schedulers()

        extra, self._scheduler = self.ckpt_manager.load_checkpoint(
            model=self.model,
            optimizer=Own(self.optimizer),
            scheduler=scheduler,
            model_name_or_path=self.config.policy.model_name_or_path,
        )
        found = re.search(r"step_(\d+)", str(self.ckpt_manager.selected_checkpoint_path))
        assert found is not None, self.ckpt_manager.selected_checkpoint_path
        step = int(found[1])
        self._policy.version = step
        self._learner.adopt()
        if self._ranks.writes:
            self._journal.forget(step)
            self._digests.put(step, dict(self.model.named_parameters()))
        result: dict[str, Any] = extra
        return result

    def sync_all_states(
        self,
        is_send: bool,
        send_hook: Callable[[Tensor], None],
        recv_hook: Callable[[Tensor], None],
        reference_model: bool = False,
    ) -> int:
        """Give a replica that joins everything, or take it: weights, and the optimiser's moments."""
        tensors = [*self.model.state_dict().values()]
        if not self.optimizer.state:
            # A replica that has not stepped has no moments to receive into.
            for parameter in self.optimizer.param_groups[0]["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        for parameter in self.optimizer.param_groups[0]["params"]:
            state = self.optimizer.state[parameter]
            state["step"] = state["step"].to(parameter.device)
            tensors += [state["step"], own_part(state["exp_avg"]), own_part(state["exp_avg_sq"])]
        for tensor in tensors:
            (send_hook if is_send else recv_hook)(tensor)
        if not is_send:
            self._learner.adopt()
        return len(tensors)

    def step_validation(self) -> dict[str, Any]:
        """None here: the run's own process evaluates the weights of checkpoints."""
        return {}

    def export_safetensors(self, *args: Any, **kwargs: Any) -> None:
        """None here: weights of checkpoints are exported as they are made."""

    def model_load_from_hf(self) -> None:
        """The policy is built from the run's config."""

    def model_resume_from_checkpoint(self) -> None:
        """See `weight_resume`."""
