"""Find the inner lengths that a trace leaves unknown, as TensorFlow leaves them for a tf.function.

TensorFlow does so where an ``input_signature`` says None and, with ``reduce_retracing=True``, from the second length
on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import internals


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
