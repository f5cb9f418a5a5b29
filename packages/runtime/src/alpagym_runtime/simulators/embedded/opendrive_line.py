"""Reference lines of OpenDRIVE roads: poses at stations along lines, arcs, clothoids and cubic curves.

Source: ASAM OpenDRIVE 1.7, sections 9.3 to 9.7.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.opendrive_xml import Piece, Polynomial

Float = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(5)
KNOTS_MAX = 100_000


def polynomial(rows: tuple[Polynomial, ...], ds: Float) -> Float:
    """Piecewise cubics at ds [K] m; zero before the first begins."""
    if not rows:
        return np.zeros_like(ds)
    table = np.array(rows)
    index = np.searchsorted(table[:, 0], ds + 1e-9, side="right") - 1
    start, a, b, c, d = table[np.maximum(index, 0)].T
    u = ds - start
    value: Float = a + u * (b + u * (c + u * d))
    return np.where(index >= 0, value, 0.0)


def _arc(s: Float, curvature: float) -> Float:
    """[K,3] u, v, heading; `sinc` keeps it exact where the curvature goes to zero."""
    half = curvature * s / 2.0
    chord = s * np.sinc(half / math.pi)
    return np.stack([chord * np.cos(half), chord * np.sin(half), 2.0 * half], axis=-1)


def _spiral(s: Float, first: float, last: float, length: float) -> Float:
    """A clothoid, integrated by Gauss-Legendre of order 5 between knots at most 0.1 rad and 2 m apart."""
    turn = max(abs(first), abs(last)) * length
    knots = min(max(math.ceil(length / 2.0), math.ceil(turn / 0.1), 1), KNOTS_MAX)
    step = length / knots
    rate = (last - first) / length

    def along(start: NDArray[np.floating[Any]], size: Float | float) -> Float:
        at = start[:, None] + np.reshape(size, (-1, 1)) * (_NODES + 1.0) / 2.0
        heading = at * (first + rate * at / 2.0)
        weights = _WEIGHTS / 2.0 * np.reshape(size, (-1, 1))
        return np.stack([(weights * np.cos(heading)).sum(axis=1), (weights * np.sin(heading)).sum(axis=1)], axis=-1)

    starts = np.arange(knots) * step
    sums = np.concatenate([np.zeros((1, 2)), np.cumsum(along(starts, step), axis=0)])
    index = np.clip(np.floor(s / step), 0, knots - 1).astype(np.int64)
    place = sums[index] + along(starts[index], s - starts[index])
    return np.column_stack([place, s * (first + rate * s / 2.0)])


def _poly3(s: Float, numbers: tuple[float, ...], length: float) -> Float:
    """Curve v = a + b·u + c·u² + d·u³; s is measured along the curve, so u is found by its tabulated length."""
    a, b, c, d = numbers
    u = np.linspace(0.0, length, min(max(math.ceil(length / 0.1), 10), KNOTS_MAX) + 1)
    slope = b + u * (2.0 * c + u * 3.0 * d)
    speed = np.sqrt(1.0 + slope * slope)
    arc = np.concatenate([[0.0], np.cumsum((speed[1:] + speed[:-1]) / 2.0 * np.diff(u))])
    at = np.interp(s, arc, u)
    heading = np.arctan(b + at * (2.0 * c + at * 3.0 * d))
    return np.stack([at, a + at * (b + at * (c + at * d)), heading], axis=-1)


def _param_poly3(s: Float, numbers: tuple[float, ...], length: float, normalized: bool) -> Float:
    p = s / length if normalized else s
    au, bu, cu, du, av, bv, cv, dv = numbers
    u = au + p * (bu + p * (cu + p * du))
    v = av + p * (bv + p * (cv + p * dv))
    along_u, along_v = bu + p * (2.0 * cu + p * 3.0 * du), bv + p * (2.0 * cv + p * 3.0 * dv)
    return np.stack([u, v, np.arctan2(along_v, along_u)], axis=-1)


def poses(pieces: tuple[Piece, ...], s: Float) -> Float:
    """[K,3] x, y m and heading rad of a reference line at stations s [K] m, each in the piece that holds it.

    At a station where two pieces meet it is the second one's start.
    """
    starts = np.array([piece.s for piece in pieces])
    index = np.clip(np.searchsorted(starts, s + 1e-9, side="right") - 1, 0, len(pieces) - 1)
    out = np.zeros((len(s), 3))
    for k in np.unique(index):
        piece, here = pieces[k], index == k
        ds = np.clip(s[here] - piece.s, 0.0, piece.length)
        if piece.kind == "line":
            local = np.stack([ds, np.zeros_like(ds), np.zeros_like(ds)], axis=-1)
        elif piece.kind == "arc":
            local = _arc(ds, piece.numbers[0])
        elif piece.kind == "spiral":
            local = _spiral(ds, piece.numbers[0], piece.numbers[1], piece.length)
        elif piece.kind == "poly3":
            local = _poly3(ds, piece.numbers, piece.length)
        else:
            local = _param_poly3(ds, piece.numbers, piece.length, piece.normalized)
        cos, sin = math.cos(piece.yaw), math.sin(piece.yaw)
        out[here, 0] = piece.x + cos * local[:, 0] - sin * local[:, 1]
        out[here, 1] = piece.y + sin * local[:, 0] + cos * local[:, 1]
        out[here, 2] = piece.yaw + local[:, 2]
    return out
