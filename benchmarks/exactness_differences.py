"""Compare the tensors of two trainings by their relative errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.exactness_cases.case import SINGLE_PRECISION
from benchmarks.exactness_plain import Results

# What is zero apart from rounding is a sum over the rows of a batch, of which there are at most 16; each may round.
ROUNDING = 16 * float(np.finfo(np.float64).eps)


def differences(
    found: Results, wanted: Results, tolerance: float, rounding: float = ROUNDING
) -> Iterator[tuple[str, float]]:
    """Yield the names and errors of tensors that differ, first the loss and the gradients of the first step.

    The error of a tensor is its largest difference by its largest value. A difference below ``rounding`` times the
    largest gradient (weight, slot of its kind) counts by that gradient's value: what is zero apart from rounding is
    equal.
    """
    yield from differing({"loss of step 0": found.losses[0]}, {"loss of step 0": wanted.losses[0]}, tolerance)
    if found.gradients is not None and wanted.gradients is not None:
        yield from differing(found.gradients, wanted.gradients, tolerance, "gradient of {}", ("",), rounding)
    for i, (got, want) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        yield from differing({f"loss of step {i}": got}, {f"loss of step {i}": want}, tolerance)
    for i, (got, want) in enumerate(zip(found.aux, wanted.aux, strict=True)):
        if got is not None or (want is not None and i):
            yield from differing(flatten(got), flatten(want), tolerance, f"aux {{}} of step {i}")
    yield from differing(found.variables, wanted.variables, tolerance, "variable {}", ("",), rounding)
    kinds = sorted(map(kind_of, wanted.slots))
    yield from differing(found.slots, wanted.slots, tolerance, "slot {}", kinds, rounding)


def flatten(aux: Any) -> dict[str, Any]:
    """Return the tensors of a nested structure by their place in it."""
    flat = tf.nest.flatten(aux) if not isinstance(aux, dict) else aux
    if isinstance(flat, dict):
        return {
            f"{key}/{name}".rstrip("/"): leaf for key, value in flat.items() for name, leaf in flatten(value).items()
        }
    return {"" if len(flat) == 1 else str(i): leaf for i, leaf in enumerate(flat)}


def kind_of(slot: str) -> str:
    """Return the last word of a slot's name, such as ``momentum``."""
    return slot.rpartition("_")[2]


def differing(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    tolerance: float,
    label: str = "{}",
    kinds: Sequence[str] = (),
    rounding: float = ROUNDING,
) -> Iterator[tuple[str, float]]:
    """Yield labels and errors of tensors that differ.

    ``kinds``: endings of names whose tensors are on one scale; none: each on its own. A difference below ``rounding``
    times the largest of a scale counts by that largest value.
    """
    largest = {kind: _largest(value for name, value in wanted.items() if name.endswith(kind)) for kind in kinds}
    for name, value in wanted.items():
        if name not in found:
            yield label.format(name), float("inf")
            continue
        scale = next((largest[kind] for kind in kinds if name.endswith(kind)), 0.0)
        error = _error(np.asarray(found[name]), np.asarray(value), scale * rounding, scale)
        allowed = max(tolerance, SINGLE_PRECISION if np.asarray(value).dtype == np.float32 else 0.0)
        if not error <= allowed:
            yield label.format(name), error


def _largest(values: Iterable[Any]) -> float:
    return max(
        (float(np.max(np.abs(v), initial=0.0)) for v in map(np.asarray, values) if v.dtype.kind == "f"), default=0.0
    )


def _error(found: Any, wanted: Any, negligible: float, largest: float) -> float:
    """Return the relative error; infinite for other shapes or dtypes, NaN or integers that differ."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if wanted.dtype.kind != "f":
        return 0.0 if np.array_equal(found, wanted) else float("inf")
    difference = float(np.max(np.abs(found - wanted), initial=0.0))
    scale = float(np.max(np.abs(wanted), initial=0.0))
    if difference <= negligible:
        scale = max(scale, largest)
    return difference / scale if scale else difference
