"""What reward terms share: checked measure names, edges of counts, and the part of `RewardTerm` most leave empty.

A term is stateless: a tick's batch holds this tick's measures and the last one's. An undefined sample pays 0 and is
never read as a value; that a measure was delivered at all is checked by whoever runs the terms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_plugins import nearest
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.kernels import kernel
from alpagym_runtime.types import Decision, Episode, Measures, SimulatorSpec, TickBatch

Float = NDArray[np.float64]


class Term:
    """A term that pays ticks only: nothing at the end, and it never stops a drive. See `types.RewardTerm`."""

    needs: frozenset[str] = frozenset()

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], for the tick that just ended."""
        raise NotImplementedError

    def end(self, episode: Episode) -> float:
        """Nothing is left to pay."""
        return 0.0

    def stop(self, batch: TickBatch) -> NDArray[np.bool_] | None:
        """No drive is stopped."""
        return None


def require(simulator_spec: SimulatorSpec, term: str, *measures: str, key: str = "") -> frozenset[str]:
    """The measures as the set that a term needs.

    Args:
        simulator_spec: what the simulator delivers.
        term: the term's name, for the message.
        measures: names that must be among them.
        key: the config field that named the measure, if one did.

    Raises:
        ConfigError: names the term, the measure, the nearest known one and all of them.

    """
    known = sorted(simulator_spec.measures)
    for measure in measures:
        if measure not in simulator_spec.measures:
            near = nearest(measure, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"term {term!r} needs the measure {measure!r}, which this simulator does not have{hint}; "
                f"known: {', '.join(known) or 'none'}",
                key=key,
            )
    return frozenset(measures)


def sample(batch: TickBatch, measures: Measures, name: str) -> tuple[Float, NDArray[np.bool_]]:
    """A measure's values [n], 0 where undefined, and validity [n]; one that is absent is undefined everywhere."""
    if name not in measures.values:
        return np.zeros(len(batch)), np.zeros(len(batch), bool)
    valid = measures.valid[name] & batch.driven
    return np.where(valid, measures.values[name], 0.0), valid


def shaped(batch: TickBatch, name: str, absolute: bool = False, dead_band: float = 0.0, span: float = 0.0) -> Float:
    """[n], a measure as `MeasureConfig` shapes it; 0 where undefined."""
    return _pay(batch, name, VALUE, absolute, dead_band, span)


def gain(batch: TickBatch, name: str, absolute: bool = False, dead_band: float = 0.0, span: float = 0.0) -> Float:
    """[n], what the shaped measure gained over the last tick; 0 where this or the last sample is undefined."""
    return _pay(batch, name, GAIN, absolute, dead_band, span)


def edge(batch: TickBatch, name: str) -> Float:
    """[n], how many more events a count holds than a tick ago; 0 where this or the last sample is undefined."""
    return _pay(batch, name, EDGE, False, 0.0, 0.0)


VALUE, GAIN, EDGE = range(3)


def _pay(batch: TickBatch, name: str, mode: int, absolute: bool, dead_band: float, span: float) -> Float:
    now, before = batch.measures, batch.measures_previous
    if name not in now.values or (mode != VALUE and name not in before.values):
        return np.zeros(len(batch))
    if mode == VALUE:
        before = now
    columns = now.values[name], now.valid[name], before.values[name], before.valid[name]
    return _pay_rows(*columns, batch.driven, mode, absolute, dead_band, span)


@kernel
def _pay_rows(now, now_valid, before, before_valid, driven, mode, absolute, dead_band, span):
    # Compiled: a term is ten operations on one number a slot, which numpy takes longer to start than to do.
    out = np.zeros(len(now))
    for i in range(len(now)):
        if driven[i] and now_valid[i] and before_valid[i]:
            out[i] = _shape(now[i], absolute, dead_band, span)
            if mode != VALUE:
                out[i] -= _shape(before[i], absolute, dead_band, span)
            if mode == EDGE and out[i] < 0.0:
                out[i] = 0.0
    return out


@kernel
def _shape(value, absolute, dead_band, span):
    if absolute:
        value = abs(value)
    if dead_band > 0.0:
        value = max(value - dead_band, 0.0)
    if span > 0.0:
        value = min(max(value / span, 0.0), 1.0)
    return value
