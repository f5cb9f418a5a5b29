"""The waypoint policy: a small network whose mean is acceleration and curvature at eight knots of the plan.

Exploration is over four values only: acceleration and curvature before 1 s and from 1 to 2 s, each shifting its group
of knots. The controller looks one to two seconds ahead; later or independent noise would only widen the ratio. `act`
and `score` share one path: the density is a Gaussian around the groups' means, marginal over the noise's correlation in
time (an approximation for correlated noise, ADR 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from alpagym_runtime.errors import ConfigError, CorruptFileError
from alpagym_runtime.policies.base import padded
from alpagym_runtime.policies.unicycle import KNOT_TIMES_S, knots_of_plan, roll_out
from alpagym_runtime.random import normal
from alpagym_runtime.trainers.checkpoints import load_weights
from alpagym_runtime.types import Decision, Observation, Sampling, Score
from alpagym_waypoint.config import BUNDLED, WaypointConfig
from alpagym_waypoint.network import KNOTS, ActorsNetwork, CameraNetwork, cells_taken

ACCELERATION_UNIT_MPS2 = 3.0
CURVATURE_UNIT_PM = 0.06
UNITS = np.array([ACCELERATION_UNIT_MPS2, CURVATURE_UNIT_PM])
EARLY, NEXT = KNOT_TIMES_S < 1.0, (KNOT_TIMES_S >= 1.0) & (KNOT_TIMES_S <= 2.0)

# Groups [4,16]: mean over the knots of acceleration early and next, curvature early and next (knots flattened [2,8]).
_GROUP = np.zeros((4, 16), np.float32)
for _row, (_offset, _knots) in enumerate([(0, EARLY), (0, NEXT), (8, EARLY), (8, NEXT)]):
    _GROUP[_row, _offset + np.flatnonzero(_knots)] = 1.0 / _knots.sum()
# Shifts [4,16]: a group's noise moves all of its knots alike.
_SHIFT = (_GROUP > 0).astype(np.float32)

PICTURE_AXES = 5
SPARE = ("value.", "around.")
"""Names of the weights of heads without which a policy drives begin so."""
LARGEST_FORWARD = 256
"""Rows of one forward in `act`; more go in parts, so that activations stay in the cache."""


def _network(config: WaypointConfig, route_points: int, outputs: int = KNOTS) -> ActorsNetwork | CameraNetwork:
    if not config.cameras:
        return ActorsNetwork(config.hidden, route_points, outputs)
    size = (config.camera_height, config.camera_width)
    seen = config.cameras, config.frames, size, config.channels
    around = config.around_weight > 0.0 and outputs == KNOTS
    return CameraNetwork(config.hidden, route_points, *seen, outputs, around)


def _take(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a network weights. A head of `SPARE` that they lack stays as it is, one that it lacks is left out."""
    given = dict(state)
    for head in SPARE:
        own = {name: value for name, value in module.state_dict().items() if name.startswith(head)}
        found = [name for name in given if name.startswith(head)]
        if not own:
            given = {name: value for name, value in given.items() if name not in found}
        elif not found:
            given |= own
    module.load_state_dict(given)


def _load(module: nn.Module, path: str) -> None:
    """Give a network the weights behind `policy.model.path`."""
    place = Path(__file__).with_name("bundled.safetensors") if path == BUNDLED else Path(path)
    try:
        _take(module, load_weights(place))
    except RuntimeError as err:
        raise ConfigError(f"the weights in {place} do not fit this policy: {err}", key="policy.model.path") from err
    except CorruptFileError as err:
        raise ConfigError(str(err), key="policy.model.path") from err


