"""What policies share: plain decisions, rows of a forward, and the check that every decision goes through."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpagym_runtime.types import Decision, PolicySpec, Ragged, column_names, column_of, decision_from_columns


def plan_decision(plan_rig: ArrayLike) -> Decision:
    """A decision [N,T,3] of a policy without a distribution or weights: no log-probability counts, version 0."""
    plan = np.asarray(plan_rig, np.float32)
    count = len(plan)
    return Decision(plan, np.zeros((count, 1), np.float32), np.zeros((count, 1), bool), np.zeros(count, np.int64))


SMALLEST_BUCKET = 16
"""On an Intel Xeon with AVX-512 (torch 2.11, MKL) forwards of 8 rows and fewer had other last bits than those of 16 to
256, which agreed; on an AMD EPYC forwards of 4 to 256 agreed."""


def bucket(count: int) -> int:
    """Rows that a forward of `count` is padded to: 16, 32, 64, …; a row's bits then do not depend on its company."""
    return max(SMALLEST_BUCKET, 1 << max(count - 1, 0).bit_length())


def padded(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows followed by zeros up to their bucket; the rows themselves if they fill it."""
    size = bucket(len(rows))
    if size == len(rows):
        return rows
    out = np.zeros((size, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out


def validate_decision(decision: Decision, spec: PolicySpec, count: int) -> Decision:
    """The decision with unusable rows marked: finite numbers are a matter of a row, shapes of the whole.

    Args:
        decision: what a policy answered for `count` rows.
        spec: the policy's own.
        count: N, the rows that were asked for.

    Returns:
        `decision` itself where every row is fine; else a copy whose `error` [N] says what is wrong with each bad row,
        and whose bad rows hold zeros where the numbers were, so that they reach no simulator.

    Raises:
        ValueError: a shape, a kind of number or a name differs from the spec, so no row can be trusted.

    """
    _check_shapes(decision, spec, count)
    errors = np.full(count, None, object) if decision.error is None else decision.error.copy()
    columns = {name: column_of(decision, name) for name in column_names(decision)}
    used = [name for name in columns if name in ("plan_rig", "log_prob", "control") or name.startswith("carry.")]
    for name in used:
        wrong = ~np.isfinite(columns[name])
        if name == "log_prob":
            wrong &= decision.log_prob_mask
        for row in np.flatnonzero(wrong.reshape(count, math.prod(wrong.shape[1:])).any(axis=1)):
            if errors[row] is None:
                place = tuple(int(i) for i in np.argwhere(wrong[row])[0])
                errors[row] = f"{name} at {list(place)} is {columns[name][row][place]}: every number must be finite"
    bad = np.array([error is not None for error in errors], bool)
    if not bad.any():
        return decision
    for name in used:
        columns[name] = columns[name].copy()
        columns[name][bad] = 0
    return decision_from_columns(columns | {"error": errors})


def _check_shapes(decision: Decision, spec: PolicySpec, count: int) -> None:
    factors = decision.log_prob.shape[1] if decision.log_prob.ndim == 2 else "J"
    expected = [
        ("plan_rig", decision.plan_rig, (count, spec.plan_steps, 3), "f"),
        ("log_prob", decision.log_prob, (count, factors), "f"),
        ("log_prob_mask", decision.log_prob_mask, (count, factors), "b"),
        ("version", decision.version, (count,), "iu"),
    ]
    if decision.control is not None:
        if "control" not in spec.action_kinds:
            raise ValueError(f"control was answered, but the spec's action_kinds are {sorted(spec.action_kinds)}")
        expected.append(("control", decision.control, (count, 2), "f"))
    if decision.error is not None:
        expected.append(("error", decision.error, (count,), "O"))
    if decision.carry.keys() != spec.carry.keys():
        raise ValueError(f"carry must be {sorted(spec.carry)}, got {sorted(decision.carry)}")
    expected += [
        (f"carry {name!r}", array, (count, *spec.carry[name]), "biuf") for name, array in decision.carry.items()
    ]
    for name, array, shape, kinds in expected:
        if array.shape != shape or array.dtype.kind not in kinds:
            wanted = "[" + ", ".join(map(str, shape)) + "]"
            raise ValueError(f"{name} must be {wanted} of kind {kinds!r}, got {list(array.shape)} {array.dtype}")
    for name, trace in decision.trace.items():
        rows = len(trace.offsets) - 1 if isinstance(trace, Ragged) else len(trace)
        if rows != count:
            raise ValueError(f"trace {name!r} must have {count} rows, got {rows}")
