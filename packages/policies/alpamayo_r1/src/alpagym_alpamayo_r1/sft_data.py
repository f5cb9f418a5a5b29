"""Samples of a training split in the order in which they are learned, streamed from the run's world.

Which sample a process learns from at which step follows from the seed, the step and the team's size alone, so a run
that is resumed goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpagym_plugins import ConfigError
from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.random import generator
from alpagym_runtime.types import EpisodeRequest, Labels, Observation

TARGET, COT = "target_plan_rig", "cot_utf8"


@dataclass(frozen=True)
class Plan:
    """Which samples each step learns from.

    Attributes:
        samples: of the split.
        batch: of one forward in each process.
        accumulate: forwards of a step.
        processes: of the team.
        epochs: passes.
        max_steps: 0 for no bound.
        seed: of the order.

    """

    samples: int
    batch: int
    accumulate: int
    processes: int
    epochs: int
    max_steps: int
    seed: int

    @property
    def steps_an_epoch(self) -> int:
        """Optimiser steps of a pass; the last one may have fewer forwards."""
        return -(-self._forwards // self.accumulate)

    @property
    def steps(self) -> int:
        """Optimiser steps of all passes."""
        return min(self.epochs * self.steps_an_epoch, self.max_steps or self.epochs * self.steps_an_epoch)

    @property
    def _forwards(self) -> int:
        return -(-self.samples // (self.batch * self.processes))

    def of_step(self, step: int, rank: int) -> list[list[int]]:
        """The samples of each forward of a step, in one process; every process has as many forwards.

        A pass goes through a shuffled order, filled up from its beginning so that all forwards are full.
        """
        epoch, place = divmod(step, self.steps_an_epoch)
        order = generator(self.seed, 51, epoch).permutation(self.samples)
        order = np.resize(order, self._forwards * self.batch * self.processes)
        forwards = order.reshape(self._forwards, self.processes, self.batch)[:, rank]
        return forwards[place * self.accumulate : (place + 1) * self.accumulate].tolist()


class Samples:
    """Recorded drives by scene, through the simulator protocol.

    Args:
        simulator: whose scenes are the split's, asked for the labels `target_plan_rig` and, for texts, `cot_utf8`.
        batch: slots.
        texts: whether reasoning is read too.

    """

    def __init__(self, simulator: Any, batch: int, texts: bool) -> None:
        self._simulator, self._texts = simulator, texts
        self.scenes: Sequence[str] = simulator.spec.scenes
        if simulator.spec.slots < batch:
            raise ConfigError(f"must be at least {batch}, the samples of a forward", key="rollout.slots")

    def expect(self, samples: Sequence[int]) -> None:
        """Samples that will be read, soonest first; a world that decodes ahead does so."""
        if hasattr(self._simulator, "expect"):
            self._simulator.expect([self._request(sample) for sample in samples])

    def read(self, samples: Sequence[int]) -> tuple[Observation, np.ndarray, list[dict[str, str]]]:
        """Observations, targets [B,64,3] and texts of samples, in their order.

        Raises:
            SimulatorError: one cannot be read; says why.

        """
        slots = np.arange(len(samples))
        self._simulator.start(slots, [self._request(sample) for sample in samples])
        batch = self._simulator.receive(len(samples), 120.0)
        failed = [failure.text for failure in batch.failure if failure is not None]
        if failed or len(batch) < len(samples):
            raise SimulatorError(
                failed[0] if failed else f"{len(samples) - len(batch)} of {len(samples)} samples took over 120 s",
                code="UNREADABLE_SAMPLE",
                permanent=bool(failed),
            )
        order = np.argsort(batch.slots)
        observation = {name: values[order] for name, values in batch.observation.items()}
        labels = {name: np.asarray(values)[order] for name, values in batch.labels.items()}
        return observation, labels[TARGET], [self._text(labels, row) for row in range(len(samples))]

    def _text(self, labels: Labels, row: int) -> dict[str, str]:
        if not self._texts:
            return {}
        return {"cot": np.asarray(labels[COT][row][labels[f"{COT}_mask"][row]], np.uint8).tobytes().decode()}

    def _request(self, sample: int) -> EpisodeRequest:
        return EpisodeRequest(scene_id=self.scenes[sample], horizon_ticks=1)
