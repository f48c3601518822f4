"""Compare what two training steps computed, tensor by tensor.

The error of a tensor is the largest absolute difference, divided by the largest absolute value of the tensor on one
device. A difference below the rounding error of the model's largest gradient is divided by that gradient instead: some
gradients (of a bias before a normalization) are zero apart from rounding. An entry that is NaN or infinite on one
device must be NaN or infinite in the pipeline too (which of them depends on the order of sums), and does not count for
the error.

Optimizers such as Adam divide a gradient by its own size, so where a gradient is nearly zero, its rounding error
becomes a whole update. Where a variable differs, Keras is therefore given the *same* gradients (the pipeline's): a
variable that is equal then does not fail, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.verification.reference import Outcome
from dapple_tf.wording import format_count

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-1, "float16": 1e-2}


@dataclass(frozen=True)
class Difference:
    """The error of one tensor of the pipeline against one device.

    ``kind``: loss, aux, gradient, variable (after the step), or update (the variable after a step with the same
    gradients). ``nonfinite``: how many entries are NaN or infinite on both sides. ``why``: what makes the error
    infinite.
    """

    kind: str
    name: str
    error: float
    tolerance: float
    nonfinite: int = 0
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}, " + (self.why or f"error {self.error:.1e} (allowed {self.tolerance:.0e})")


_WORDS = {"loss": "loss", "aux": "returned values", "gradient": "gradients", "variable": "variables after the step"}
"""The kinds of differences in the order of a report, with their words."""


@dataclass(frozen=True)
class Comparison:
    """All differences of a pipelined step from a step on one device."""

    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether every tensor is within its tolerance; a variable may be so only after a step with equal gradients."""
        return self.first_bad is None

    @property
    def first_bad(self) -> Difference | None:
        """The first tensor that differs, in the order loss, aux, gradients, variables."""
        updates = {d.name: d for d in self.differences if d.kind == "update"}
        for difference in self.differences:
            excused = difference.kind == "variable" and difference.name in updates and updates[difference.name].ok
            if not difference.ok and not excused and difference.kind != "update":
                return difference
        return None

    @property
    def excused(self) -> bool:
        """Whether all tensors are equal, but a variable only after one device's optimizer got the same gradients."""
        return self.ok and not all(d.ok for d in self.differences if d.kind == "variable")

    @property
    def nonfinite(self) -> tuple[Difference, ...]:
        """The tensors in which one device has NaN or infinite entries too."""
        return tuple(d for d in self.differences if d.nonfinite and d.kind != "update")

    def largest(self, kind: str) -> float:
        """Return the largest relative error of this kind of tensor; 0 where there is none."""
        return max((d.error for d in self.differences if d.kind == kind), default=0.0)

    @property
    def errors(self) -> dict[str, float]:
        """The largest relative error of each kind that was compared: loss, returned values, gradients, variables."""
        compared = {difference.kind for difference in self.differences}
        return {kind: self.largest(kind) for kind in _WORDS if kind in compared}

    def __str__(self) -> str:
        return "largest relative errors: " + ", ".join(f"{_WORDS[k]} {error:.1e}" for k, error in self.errors.items())


def compare(
    found: Outcome,
    wanted: Outcome,
    apply: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
    state: frozenset[str],
    coarsest: float = 0.0,
) -> Comparison:
    """Compare the pipeline's outcome with that of one device.

    ``apply``: returns the variables (NumPy) after the optimizer of one device has applied gradients, given by name, to
    the values before the step, or is None where no gradients are known. ``state``: variables that forward writes;
    ``apply`` leaves them alone. ``coarsest``: the tolerance of the least precise type that the model uses.
    """
    gradients, wanted_gradients = _dense_gradients(found), _dense_gradients(wanted)
    largest = max(map(_largest_finite, wanted_gradients.values()), default=0.0)
    has_loss = found.loss is not None or wanted.loss is not None
    differences = [compare_tensor("loss", "loss", found.loss, wanted.loss, coarsest)] if has_loss else []
    if found.aux is not None and wanted.aux is not None:
        pairs = zip(found.aux, wanted.aux, strict=True)
        differences += [compare_tensor("aux", str(i), *pair, coarsest) for i, pair in enumerate(pairs)]
    for name in dict.fromkeys([*wanted_gradients, *gradients]):
        pair = gradients.get(name), wanted_gradients.get(name)
        differences.append(compare_tensor("gradient", name, *pair, coarsest, largest))
    variables = [
        compare_tensor("variable", name, found.variables.get(name), value, coarsest)
        for name, value in wanted.variables.items()
    ]
    if apply is not None and not all(difference.ok for difference in variables):
        updated = apply({name: same_rows(g, wanted.gradients.get(name)) for name, g in found.gradients.items()})
        differences += [
            compare_tensor("update", name, found.variables.get(name), updated[name], coarsest)
            for name in wanted.variables
            if name not in state
        ]
    return Comparison((*differences, *variables))


