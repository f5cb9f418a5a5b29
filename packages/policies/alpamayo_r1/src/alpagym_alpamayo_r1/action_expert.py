"""The action expert: a narrow decoder that turns noise into actions while it reads the language model's memory.

Flow matching: x_t = t · x + (1 - t) · noise, and the expert predicts x - noise. In training t = 0.999 · (1 - Beta(1.5,
1)), which looks mostly at noisy actions; at inference ten Euler steps go from t = 0 to 1. The T action tokens see each
other (not causally) and every valid token of the prefix up to `<|traj_future_start|>`.

For RL the ten steps can be drawn instead: `Chain` adds noise to each Euler step and takes it back through the drift, so
that x_t keeps its distribution, and every step is a Gaussian whose density `score` computes again.

Parameter names are those of the released checkpoints: `encoder.trunk.<i>`, `norm`, `layers.<i>`.

Source: sizes, names and schedule as published by NVlabs/alpamayo; flow matching arXiv:2210.02747; the step with noise
arXiv:2505.05470 (equation 9), with another noise schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TIME_SCALE = 0.999
TIME_ALPHA = 1.5
NORM_EPS = 1e-5


class FourierFeatures(nn.Module):
    """sqrt 2 · (sin, cos) of 2π f x for `count / 2` frequencies f, log-spaced from 1 to `max_freq`; always float32.

    The frequencies are a function of the configuration and no weight: they are in no checkpoint. `rounded` gives them
    bfloat16's precision, as the bfloat16 releases had them when they were trained.
    """

    freqs: Tensor

    def __init__(self, count: int, max_freq: float, rounded: bool) -> None:
        super().__init__()
        freqs = torch.logspace(0.0, math.log10(max_freq), count // 2)
        self.rounded = rounded
        self.register_buffer("freqs", freqs.bfloat16().float() if rounded else freqs, persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """[...] to [...,count]."""
        angle = values.float()[..., None] * self.freqs.float() * (2.0 * math.pi)
        return torch.cat([torch.sin(angle), torch.cos(angle)], -1) * math.sqrt(2.0)


class Trunk(nn.Module):
    """`layers` hidden layers of Linear and SiLU with RMS norms between, then a linear one."""

    def __init__(self, inputs: int, hidden: int, outputs: int, layers: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Linear(inputs, hidden), nn.SiLU()]
        for _ in range(layers - 1):
            parts += [nn.RMSNorm(hidden, eps=NORM_EPS), nn.Linear(hidden, hidden), nn.SiLU()]
        self.trunk = nn.Sequential(*parts, nn.RMSNorm(hidden, eps=NORM_EPS), nn.Linear(hidden, outputs))

    def forward(self, values: Tensor) -> Tensor:
        """[...,inputs] to [...,outputs]."""
        return self.trunk(values)


class ActionInput(nn.Module):
    """Noisy actions and time to one embedding a way-point."""

    def __init__(
        self,
        dimensions: int,
        width: int,
        *,
        hidden_size: int = 1024,
        num_enc_layers: int = 4,
        num_fourier_feats: int = 20,
        max_freq: float = 100.0,
        rounded: bool = False,
    ) -> None:
        super().__init__()
        self.sinus = nn.ModuleList(
            [FourierFeatures(num_fourier_feats, max_freq, rounded) for _ in range(dimensions)]
        )  # one a dimension, as the releases name them; all alike
        self.timestep_fourier_encoder = FourierFeatures(num_fourier_feats, max_freq, rounded)
        self.encoder = Trunk((dimensions + 1) * num_fourier_feats, hidden_size, width, num_enc_layers)
        self.norm = nn.LayerNorm(width)

    def forward(self, actions: Tensor, time: Tensor) -> Tensor:
        """Actions [B,T,D] and times [B] to [B,T,width]."""
        features = [encode(actions[..., i]) for i, encode in enumerate(self.sinus)]
        clock = self.timestep_fourier_encoder(time)[:, None].expand(-1, actions.shape[1], -1)
        return self.norm(self.encoder(torch.cat([*features, clock], -1).to(self.norm.weight.dtype)))


Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x_t [B,T,D], t [B]) to dx/dt [B,T,D]."""


def euler(velocity: Velocity, noise: Tensor, steps: int, first: int = 0) -> Tensor:
    """Actions [B,T,D] f32 from noise [B,T,D] at t = 0, by equal Euler steps to t = 1; or from x at step `first`."""
    x, dt = noise.float(), 1.0 / steps
    for k in range(first, steps):
        x = x + dt * velocity(x, torch.full((len(x),), k * dt, device=x.device)).float()
    return x


