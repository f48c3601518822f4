"""Find the inner lengths that a trace leaves unknown, as TensorFlow leaves them for a tf.function.

TensorFlow does so where an ``input_signature`` says None and, with ``reduce_retracing=True``, from the second length
on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.affine_sizes import Analyse, evaluate_sizes
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.dependence.result import BatchDependence


def open_signature(
    function: Any, specs: Sequence[tf.TensorSpec], earlier: Sequence[Sequence[tf.TensorSpec]] = ()
) -> tuple[tf.TensorSpec, ...]:
    """Return the specs of a batch's tensors, with None for each inner length that the trace leaves unknown.

    ``earlier``: the specs for which the function was traced before, of the same types and ranks: with
    ``reduce_retracing=True`` a length that differs from an earlier one is unknown. An ``input_signature`` that gives no
    rank, or does not fit, is ignored; tracing reports a misfit.
    """
    return _relax(function, _declared(function, specs), earlier)


def with_unknown(specs: Sequence[tf.TensorSpec], unknown: Collection[tuple[int, int]]) -> tuple[tf.TensorSpec, ...]:
    """Return the specs with None for the ``unknown`` lengths: number of the tensor, and axis."""
    found = []
    for i, spec in enumerate(specs):
        dims = [None if (i, axis) in unknown else dim for axis, dim in enumerate(spec.shape)]
        found.append(tf.TensorSpec(dims, spec.dtype))
    return tuple(found)


def has_open_lengths(signature: Sequence[tf.TensorSpec]) -> bool:
    """Return whether some inner length is unknown."""
    return any(None in spec.shape[1:].as_list() for spec in signature)


def _declared(function: Any, specs: Sequence[tf.TensorSpec]) -> tuple[tf.TensorSpec, ...]:
    declared = tf.nest.flatten(internals.input_signature(function)) if internals.is_tf_function(function) else []
    if len(declared) != len(specs):
        return tuple(specs)
    return tuple(_open(spec, given) for spec, given in zip(specs, declared, strict=True))


def _open(spec: tf.TensorSpec, declared: Any) -> tf.TensorSpec:
    if not isinstance(declared, tf.TensorSpec) or not declared.shape.is_compatible_with(spec.shape):
        return spec
    if declared.shape.rank is None:
        return spec
    return tf.TensorSpec(declared.shape, spec.dtype)


def _relax(
    function: Any, specs: tuple[tf.TensorSpec, ...], earlier: Sequence[Sequence[tf.TensorSpec]]
) -> tuple[tf.TensorSpec, ...]:
    """Return ``specs`` with None for each inner length that differs in ``earlier`` batches.

    They stay as they are where XLA compiles the function: it compiles for each length anyway.
    """
    if not internals.reduces_retracing(function) or internals.is_compiled_by_xla(function):
        return specs
    relaxed = list(specs)
    for other in earlier:
        for i, (spec, before) in enumerate(zip(relaxed, other, strict=True)):
            lengths = zip(spec.shape, before.shape, strict=True)
            relaxed[i] = tf.TensorSpec([now if now == then else None for now, then in lengths], spec.dtype)
    return tuple(relaxed)


# --- Decide for which inner lengths a trace with unknown inner lengths may be used again
# The analysis of a loss is made at the lengths of one batch, and the loss is rewritten as it decides. Before the
# rewritten loss runs a batch of other lengths, the analysis is made at these too: where it decides the same, the result
# is that of one device. The sizes of the whole batch that the loss computes with may differ from length to length (see
# ``affine_sizes``).


@dataclass(frozen=True)
class Analysed:
    """A captured loss and the result of its analysis, in which sizes are functions of the unknown lengths."""

    captured: Captured
    dependence: BatchDependence


@dataclass(frozen=True, eq=False)
class ServedLengths:
    """The inner lengths for which a trace may be used.

    ``analysed``: the captured loss, and the weighted loss where its terms had to be weighted (see ``weigh_terms``).
    ``known``: answers that were given, by the specs of a batch.
    """

    analysed: tuple[Analysed, ...]
    analyse: Analyse
    known: dict[tuple[tf.TensorSpec, ...], bool] = field(default_factory=dict)

    def serves(self, specs: tuple[tf.TensorSpec, ...]) -> bool:
        """Return whether the loss may run batches of these specs, which the trace accepts (axis 0 unknown)."""
        if specs not in self.known:
            self.known[specs] = all(self._decides_the_same(one, specs) for one in self.analysed)
        return self.known[specs]

    def _decides_the_same(self, one: Analysed, specs: tuple[tf.TensorSpec, ...]) -> bool:
        captured = dataclasses.replace(one.captured, example=specs)
        return _same_decisions(evaluate_sizes(one.dependence, captured), self.analyse(captured))


def _same_decisions(expected: BatchDependence, found: BatchDependence) -> bool:
    """Return whether all decisions are equal, and all kinds but for their lengths (``outer``, ``inner``, ``slope``)."""
    kinds = {value: _without_lengths(kind) for value, kind in expected.kinds.items()}
    names = [item.name for item in dataclasses.fields(BatchDependence) if item.name != "kinds"]
    return kinds == {value: _without_lengths(kind) for value, kind in found.kinds.items()} and all(
        _same(getattr(expected, name), getattr(found, name)) for name in names
    )


def _without_lengths(kind: Kind) -> Kind:
    element = None if kind.element is None else _without_lengths(kind.element)
    return dataclasses.replace(kind, outer=0, inner=0, slope=(), element=element)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        names = [item.name for item in dataclasses.fields(one)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