def same_rows(found: Any, wanted: Any) -> Any:
    """Return the gradient ``found`` as one device's optimizer would take it: IndexedSlices where ``wanted`` is.

    A dense gradient gets the ids of ``wanted``, repeated ones too, and the slices of ``wanted``. The difference between
    the two gradients is added to the first slice of each id.
    """
    if isinstance(found, tf.IndexedSlices) or not isinstance(wanted, tf.IndexedSlices):
        return found if isinstance(found, tf.IndexedSlices) else tf.convert_to_tensor(found)
    ids, first = np.unique(wanted.indices.numpy(), return_index=True)
    values = np.array(wanted.values)
    values[first] += (np.asarray(found) - to_dense(wanted, found.shape[0]))[ids]
    return tf.IndexedSlices(tf.constant(values), wanted.indices, wanted.dense_shape)


def compare_tensor(
    kind: str, name: str, found: Any, wanted: Any, coarsest: float = 0.0, largest: float = 0.0
) -> Difference:
    """Compare a tensor (NumPy; None where there is none); see the top of this file.

    ``coarsest``: the tolerance of the least precise type used. ``largest``: the largest entry of any gradient.
    """
    missing = float("inf")
    if found is None or wanted is None:
        return Difference(kind, name, missing, 0.0, why=f"{'the pipeline' if found is None else 'one device'} has none")
    found, wanted = np.asarray(found), np.asarray(wanted)
    tolerance = max(TOLERANCE.get(wanted.dtype.name, 0.0), coarsest)
    if found.shape != wanted.shape:
        why = f"shape {list(found.shape)} in place of {list(wanted.shape)}"
        return Difference(kind, name, missing, tolerance, why=why)
    if wanted.size == 0:
        return Difference(kind, name, 0.0, tolerance)
    if wanted.dtype.kind not in "fc" and wanted.dtype.name not in TOLERANCE:
        return Difference(kind, name, float(np.any(found != wanted)), tolerance)
    finite, found_finite = np.isfinite(wanted), np.isfinite(found)
    nonfinite = int(np.count_nonzero(~finite))
    if not np.array_equal(finite, found_finite):
        more, fewer = np.count_nonzero(finite & ~found_finite), np.count_nonzero(found_finite & ~finite)
        entries = format_count(int(more), "entry")
        why = f"NaN or infinite in {entries} finite on one device, finite in {fewer} that are not finite there"
        return Difference(kind, name, missing, tolerance, why=why)
    error = float(np.max(np.abs(found[finite] - wanted[finite]), initial=0.0))
    scale = _largest_finite(wanted)
    rounding = 8 * float(np.finfo(wanted.dtype).eps) * largest if wanted.dtype.kind in "fc" else 0.0
    if error <= rounding:
        scale = max(scale, largest)
    return Difference(kind, name, error / scale if scale else error, tolerance, nonfinite)


def _dense_gradients(outcome: Outcome) -> dict[str, Any]:
    """Return the gradients that are not None, as dense arrays."""
    found = {name: gradient for name, gradient in outcome.gradients.items() if gradient is not None}
    for name, gradient in found.items():
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        found[name] = to_dense(gradient, len(outcome.variables[name])) if is_sparse else np.asarray(gradient)
    return found


def to_dense(slices: tf.IndexedSlices, rows: int) -> Any:
    """Return IndexedSlices as a dense array of ``rows`` rows; slices of repeated ids are added up."""
    return tf.math.unsorted_segment_sum(slices.values, slices.indices, rows).numpy()


def _largest_finite(array: Any) -> float:
    """Return the largest absolute value of the finite entries; 0 where there are none."""
    return float(np.max(np.abs(array[np.isfinite(array)]), initial=0.0))