@dataclass(frozen=True)
class Chain:
    """Denoising by S steps, of which the first F are drawn, x_0 … x_F: x_(k+1) ~ N(mean_k(x_k), std_k²) a coordinate.

    The flow dx = v dt keeps its marginals when noise of variance g² dt comes in and the drift gets g²/2 times the
    score, which at x_t = t x + (1 - t) noise is -(x_t - t v) / (1 - t). With g² = level² (1 - t) nothing divides by 0
    at either end: mean = x + dt (v - level²/2 (x - t v)) and std = level · sqrt((1 - t) dt). The same holds where noise
    and what takes it back are projected on a subspace (`modes`): the rest follows the flow.

    Attributes:
        steps: S.
        level: of the noise, > 0; towards 0 the chain becomes `euler`.
        drawn: F; None: all. The others are Euler steps, certain given x_F and the weights: what a change of the weights
            does there has no factor, and earns no gradient.
        counted: way-points whose coordinates count in the density; None: all.
        modes: of each dimension, noise moves so many cosines over the counted way-points, the constant one first, and
            nothing else; None: each way-point has noise of its own.

    """

    steps: int
    level: float
    drawn: int | None = None
    counted: int | None = None
    modes: int | None = None

    @property
    def factors(self) -> int:
        """F."""
        return self.steps if self.drawn is None else min(self.drawn, self.steps)

    def sample(self, velocity: Velocity, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a chain.

        Args:
            velocity: the expert.
            noise: [B,F+1,T,D] standard normal; the first is x_0.

        Returns:
            x [B,F+1,T,D] f32, actions [B,T,D] f32, and the log-density [B,F] f64 of each step.

        """
        x = [noise[:, 0].float()]
        log_prob = []
        for k in range(self.factors):
            mean, std = self._step(velocity, x[-1], k)
            x.append((mean + std * self._within(noise[:, k + 1].double())).float())
            log_prob.append(self._log_density(x[-1], mean, std))
        actions = euler(velocity, x[-1], self.steps, self.factors)
        return torch.stack(x, 1), actions, torch.stack(log_prob, 1)

    def log_prob(self, velocity: Velocity, x: Tensor) -> Tensor:
        """Log-density [B,F] f64 of the steps of chains [B,F+1,T,D]; differentiable in the expert's weights."""
        factors = []
        for k in range(self.factors):
            mean, std = self._step(velocity, x[:, k], k)
            factors.append(self._log_density(x[:, k + 1], mean, std))
        return torch.stack(factors, 1)

    @property
    def entropy(self) -> float:
        """Differential entropy of a coordinate of a step, nat, averaged over the steps that are drawn; a constant."""
        stds = [self.level * math.sqrt((1.0 - k / self.steps) / self.steps) for k in range(self.factors)]
        return sum(0.5 * math.log(2.0 * math.pi * math.e * std * std) for std in stds) / self.factors

    def _step(self, velocity: Velocity, x: Tensor, k: int) -> tuple[Tensor, float]:
        """Mean [B,T,D] f64 and standard deviation of step k."""
        t, dt = k / self.steps, 1.0 / self.steps
        v = velocity(x, torch.full((len(x),), t, device=x.device)).double()
        back = self._within(x.double() - t * v)
        mean = x.double() + dt * (v - 0.5 * self.level**2 * back)
        return mean, self.level * math.sqrt((1.0 - t) * dt)

    def _log_density(self, x: Tensor, mean: Tensor, std: float) -> Tensor:
        """[B] log-density of x [B,T,D] f32 under independent Gaussians, of the modes or way-points that count."""
        z = (x.double() - mean) / std
        z = z[:, : self.counted] if self.modes is None else self._cosines(z).mT @ z
        return (-0.5 * z * z - math.log(std) - 0.5 * math.log(2.0 * math.pi)).sum((-2, -1))

    def _within(self, x: Tensor) -> Tensor:
        """The part of x [B,T,D] that noise moves."""
        if self.modes is None:
            return x
        cosines = self._cosines(x)
        return cosines @ (cosines.mT @ x)

    def _cosines(self, like: Tensor) -> Tensor:
        """[T,M] orthonormal, 0 behind the counted way-points."""
        assert self.modes is not None
        waypoints = like.shape[1]
        count = min(self.counted or waypoints, waypoints)
        place = (torch.arange(count, device=like.device, dtype=torch.float64) + 0.5) * (math.pi / count)
        waves = torch.cos(place[:, None] * torch.arange(min(self.modes, count), device=like.device))
        return nn.functional.pad(waves / waves.norm(dim=0), (0, 0, 0, waypoints - count))


def training_times(uniform: Tensor) -> Tensor:
    """T [B] from uniform numbers [B] in [0, 1): 0.999 · (1 - Beta(1.5, 1)), by the inverse of its distribution."""
    return TIME_SCALE * (1.0 - uniform ** (1.0 / TIME_ALPHA))


def flow_loss(velocity: Velocity, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """[B] mean squared error of the predicted velocity, at x_t = t x + (1 - t) noise.

    Args:
        velocity: the expert.
        actions: targets [B,T,D], normalised.
        noise: [B,T,D] standard normal.
        time: [B] in [0, 1).

    """
    t = time[:, None, None]
    error = velocity(t * actions + (1.0 - t) * noise, time).float() - (actions - noise)
    return (error * error).mean((-2, -1))
