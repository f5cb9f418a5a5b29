"""Imitation until validation stops improving: the best epoch's weights, and when to stop waiting for a better one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from alpagym_runtime.trainers.base import Observations
from alpagym_runtime.trainers.team import Team
from alpagym_runtime.types import ImitatingPolicy


class EarlyStop:
    """Watches the loss on validation data; what it knows lies in `state` and `best`, which travel in checkpoints.

    Args:
        policy: the trainee.
        observation, target: validation decisions, targets [B,T,3].
        patience: epochs without improvement after which it is over.
        batch: decisions a forward.
        state: of the stage; `best_loss`, `best_epoch`.
        team: each of it has a part of the decisions.

    """

    def __init__(
        self,
        policy: ImitatingPolicy,
        observation: Observations,
        target: NDArray[np.float32],
        patience: int,
        batch: int,
        state: dict[str, Any],
        team: Team,
    ) -> None:
        self.best = copy.deepcopy(policy.module)
        self._policy, self._observation, self._target = policy, observation, target
        self._patience, self._batch, self._state, self._team = patience, batch, state, team
        self._count = sum(team.gather(len(target)))

    def after_epoch(self, epoch: int) -> tuple[dict[str, float], bool]:
        """Numbers to log after epoch 1, 2, …, and whether to stop."""
        loss = self._loss()
        best = self._state.get("best_loss")
        if np.isfinite(loss) and (best is None or loss < best):
            self._state |= {"best_loss": loss, "best_epoch": epoch}
            self.best.load_state_dict(self._policy.module.state_dict())
        waited = epoch - int(self._state.get("best_epoch", 0))
        numbers = {"validation_loss": loss, "validation_samples": float(self._count), "epochs_waited": waited}
        return numbers, waited >= self._patience

    def take_best(self) -> None:
        """Give the policy the weights of the best epoch; without a finite loss in any, it keeps its own."""
        if "best_loss" in self._state:
            self._policy.load(self.best.state_dict(), self._policy.version)

    def _loss(self) -> float:
        """Mean over the validation decisions of the team."""
        total = 0.0
        with torch.no_grad():
            for start in range(0, len(self._target), self._batch):
                rows = np.arange(start, min(start + self._batch, len(self._target)))
                loss = self._policy.imitation_loss(self._observation.take(rows), self._target[rows])
                total += float(loss.double().sum())
        return float(sum(self._team.gather(total))) / self._count
