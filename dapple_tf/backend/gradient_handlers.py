"""Handlers of the ops that accumulate, sum and clip gradients, and sum statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.handler import Context, Handler, Outcome, call, check_finite, read_variable
from dapple_tf.graph_passes.ir.graph import Node, TensorType
from dapple_tf.graph_passes.ir.ops import OpName


def _accumulate(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    first = bool(node.attr("first"))
    dtypes = tuple(value.dtype for value in inputs)
    accumulate = context.shared((node.op, dtypes, first), lambda: _build_accumulator(dtypes, first))
    handles = [variable.handle for variable in context.bindings.accumulators(node)]
    return call(accumulate, [*handles, *inputs], not_inlined=True)


def _build_accumulator(dtypes: Sequence[tf.DType], first: bool) -> Any:
    """Return a function (buffers, gradients) that assigns the first gradients to the buffers, or adds later ones.

    A chain of additions of tensors would not do: Grappler makes one AddN of it, which keeps every micro-batch's
    gradients alive until the end.
    """

    def accumulate(*inputs: Any) -> None:
        handles, values = inputs[: len(dtypes)], inputs[len(dtypes) :]
        for handle, value in zip(handles, values, strict=True):
            write = tf.raw_ops.AssignVariableOp if first else tf.raw_ops.AssignAddVariableOp
            write(resource=handle, value=value)

    specs = [tf.TensorSpec([], tf.resource)] * len(dtypes) + [tf.TensorSpec(None, dtype) for dtype in dtypes]
    return internals.trace_function(accumulate, specs, internals.NO_INLINE)


def _clear_sums(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    sums = context.bindings.accumulators(node)
    dtypes = tuple(variable.dtype for variable in sums)
    clear = context.shared((node.op, dtypes), lambda: _build_clearing(dtypes))
    return call(clear, [variable.handle for variable in sums], not_inlined=True)


def _build_clearing(dtypes: Sequence[tf.DType]) -> Any:
    """Return a function that sets variables of these dtypes to zero, one after the other.

    The zeros take the place of the old values; so there is only one variable's memory beside the variables. They must
    have no shape that is known before the function runs: Grappler would make constants of them, which stay in memory.
    """

    def clear(*handles: Any) -> None:
        written: list[Any] = []
        for handle, dtype in zip(handles, dtypes, strict=True):
            with tf.control_dependencies(written):
                zeros = tf.zeros_like(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
                written = [tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)]

    return internals.trace_function(clear, [tf.TensorSpec([], tf.resource)] * len(dtypes), internals.NO_INLINE)


def _gradients(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    if inputs:
        return [tf.identity(tensor) for tensor in inputs], []  # done when these are computed, before backward's end
    return [read_variable(variable) for variable in context.bindings.accumulators(node)], []


def _allreduce(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    if node.has("ranks"):
        *sums, token = context.communication.all_reduce(node, inputs)
        return [*_average(node, sums), token], []
    sums, ends = _sum(context, node, inputs)
    return _average(node, sums), ends


def _average(node: Node, sums: list[Any]) -> list[Any]:
    return [value / node.integer("replicas") for value in sums] if node.has("average") else sums


def _sum(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    """Add the lists of tensors in ``inputs``, element by element: each list has a tensor for each output."""
    count = len(node.outputs)
    return [tf.add_n(inputs[i::count]) for i in range(count)], []


def _round(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    pairs = zip(inputs, node.strings("dtypes"), strict=True)
    return [tf.cast(tf.cast(tensor, dtype), tensor.dtype) for tensor, dtype in pairs], []


def _reduced_gradients(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    if not node.has("check"):
        return [tf.identity(tensor) for tensor in inputs], []
    where = f"on stage {node.integer('stage')} the gradient of variable"
    names = node.strings("variables")
    return [check_finite(tensor, f"{where} {name!r}") for tensor, name in zip(inputs, names, strict=True)], []


def _gather_slices(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    place, slices, indices = 0, [], []
    index_type = node.outputs[1].dtype.name
    for use, count in zip(node.strings("uses"), node.integers("pieces"), strict=True):
        pieces = inputs[place : place + 2 * count]
        place += 2 * count
        combined = _COMBINE[use](pieces[::2], [tf.cast(piece, index_type) for piece in pieces[1::2]])
        slices.append(combined[0])
        indices.append(combined[1])
    complete = _concatenate(slices, indices)
    if node.has("averaged"):
        complete = complete[0] / node.integer("averaged"), complete[1]
    if node.has("check"):
        where = f"on stage {node.integer('stage')} the gradient of variable {node.string('variable')!r}"
        return [check_finite(complete[0], where), complete[1]], []
    return list(complete), []


def _concatenate(slices: Sequence[Any], indices: Sequence[Any]) -> tuple[Any, Any]:
    return tf.concat(slices, 0), tf.concat(indices, 0)


def _merge_equal_indices(slices: Sequence[Any], indices: Sequence[Any]) -> tuple[Any, Any]:
    every_slice, every_index = _concatenate(slices, indices)
    merged, position = tf.unique(every_index)
    return tf.math.unsorted_segment_sum(every_slice, position, tf.size(merged)), merged


_COMBINE: Mapping[str, Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]]] = MappingProxyType(
    {
        "concat": _concatenate,
        "sum": lambda slices, indices: (tf.add_n(slices), indices[0]),
        "merge": _merge_equal_indices,
    }
)


def _add_to_rows(slices: Any, indices: Any, kind: TensorType) -> Any:
    """Return the dense tensor of this type; rows of equal index are added, as TensorFlow does it."""
    (rows, *_) = kind.shape.dims or ()
    return tf.math.unsorted_segment_sum(slices, indices, rows)


def _square_norm(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    # A stack and one sum, no additions: TensorFlow joins additions whose results have no other reader into one op, so
    # ranks of a stage would round differently and their weights drift apart.
    squares = [tf.cast(tf.reduce_sum(tf.square(gradient)), tf.float64) for gradient in inputs]
    return [tf.reduce_sum(tf.stack(squares))], []


def _clip(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    norm, *gradients = inputs
    if node.has("slices"):
        count = len(node.outputs) - node.integer("slices")
        pairs = zip(gradients[count::2], gradients[count + 1 :: 2], node.outputs[count:], strict=True)
        gradients = [*gradients[:count], *(_add_to_rows(*pair) for pair in pairs)]
    limit = tf.constant(node.attr("limit"), tf.float64)  # tf.cast would round a Python float to float32
    scale = limit / tf.maximum(norm, limit)
    return [gradient * tf.cast(scale, gradient.dtype) for gradient in gradients], []


HANDLERS: Mapping[OpName, Handler] = MappingProxyType(
    {
        OpName.CLEAR_SUMS: _clear_sums,
        OpName.ACCUMULATE: _accumulate,
        OpName.GRADIENTS: _gradients,
        OpName.ALLREDUCE: _allreduce,
        OpName.REDUCE: _sum,
        OpName.TIED_SUM: _sum,
        OpName.SUM_STATISTICS: _sum,
        OpName.ROUND: _round,
        OpName.REDUCED_GRADIENTS: _reduced_gradients,
        OpName.GATHER_SLICES: _gather_slices,
        OpName.DENSIFY: lambda context, node, inputs: ([_add_to_rows(inputs[0], inputs[1], node.outputs[0])], []),
        OpName.SQUARE_NORM: _square_norm,
        OpName.GLOBAL_NORM: lambda context, node, inputs: ([tf.sqrt(tf.reduce_sum(tf.stack(inputs)))], []),
        OpName.CLIP: _clip,
    }
)
