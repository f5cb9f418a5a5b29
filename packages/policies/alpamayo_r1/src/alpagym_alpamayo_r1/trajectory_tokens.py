"""Trajectories as token numbers: the future through the unicycle's actions, the history through its differences.

Numbers here are bins, without the vocabulary's offset (`vocabulary.TrajectoryIds` adds it). Rounding is to even at
ties and in float32, so that a standing car gets the same bins everywhere.

Source: the published tokenizers of NVlabs/alpamayo (formulas and constants), written anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpagym_alpamayo_r1.action_space import Path, UnicycleActionSpace
from alpagym_plugins import ConfigError

YAW_WINDOW = 10


@dataclass(frozen=True)
class Bins:
    """Uniform bins over [low, high] for each of D dimensions; the ends are bin centres.

    Attributes:
        low, high: D numbers.
        count: bins a dimension.

    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    count: int

    def encode(self, values: Tensor) -> Tensor:
        """Bins [...,D] i64 of values [...,D]; what lies outside gets the nearest end."""
        low, high = self._ends(values.device)
        scaled = (values.float() - low) / (high - low) * (self.count - 1)
        return torch.round(scaled).clamp(0, self.count - 1).long()

    def decode(self, bins: Tensor) -> Tensor:
        """Values [...,D] f32 at the centres of bins [...,D]."""
        low, high = self._ends(bins.device)
        return bins.float() / (self.count - 1) * (high - low) + low

    def _ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.low, device=device), torch.tensor(self.high, device=device)


@dataclass(frozen=True)
class FutureTokenizer:
    """Plans as 2 T bins: a0 k0 a1 k1 … in the action space's order.

    Attributes:
        action_space: what the bins quantise.
        bins: two dimensions, normalised units.

    """

    action_space: UnicycleActionSpace
    bins: Bins

    @property
    def tokens(self) -> int:
        """Tokens a plan."""
        return 2 * self.action_space.waypoints

    def encode(self, history_xyz: Tensor, history_yaw: Tensor, future_xyz: Tensor, future_yaw: Tensor) -> Tensor:
        """Bins [...,2T]; arguments as `UnicycleActionSpace.encode`."""
        return self.bins.encode(self.action_space.encode(history_xyz, history_yaw, future_xyz, future_yaw)).flatten(-2)

    def decode(self, bins: Tensor, history_xyz: Tensor, history_yaw: Tensor) -> Path:
        """The plan of bins [...,2K], K <= T; the start speed comes from the history [...,H,3] m, [...,H] rad."""
        return self.decode_from(bins, self.action_space.initial_speed(history_xyz, history_yaw))

    def decode_from(self, bins: Tensor, speed_mps: Tensor) -> Path:
        """The plan of bins [...,2K], K <= T, from a start speed [...]."""
        return self.action_space.decode(self.bins.decode(bins.unflatten(-1, (-1, 2))), speed_mps)


@dataclass(frozen=True)
class HistoryTokenizer:
    """Positions as 3 H bins of their differences; the first difference is from the origin of the frame.

    Attributes:
        bins: three dimensions, m.

    """

    bins: Bins = Bins((-4.0, -4.0, -10.0), (4.0, 4.0, 10.0), 1000)

    def encode(self, history_xyz: Tensor) -> Tensor:
        """Bins [...,3H] of positions [...,H,3] m."""
        padded = torch.cat([torch.zeros_like(history_xyz[..., :1, :]), history_xyz], -2)
        return self.bins.encode(torch.diff(padded, dim=-2)).flatten(-2)

    def decode(self, bins: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [...,H,3] m and yaw [...,H] rad of bins [...,3H].

        Yaw is the direction of motion, from a cubic fitted to a window of 10 points around each (fewer if H is less).
        """
        xyz = torch.cumsum(self.bins.decode(bins.unflatten(-1, (-1, 3))), -2)
        return xyz, yaw_of_motion(xyz[..., :2])


def yaw_of_motion(xy: Tensor) -> Tensor:
    """Direction of motion [...,H] rad at points [...,H,2], by least-squares cubics over sliding windows."""
    count = xy.shape[-2]
    width, degree = min(YAW_WINDOW, count), min(3, count - 1)
    slopes = torch.zeros(count, count, dtype=torch.float64)
    for k in range(count):
        first = min(max(k - width // 2, 0), count - width)
        offsets = torch.arange(first, first + width, dtype=torch.float64) - k
        powers = offsets[:, None] ** torch.arange(degree + 1, dtype=torch.float64)
        # The fitted cubic's derivative at the point itself is its linear coefficient.
        slopes[k, first : first + width] = torch.linalg.pinv(powers)[1]
    velocity = slopes.to(xy) @ xy
    return torch.atan2(velocity[..., 1], velocity[..., 0])


def future_tokenizer(config: Mapping[str, Any]) -> FutureTokenizer:
    """From a checkpoint's `traj_tokenizer_cfg`, whose targets were looked up before.

    Raises:
        ConfigError: names the unknown key or the wrong value.

    """
    known = {"action_space_cfg", "dims_min", "dims_max", "num_bins"}
    _check(config, known, "traj_tokenizer_cfg")
    space = UnicycleActionSpace.from_config(config.get("action_space_cfg") or {})
    low, high = _ends(config, "dims_min", "dims_max", "traj_tokenizer_cfg", (-10.0, -10.0), (10.0, 10.0))
    return FutureTokenizer(space, Bins(low, high, _count(config, "traj_tokenizer_cfg", 3000)))


def history_tokenizer(config: Mapping[str, Any]) -> HistoryTokenizer:
    """From a checkpoint's `hist_traj_tokenizer_cfg`.

    Raises:
        ConfigError: names the unknown key or the wrong value, or a variant that is not read (yaw, no padding).

    """
    key = "hist_traj_tokenizer_cfg"
    _check(config, {"ego_xyz_min", "ego_xyz_max", "num_bins", "predict_yaw", "pad_origin_at_beginning"}, key)
    if config.get("predict_yaw", False):
        raise ConfigError("tokens of yaw are not read", key=f"{key}.predict_yaw")
    if not config.get("pad_origin_at_beginning", True):
        raise ConfigError("must be true: the first token is the first position", key=f"{key}.pad_origin_at_beginning")
    low, high = _ends(config, "ego_xyz_min", "ego_xyz_max", key, (-4.0, -4.0, -10.0), (4.0, 4.0, 10.0))
    return HistoryTokenizer(Bins(low, high, _count(config, key, 1000)))


def _check(config: Mapping[str, Any], known: set[str], key: str) -> None:
    for name in config:
        if name not in known and not name.startswith("_"):
            raise ConfigError(f"unknown key; known here: {', '.join(sorted(known))}", key=f"{key}.{name}")


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    count = config.get("num_bins", default)
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise ConfigError(f"must be a whole number of at least 2, got {count!r}", key=f"{key}.num_bins")
    return count


def _ends(
    config: Mapping[str, Any], low: str, high: str, key: str, least: Sequence[float], most: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    lows, highs = tuple(config.get(low, least)), tuple(config.get(high, most))
    if len(lows) != len(least) or len(highs) != len(most) or any(a >= b for a, b in zip(lows, highs, strict=True)):
        raise ConfigError(f"{low} and {high} must be {len(least)} rising ends, got {lows} and {highs}", key=key)
    return lows, highs