class WaypointPolicy:
    """See the module's text; implements `alpagym_runtime.types.TrainablePolicy`."""

    def __init__(self, config: WaypointConfig, device: str = "cpu") -> None:
        self.spec = config.spec()
        self.version = 0
        self.device = torch.device(device)
        state = torch.random.get_rng_state()
        torch.manual_seed(config.seed)
        self.module: nn.Module = _network(config, self.spec.route_points)
        if config.value_head:
            # A network of its own: a shared trunk would be bent by the value's larger gradients.
            self.module.value = _network(config, self.spec.route_points, 1)
        self.module.to(self.device)
        torch.random.set_rng_state(state)
        if config.model.path:
            _load(self.module, config.model.path)
        self._std = np.repeat([config.acceleration_std, config.curvature_std], 2).astype(np.float32)
        self._correlation = config.noise_correlation
        self._blank = config.blank_cameras
        self._value_head = config.value_head
        self._around_weight = config.around_weight
        self._group = torch.from_numpy(_GROUP.T.copy()).to(self.device)

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,64,3]; the four explored values stay in the trace as `action`."""
        count = len(seeds)
        knots, means = self._mean(observations)
        carried = observations["carry_noise"].astype(np.float64)
        if sampling.mode == "sample":
            # AR(1) with unit marginal variance; an episode's first noise is white because nothing was carried.
            rho = np.where(np.any(carried != 0.0, axis=1, keepdims=True), self._correlation, 0.0)
            noise = (rho * carried + np.sqrt(1.0 - rho * rho) * normal(seeds, 4)).astype(np.float32)
        else:
            noise = np.zeros((count, 4), np.float32)
        shift = noise * (self._std * np.float32(sampling.temperature))
        action = means + shift
        values = (knots + shift @ _SHIFT).reshape(count, 2, 8).astype(np.float64) * UNITS[None, :, None]
        plan = roll_out(values, observations["ego_dynamics_rig"][:, 0].astype(np.float64))
        with torch.no_grad():
            log_prob = self._log_prob(torch.from_numpy(action), torch.from_numpy(means), sampling)
        return Decision(
            plan_rig=plan,
            log_prob=log_prob.numpy(),
            log_prob_mask=np.ones((count, 1), bool),
            version=np.full(count, self.version, np.int64),
            trace={"action": action},
            carry={"noise": noise},
        )

    def score(self, observations: Observation, decisions: Decision, sampling: Sampling) -> Score:
        """Log-probability [N,1] of the recorded actions, entropy [N] and with a value head the value [N]."""
        inputs = self._tensors(observations)
        means = self.module(*inputs) @ self._group
        value = self.module.get_submodule("value")(*inputs)[:, 0] if self._value_head else None
        action = torch.from_numpy(np.asarray(decisions.trace["action"])).to(self.device)
        log_prob = self._log_prob(action, means, sampling)
        std = self._std * sampling.temperature
        entropy = float(np.sum(np.log(std)) + 2.0 * (1.0 + math.log(2.0 * math.pi)))
        return Score(log_prob, torch.full((len(action),), entropy, device=self.device), value)

    def load(self, state: Mapping[str, Any], version: int) -> None:
        """Take new weights; there are no caches."""
        _take(self.module, state)
        self.version = version

    def forward(self, observations: Observation) -> Tensor:
        """Knots [N,16] in units, differentiable."""
        knots: Tensor = self.module(*self._tensors(observations))
        return knots

    def imitation_loss(self, observations: Observation, target_plan_rig: NDArray[np.float32]) -> Tensor:
        """[N] squared error of the knots against those of the expert's plans [N,64,3]; later knots count less.

        Where road users are told (`actors_rig`), `around_weight` times the mean cross-entropy of the cells is added.
        """
        speed = observations["ego_dynamics_rig"][:, 0].astype(np.float64)
        target = knots_of_plan(target_plan_rig, speed) / UNITS[None, :, None]
        wanted = torch.from_numpy(np.clip(target, -4.0, 4.0).reshape(len(target), 16).astype(np.float32))
        weight = torch.from_numpy(np.tile(np.where(KNOT_TIMES_S <= 2.0, 1.0, 0.15), 2).astype(np.float32))
        told = self._around_weight > 0.0 and "actors_rig" in observations
        inputs = self._tensors(observations)
        found: Tensor = self.module(*inputs, around=True) if told else self.module(*inputs)
        error = found[:, :KNOTS] - wanted.to(self.device)
        loss = (error * error * weight.to(self.device)).sum(dim=-1)
        if not told:
            return loss
        taken = torch.from_numpy(cells_taken(observations)).to(self.device)
        cells = binary_cross_entropy_with_logits(found[:, KNOTS:], taken, reduction="none")
        return loss + self._around_weight * cells.mean(dim=-1)

    def _inputs(self, observations: Observation) -> list[NDArray[Any]]:
        arrays: list[NDArray[Any]] = self.module.inputs(observations)  # type: ignore[operator]
        if self._blank:
            arrays = [np.zeros_like(array) if array.ndim == PICTURE_AXES else array for array in arrays]
        # An episode's pictures are read-only views, of which torch takes none.
        return [np.require(array, requirements=["C", "W"]) for array in arrays]

    def _tensors(self, observations: Observation) -> list[Tensor]:
        return [torch.from_numpy(array).to(self.device) for array in self._inputs(observations)]

    def _mean(self, observations: Observation) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Knots [N,16] and the groups' means [N,4], by padded forwards."""
        inputs = self._inputs(observations)
        count = len(inputs[0])
        parts = []
        for start in range(0, count, LARGEST_FORWARD):
            rows = [self._filled(array[start : start + LARGEST_FORWARD]) for array in inputs]
            with torch.no_grad():
                knots = self.module(*rows)
                parts.append(torch.cat([knots, knots @ self._group], dim=1)[: count - start].cpu().numpy())
        both = np.concatenate(parts) if parts else np.zeros((0, 20), np.float32)
        return both[:, :16], both[:, 16:]

    def _filled(self, rows: NDArray[Any]) -> Tensor:
        """Rows followed by zeros, so that the bits of a row do not depend on how many there are.

        A GPU's libraries choose their kernels by the number of rows: there it is always the same, and zeros are made
        there. They are computed with: a forward of few rows costs as much as one of `LARGEST_FORWARD`.
        """
        if self.device.type == "cpu":
            return torch.from_numpy(padded(rows))
        found = torch.from_numpy(rows).to(self.device)
        return torch.cat([found, found.new_zeros(LARGEST_FORWARD - len(rows), *found.shape[1:])])

    def _log_prob(self, action: Tensor, means: Tensor, sampling: Sampling) -> Tensor:
        """[N,1] Gaussian log-density of actions around means, with the sampling's temperature."""
        std = torch.from_numpy(self._std * np.float32(sampling.temperature)).to(means.device)
        z = (action.to(means.device) - means) / std
        constant = torch.log(std).sum() + 2.0 * math.log(2.0 * math.pi)
        return (-0.5 * (z * z).sum(dim=-1) - constant)[:, None]
