"""Inner lengths that one trace leaves unknown, as TensorFlow leaves them for a tf.function: one build serves all.

TensorFlow does so where an ``input_signature`` says None and, with ``reduce_retracing=True``, from the second length
on. The analysis of a loss is made at the lengths of the first batch. One build serves all lengths only if the analysis
decides the same at longer and at shorter ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.dependence.result import BatchDependence

_STEPS = (1, -1)  # to other lengths, longer and shorter, at which the analysis must find the same


def open_signature(function: Any, specs: Sequence[tf.TensorSpec]) -> tuple[tf.TensorSpec, ...]:
    """Return the specs of a batch's tensors, with None for each length that is None in its ``input_signature``.

    A spec stays as it is where the signature is missing, gives no rank, or does not fit; tracing reports a misfit.
    """
    declared = tf.nest.flatten(internals.input_signature(function)) if internals.is_tf_function(function) else []
    if len(declared) != len(specs):
        return tuple(specs)
    return tuple(_open(spec, given) for spec, given in zip(specs, declared, strict=True))


def relax_signature(
    function: Any, specs: Sequence[tf.TensorSpec], earlier: Sequence[Sequence[tf.TensorSpec]]
) -> tuple[tf.TensorSpec, ...]:
    """Return ``specs`` with None for each inner length that differs in ``earlier`` batches of the same types and ranks.

    They stay as they are for what is no tf.function with ``reduce_retracing=True``, and where XLA compiles it, which
    compiles for each length anyway.
    """
    if not internals.reduces_retracing(function) or internals.is_compiled_by_xla(function):
        return tuple(specs)
    relaxed = list(specs)
    for other in earlier:
        for i, (spec, before) in enumerate(zip(relaxed, other, strict=True)):
            lengths = zip(spec.shape, before.shape, strict=True)
            relaxed[i] = tf.TensorSpec([now if now == then else None for now, then in lengths], spec.dtype)
    return tuple(relaxed)


def _open(spec: tf.TensorSpec, declared: Any) -> tf.TensorSpec:
    if not isinstance(declared, tf.TensorSpec) or not declared.shape.is_compatible_with(spec.shape):
        return spec
    if declared.shape.rank is None:
        return spec
    return tf.TensorSpec(declared.shape, spec.dtype)


def has_open_lengths(captured: Captured) -> bool:
    """Return whether some inner length is unknown."""
    return any(None in spec.shape[1:].as_list() for spec in captured.signature)


def serves_all_lengths(captured: Captured, found: BatchDependence, find: Callable[[Captured], BatchDependence]) -> bool:
    """Return whether ``found``, which ``find`` returned for ``captured``, is found at other inner lengths too."""
    return all(_equal(find(other), found) for other in _at_other_lengths(captured))


def _at_other_lengths(captured: Captured) -> Iterator[Captured]:
    """Yield ``captured`` with longer and with shorter examples; equal lengths stay equal, and none becomes zero.

    The other lengths are those of no known dimension in the graph, for which a length could be mistaken.
    """
    values = [value for node in captured.graph.nodes for value in node.outputs]
    known = {dim for value in values for dim in value.shape.dims or ()}
    for step in _STEPS:
        example = []
        for spec, open_spec in zip(captured.example, captured.signature, strict=True):
            pairs = zip(spec.shape[1:], open_spec.shape[1:], strict=True)
            lengths = [_other(length, step, known) if opened is None else length for length, opened in pairs]
            example.append(tf.TensorSpec([None, *lengths], spec.dtype))
        yield dataclasses.replace(captured, example=tuple(example))


def _other(length: int, step: int, known: Collection[int | None]) -> int:
    """Return the next length in steps of ``step`` that is not ``known``; the next longer one where none is shorter."""
    found = length + step
    while found in known and found > 0:
        found += step
    return found if found > 0 else _other(_other(length, 1, known), 1, known)


def _equal(one: BatchDependence, other: BatchDependence) -> bool:
    """Return whether both make the same decisions; ``kinds``, from which these follow, are not compared."""
    names = [field.name for field in dataclasses.fields(BatchDependence) if field.name != "kinds"]
    return all(_same(getattr(one, name), getattr(other, name)) for name in names)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        names = [field.name for field in dataclasses.fields(one)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
