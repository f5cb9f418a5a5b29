"""`trainer=cosmos` in the run's own process: starts a Cosmos-RL job, takes its steps into the run, evaluates, ends it.

The job trains and keeps its checkpoints by itself. This process reads its steps from the run directory, and where one
has weights kept it takes them as the run's: evaluations on held-out scenes, the best checkpoint and the report are
those of every other trainer, and an evaluation holds up no GPU of the job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.files import replacing
from alpagym_runtime.trainers.base import StopTraining
from alpagym_runtime.trainers.checkpoints import load_weights
from alpagym_runtime.trainers.cosmos.config import CosmosTrainerConfig, rollouts_at_work
from alpagym_runtime.trainers.cosmos.journal import Journal, Step
from alpagym_runtime.trainers.cosmos.prompts import Prompts
from alpagym_runtime.trainers.cosmos.supervisor import Job, JobError, newest_checkpoint, remove_torn_checkpoints
from alpagym_runtime.trainers.cosmos.tables import FOLDER, INITIAL, require_plain
from alpagym_runtime.trainers.cosmos.version import require_version
from alpagym_runtime.trainers.run import load_into
from alpagym_runtime.trainers.sft.trainer import SftTrainer
from alpagym_runtime.transport.between import remove_leftovers

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run

STAGE = "cosmos"
_LOOK_S = 0.5


class CosmosTrainer:
    """See the module's text."""

    def __init__(self, config: CosmosTrainerConfig) -> None:
        self._config = config
        self._done = 0  # the last step of the job that is one of the run's

    def fit(self, run: Run) -> None:
        """Evaluate, warm start, evaluate, train, evaluate."""
        require_plain(run.directory)  # now, not after hours of a warm start
        require_version()
        run.evaluate_policy("start")
        if self._config.warm_start is not None:
            SftTrainer(self._config.warm_start).train(run)
            run.evaluate_policy("warm_start")
        if not run.stage_done(STAGE):
            self._train(run)
        run.conclude()

    def _train(self, run: Run) -> None:
        directory, cosmos = run.directory, run.config.cosmos
        total = prepare(run)
        journal, job = Journal(directory), Job(run.config, directory)
        # What the run keeps of the job has no optimiser: that is in the job's own checkpoints.
        blank = torch.optim.SGD(run.policy.module.parameters(), lr=0.0)
        self._done = run.begin_stage(STAGE, total, "steps", blank)
        rollouts, working = cosmos.rollout.parallelism.n_init_replicas, rollouts_at_work(run.config)
        if working < rollouts:
            batch = f"{cosmos.rollout.batch_size} groups × {run.config.rollout.group_size}"
            run.reporter.note(
                f"{working} of {rollouts} rollout replicas can drive at once: each takes {batch} episodes, a step has "
                f"{cosmos.global_batch}; a smaller cosmos.rollout.batch_size, a larger step, or fewer of them"
            )
        left, ranks = cosmos.restarts, cosmos.policy.parallelism.gpus_per_replica
        while True:
            try:
                newest = newest_checkpoint(directory, ranks)
                remove_torn_checkpoints(directory, newest)
                journal.forget(newest)  # what is not in a checkpoint is made again
                journal.complete(newest, total)
                if newest >= total:
                    for step in journal.steps(self._done):
                        self._take(run, journal, step, blank)
                    return
                job.start(resume=newest > 0)
                for step in self._steps(run, job, journal, total):
                    self._take(run, journal, step, blank)
                    left = cosmos.restarts
                return
            except JobError as err:
                if not left:
                    raise SimulatorError(
                        f"{err}\nto go on from the last checkpoint: alpagym resume {directory}", code="COSMOS"
                    ) from err
                left -= 1
                run.reporter.note(f"{str(err).splitlines()[0]}; started again from the last checkpoint")
            except StopTraining:
                self._stop(run, job, journal, blank)
                raise
            finally:
                job.stop()
                # Rollouts drive ahead: what they made last, nobody trains on.
                remove_leftovers(run.config, directory)

    def _steps(self, run: Run, job: Job, journal: Journal, total: int) -> Iterator[Step]:
        """Steps of the job that are not taken yet, as they come, to its end.

        Discarded episodes may make it shorter than `total`; each step says anew how long it will be.
        """
        running = True
        while running:
            run.check_stop()
            running = job.check(_LOOK_S, self._done, total)
            for step in journal.steps(self._done):
                total = step.total
                yield step

    def _take(self, run: Run, journal: Journal, step: Step, blank: torch.optim.Optimizer) -> None:
        """Make a step of the job one of the run's."""
        self._done = step.step  # before a request to stop ends the call: the step is logged by then
        weights = journal.exported(step.step)
        if weights is not None:
            load_into(run.policy, load_weights(weights), step.step, str(weights))
        run.end_step(STAGE, step.step, step.total, step.numbers, step.seconds, blank)
        journal.release(step.step)

    def _stop(self, run: Run, job: Job, journal: Journal, blank: torch.optim.Optimizer) -> None:
        """An end in order where the job can be asked for one; else what the last checkpoint holds is kept."""
        if job.ask_to_stop():
            job.wait_for_end(run.config.deploy.grace_s)
            for step in journal.steps(self._done):
                with contextlib.suppress(StopTraining):
                    self._take(run, journal, step, blank)
        # What the run keeps now are the weights that the job goes on from.
        newest = newest_checkpoint(run.directory, run.config.cosmos.policy.parallelism.gpus_per_replica)
        if (weights := journal.exported(newest)) is not None:
            load_into(run.policy, load_weights(weights), newest, str(weights))


def prepare(run: Run) -> int:
    """Put the first weights and the prompts where workers read them; the number of training steps.

    Raises:
        SimulatorError: the scenes do not fill one step.

    """
    folder, cosmos = run.directory / FOLDER, run.config.cosmos
    folder.mkdir(exist_ok=True)
    initial = folder / INITIAL
    if not initial.is_file():
        from safetensors.torch import save_file

        state = run.policy.module.state_dict()
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
        with replacing(initial) as temporary:  # half of it would be taken for it by every later start
            save_file(tensors, temporary)
    prompts = Prompts(run.config, run.core("train", run.policy.spec, scenes=0).spec.scenes)
    prompts.write(run.directory)
    total = len(prompts) * run.config.rollout.group_size // cosmos.global_batch
    if total < 1:
        raise SimulatorError(
            f"{len(prompts)} prompts × rollout.group_size = {run.config.rollout.group_size} episodes are less than one "
            f"training step of {cosmos.global_batch}; raise cosmos.train.epoch",
            code="NO_STEP",
        )
    return min(total, cosmos.train.max_num_steps or total)
