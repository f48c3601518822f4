"""Sparse gradients (TensorFlow's IndexedSlices) of variables whose rows are looked up, such as embeddings.

A *use* is one lookup. TensorFlow concatenates the slices of all uses of a variable. Here they are separated again: the
slices of all micro-batches are then concatenated use by use, which is the order that they have on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.write_graph import needed_library
from dapple_tf.graph_passes.analysis.layers import TAKES_ROWS
from dapple_tf.graph_passes.ir.graph import OTHER, DType, FunctionRef, Graph, Shape, TensorType, Value, ancestors
from dapple_tf.graph_passes.passes.backward import SparseUse
from dapple_tf.graph_passes.passes.gather_slices import Combine

_UNIQUE = frozenset({"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
_SAME_INDICES = frozenset({"Reshape", "Cast", "Identity"})


@dataclass(frozen=True)
class TensorUse:
    """The slices of one use of a variable in ``stage``, and their indices, as tensors of the trace.

    ``lookup``: the name of the op that looks the rows up; where it cannot be read from TensorFlow's names, that of the
    tensor of indices. Several stages may run the same lookup, if it does not depend on the batch.
    """

    stage: int
    slices: Any
    indices: Any
    lookup: str


def find_uses(
    gradients: Sequence[Sequence[tuple[str, Any]]],
    forward: Container[str],
    whole_gradient: Callable[[str], Any] | None,
) -> dict[str, tuple[tuple[TensorUse, ...], ...]]:
    """Return the uses of each variable whose gradients are all sparse, in the order of one device's tape.

    A use is given by one stage, or by several that run the same lookup. ``gradients``: for each stage, its variables
    and their gradients. A variable with a dense gradient in any stage is left out: TensorFlow adds both as dense
    tensors. ``forward``: names of the ops of forward. ``whole_gradient``: returns the gradient of the whole loss for a
    variable that several stages use, from which the order is read; without it, uses in later stages come first.
    """
    of_variable: dict[str, list[tuple[int, Any]]] = {}
    for stage, own in enumerate(gradients):
        for name, gradient in own:
            of_variable.setdefault(name, []).append((stage, gradient))
    found = {}
    for name, parts in of_variable.items():
        if not all(isinstance(gradient, tf.IndexedSlices) for _, gradient in parts):
            continue
        by_lookup: dict[str, list[TensorUse]] = {}
        for use in (use for stage, gradient in reversed(parts) for use in _split(stage, gradient, forward)):
            key = use.lookup
            while use.stage in {known.stage for known in by_lookup.get(key, ())}:
                key += "'"  # another lookup of the same indices
            by_lookup.setdefault(key, []).append(use)
        order: list[str] = []
        if whole_gradient is not None and len(parts) > 1:
            whole = whole_gradient(name)
            order = [use.lookup for use in _split(0, whole, forward)] if isinstance(whole, tf.IndexedSlices) else []
        keys = dict.fromkeys([*(key for key in order if key in by_lookup), *by_lookup])
        found[name] = tuple(tuple(by_lookup[key]) for key in keys)
    return found


def _split(stage: int, gradient: Any, forward: Container[str]) -> list[TensorUse]:
    """Return the parts of IndexedSlices that TensorFlow concatenated: one for each use of the variable."""
    slices, indices = gradient.values.op, gradient.indices.op
    if slices.type == indices.type == "ConcatV2" and len(slices.inputs) == len(indices.inputs):
        pairs = list(zip(slices.inputs, indices.inputs, strict=True))[:-1]  # the last input is the axis
        return [use for values, rows in pairs for use in _split(stage, tf.IndexedSlices(values, rows), forward)]
    return [TensorUse(stage, gradient.values, gradient.indices, _find_lookup(gradient.indices, forward))]


def _find_lookup(indices: Any, forward: Container[str]) -> str:
    """Return the name of the lookup whose gradient has these indices; if it is not found, that of their tensor.

    TensorFlow names the ops of a gradient after the lookup: ``stage0_gradients/gradients/LOOKUP_grad/Reshape``, or
    ``whole_gradient/LOOKUP_grad/Reshape``.
    """
    while indices.op.type in _SAME_INDICES and not indices.op.name.rpartition("/")[0].endswith("_grad"):
        indices = indices.op.inputs[0]
    parts = indices.op.name.split("/")
    for first in (1, 2):
        for last in range(len(parts) - 1, first, -1):
            name = "/".join(parts[first:last])
            if name.endswith("_grad") and name.removesuffix("_grad") in forward:
                return name.removesuffix("_grad")
    return str(indices.name)


def read_uses(
    joint: Graph,
    uses: Mapping[str, Sequence[Sequence[TensorUse]]],
    stage: int,
    variables: Mapping[str, tf.Variable],
    value_of: Callable[[Any], Value],
    once: Collection[str] = (),
) -> tuple[SparseUse, ...]:
    """Return the uses in one ``stage`` as values of the ``joint`` graph; ``value_of`` gives the value of a tensor.

    ``once``: the nodes that run once a step, on the whole batch: what only they compute is equal in all micro-batches.
    Raises CaptureError where it is not known how to join the slices of the micro-batches.
    """
    found: list[SparseUse] = []
    for name, own in uses.items():
        rows, *row = variables[name].shape.as_list()
        for position, use in ((i, use) for i, same in enumerate(own) for use in same if use.stage == stage):
            indices = value_of(use.indices)
            length = use.indices.shape[0] if use.indices.shape.rank else None
            count = OTHER if length is None else length
            kinds = (
                TensorType(DType(use.slices.dtype.name), Shape((count, *row))),
                TensorType(DType(use.indices.dtype.name), Shape((count,))),
            )
            combine: Combine = "sum" if length is not None else _combine(joint, indices, name, once)
            slices = value_of(use.slices)
            found.append(SparseUse(name, rows, slices, indices, kinds, combine, position, use.lookup))
    return tuple(found)


def _combine(joint: Graph, indices: Value, variable: str, once: Collection[str]) -> Combine:
    """Return how to join the slices of micro-batches if the number of indices is only known when the step runs."""
    before = [joint.node(name) for name in ancestors(joint, [indices.node], stop=once)]
    if not any(node.op == "arg" or node.has(TAKES_ROWS) for node in before):
        return "sum"
    if any(node.op in _UNIQUE for node in before):
        return "merge"
    calls = tuple(node for node in before if any(isinstance(value, FunctionRef) for _, value in node.attrs))
    bodies = needed_library(Graph("calls", calls), dict(joint.library)) if calls else ()
    for _, body in bodies:
        if any(node.op in _UNIQUE for node in function_pb2.FunctionDef.FromString(body).node_def):
            raise CaptureError(
                f"the ids that look up rows of {variable!r} are computed in a nested function that calls tf.unique, so "
                "it cannot be told whether an id can occur twice: call tf.unique outside of a tf.function that the "
                'loss calls, or give sparse_gradients="dense"'
            )
    return "concat"
