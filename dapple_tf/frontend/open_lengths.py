"""Inner lengths that one trace leaves unknown, as a tf.function with an ``input_signature`` does: one build serves all.

The analysis of a loss is made at the lengths of the first batch. One build serves all lengths only if the analysis
decides the same at longer and at shorter ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.dependence.result import BatchDependence
from dapple_tf.frontend.shapes import PROBE, infer_shapes

# Other lengths than n at which the analysis must find the same. The far ones, which show what depends on a threshold,
# count only where the model accepts them.
_NEAR: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: n - 1 if n > 1 else n + 2)
_FAR: tuple[Callable[[int], int], ...] = (lambda n: 10 * n + 1, lambda n: 1)


def open_signature(function: Any, specs: Sequence[tf.TensorSpec]) -> tuple[tf.TensorSpec, ...]:
    """Return the specs of a batch's tensors, with None for each length that is None in its ``input_signature``.

    A spec stays as it is where the signature is missing, gives no rank, or does not fit; tracing reports a misfit.
    """
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


def has_open_lengths(captured: Captured) -> bool:
    """Return whether some inner length is unknown."""
    return any(None in spec.shape[1:].as_list() for spec in captured.signature)


def serves_all_lengths(captured: Captured, found: BatchDependence, find: Callable[[Captured], BatchDependence]) -> bool:
    """Return whether ``found``, which ``find`` returned for ``captured``, is found at other inner lengths too.

    These are samples: a loss with a threshold that none of them passes is not recognized.
    """
    near = [_at_length(captured, other) for other in _NEAR]
    far = [_at_length(captured, other) for other in _FAR]
    far = [other for other in far if infer_shapes(other, PROBE)]
    return all(_equal(find(other), found) for other in (*near, *far))


def _at_length(captured: Captured, other: Callable[[int], int]) -> Captured:
    """Return ``captured`` with another example; equal lengths stay equal."""
    example = []
    for spec, opened in zip(captured.example, captured.signature, strict=True):
        pairs = zip(spec.shape[1:], opened.shape[1:], strict=True)
        lengths = [other(length) if unknown is None else length for length, unknown in pairs]
        example.append(tf.TensorSpec([None, *lengths], spec.dtype))
    return dataclasses.replace(captured, example=tuple(example))


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
