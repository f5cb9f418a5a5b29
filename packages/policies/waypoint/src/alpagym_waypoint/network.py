"""The waypoint policy's networks and their inputs: ego, route, and either the nearest road users or pictures.

Pictures reach the first convolution as the u8 [N,K,h,w,3] that the simulator made: each frame has weights of its own
there and the results are added, which is a convolution over all K frames' channels without re-ordering any pixel
(measured, 2 frames of 48 x 96: 50 us a forward instead of 61, one thread).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alpagym_runtime.types import Observation

KNOTS = 16
"""Acceleration and curvature at eight times each, in units: what a network answers that drives."""
ACTOR_FEATURES = 13
HISTORY_EVERY, HISTORY_ROWS = 3, 5
AHEAD_S = (0.0, 1.0, 2.0)
CELLS_X_M = np.array([-4, 4, 8, 12, 17, 23, 30, 40], np.float32)
CELLS_Y_M = np.array([-8, -4.5, -2.6, -1.2, 1.2, 2.6, 4.5, 8], np.float32)
CELLS = len(AHEAD_S) * (len(CELLS_X_M) - 1) * (len(CELLS_Y_M) - 1)
"""Ground around the car, finer where it drives: what a network that sees is taught to find taken, now and later."""
PIXEL_CENTRE, PIXEL_UNIT = 128.0, 64.0


def ego_features(observation: Observation) -> NDArray[np.float32]:
    """[N,F] scaled dynamics, past poses and route; masked rows are zeros."""
    dynamics = observation["ego_dynamics_rig"]
    scaled = dynamics / np.array([10, 10, 10, 3, 3, 3, 0.5], np.float32)
    first = -(HISTORY_ROWS - 1) * HISTORY_EVERY - 1
    history = observation["ego_history_rig"][:, first::HISTORY_EVERY]
    known = observation["ego_history_mask"][:, first::HISTORY_EVERY]
    past = np.concatenate([history[..., :2] / 10.0, history[..., 6:7] * 4.0, known[..., None]], axis=-1)
    past = np.where(known[..., None], past, 0.0)
    route, on = observation["route_rig"], observation["route_mask"]
    way = np.concatenate([route / np.array([40.0, 10.0], np.float32), on[..., None]], axis=-1)
    way = np.where(on[..., None], way, 0.0)
    count = len(dynamics)
    ego = np.concatenate([scaled, past.reshape(count, -1), way.reshape(count, -1)], axis=1)
    return np.clip(ego, -6.0, 6.0).astype(np.float32)


def actor_features(observation: Observation) -> NDArray[np.float32]:
    """[N,A,13] scaled nearest road users; masked ones are zeros."""
    raw, mask = observation["actors_rig"], observation["actors_mask"]
    x, y, yaw, vx, vy, length, width = (raw[..., k] for k in range(7))
    speed = observation["ego_dynamics_rig"][:, None, 0]
    # Relative speed, and where both will be in one and two seconds if nothing changes.
    near = np.stack(
        [
            *(x / 20, y / 5, np.cos(yaw), np.sin(yaw), vx / 10, vy / 5, (vx - speed) / 10, length / 5, width / 2),
            *((x + (vx - speed)) / 20, (y + vy) / 5, (x + 2 * (vx - speed)) / 20, (y + 2 * vy) / 5),
        ],
        axis=-1,
    )
    return np.where(mask[..., None], np.clip(near, -6.0, 6.0), 0.0).astype(np.float32)


def cells_taken(observation: Observation) -> NDArray[np.float32]:
    """[N,CELLS] 1 where a road user's box reaches into a cell now, or will in one or two seconds if nothing changes.

    Boxes are those around the turned box. Cells move with the car's frame of now: its own motion is not foreseen.
    """
    x, y, yaw, vx, vy, length, width = (observation["actors_rig"][..., k] for k in range(7))
    cos, sin = np.abs(np.cos(yaw)), np.abs(np.sin(yaw))
    reach_x, reach_y = (length * cos + width * sin) / 2.0, (length * sin + width * cos) / 2.0
    there = observation["actors_mask"][..., None]
    parts = []
    for ahead_s in AHEAD_S:
        at_x, at_y = x + vx * ahead_s, y + vy * ahead_s
        in_x = ((at_x + reach_x)[..., None] > CELLS_X_M[:-1]) & ((at_x - reach_x)[..., None] < CELLS_X_M[1:])
        in_y = ((at_y + reach_y)[..., None] > CELLS_Y_M[:-1]) & ((at_y - reach_y)[..., None] < CELLS_Y_M[1:])
        parts.append(np.any((in_x & there)[..., :, None] & in_y[..., None, :], axis=1).reshape(len(x), -1))
    return np.concatenate(parts, axis=1).astype(np.float32)


class ActorsNetwork(nn.Module):
    """Ego and road users to `outputs` numbers; a shared layer and a maximum, so the users' order is free."""

    def __init__(self, hidden: int, route_points: int, outputs: int = KNOTS) -> None:
        super().__init__()
        self.actors = nn.Sequential(nn.Linear(ACTOR_FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.ego = _ego_layer(hidden, route_points)
        self.trunk = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = _head(hidden, outputs)

    @staticmethod
    def inputs(observation: Observation) -> list[NDArray[Any]]:
        """Ego [N,F], road users [N,A,13] and their mask [N,A]."""
        return [ego_features(observation), actor_features(observation), observation["actors_mask"]]

    def forward(self, ego: Tensor, actors: Tensor, actors_mask: Tensor) -> Tensor:
        """What `inputs` gives, to [N,outputs]."""
        each = self.actors(actors)
        # A masked actor must not reach the maximum whatever it holds: select, do not multiply.
        each = torch.where(actors_mask[..., None], each, torch.zeros_like(each))
        return self.head(self.trunk(torch.cat([self.ego(ego), each.amax(dim=1)], dim=-1)))


class CameraEncoder(nn.Module):
    """Pictures [N,K,h,w,3] u8 of one camera to [N,hidden]."""

    def __init__(self, hidden: int, frames: int, height: int, width: int, channels: Sequence[int]) -> None:
        super().__init__()
        first, second, third = channels
        self.stem = nn.ModuleList([nn.Conv2d(3, first, 4, stride=4, bias=k == 0) for k in range(frames)])
        self.rest = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(second, third, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.startswith("stem.") and weight.ndim == 4:
                    # As if all frames' channels went into one convolution.
                    weight.mul_(frames**-0.5)
            size = self.rest(torch.zeros(1, first, height // 4, width // 4)).shape[1]
        self.features = nn.Sequential(nn.Linear(size, hidden), nn.ReLU())

    def forward(self, pictures: Tensor) -> Tensor:
        """See the class."""
        # Views in channels-last order; the conversion keeps it.
        frames = (pictures[:, k].permute(0, 3, 1, 2).float() for k in range(pictures.shape[1]))
        scaled = (frame.sub_(PIXEL_CENTRE).mul_(1.0 / PIXEL_UNIT) for frame in frames)
        first, *others = (layer(frame) for layer, frame in zip(self.stem, scaled, strict=True))
        features: Tensor = self.features(self.rest(sum(others, start=first)))
        return features


class CameraNetwork(nn.Module):
    """Ego and pictures of cameras to `outputs` numbers, and while it imitates to the cells around the car."""

    def __init__(
        self,
        hidden: int,
        route_points: int,
        cameras: Sequence[str],
        frames: int,
        size: tuple[int, int],
        channels: Sequence[int],
        outputs: int = KNOTS,
        around: bool = False,
    ) -> None:
        super().__init__()
        self.cameras = tuple(cameras)
        self.encoders = nn.ModuleList([CameraEncoder(hidden, frames, *size, channels) for _ in cameras])
        self.ego = _ego_layer(hidden, route_points)
        width = (1 + len(self.cameras)) * hidden
        self.trunk = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = _head(hidden, outputs)
        if around:
            self.around = nn.Linear(len(self.cameras) * hidden, CELLS)

    def inputs(self, observation: Observation) -> list[NDArray[Any]]:
        """Ego [N,F] and each camera's pictures [N,K,h,w,3] u8."""
        return [ego_features(observation), *(observation[f"camera_{name}"] for name in self.cameras)]

    def forward(self, ego: Tensor, *pictures: Tensor, around: bool = False) -> Tensor:
        """What `inputs` gives, to [N,outputs]; with `around` [N,outputs + CELLS], logits of the cells behind them."""
        parts = [encoder(seen) for encoder, seen in zip(self.encoders, pictures, strict=True)]
        found: Tensor = self.head(self.trunk(torch.cat([self.ego(ego), *parts], dim=-1)))
        # From the pictures' features alone: what they show has to be in them.
        return torch.cat([found, self.around(torch.cat(parts, dim=-1))], dim=-1) if around else found


def _ego_layer(hidden: int, route_points: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7 + 4 * HISTORY_ROWS + 3 * route_points, hidden), nn.ReLU())


def _head(hidden: int, outputs: int) -> nn.Linear:
    head = nn.Linear(hidden, outputs)
    with torch.no_grad():
        # The first plan keeps speed and heading; the first value is about 0.
        head.weight.mul_(0.05)
        head.bias.zero_()
    return head
