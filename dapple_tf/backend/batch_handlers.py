"""Handlers of the ops that cut the batch into micro-batches and replicas' shares, and put results together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.handler import TEMPLATE, Context, Handler, Outcome, call, check_finite, micro_batch_in_minibatch
from dapple_tf.graph_passes.analysis.row_bounds import cut_at, cut_points, micro_batch_bounds, share_bounds
from dapple_tf.graph_passes.ir.graph import Node
from dapple_tf.graph_passes.ir.names import MICRO_BATCH
from dapple_tf.graph_passes.ir.ops import OpName


def _minibatch(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    size, *tensors = inputs
    first, end = micro_batch_bounds(size, node.integer("minibatch"), node.integer("minibatches"))
    return [tensor[first:end] for tensor in tensors], []


def _slice(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    size, *tensors = inputs
    if node.integer("micro_batches") == 1 and node.integer("replicas") == 1:
        return [tf.ones([], tf.float64), *tensors], []
    local = node.get("local", ())

    def find_bounds(size: Any, micro_batch: Any) -> list[Any]:
        low, high = _bounds(size, node, micro_batch)
        share = tf.cast(high - low, tf.float64) / tf.cast(size, tf.float64)
        first = _own_rows_before(size, node, micro_batch) if local else low
        return [share, *([place] for place in (low, high, first, first + high - low))]

    share, low, high, first, end = _call_on_numbers(context, node, find_bounds, size)
    one = tf.constant([1], tf.int64)
    rows = [
        tf.raw_ops.StridedSlice(input=tensor, begin=begin, end=stop, strides=one)
        for i, tensor in enumerate(tensors)
        for begin, stop in [(first, end) if i in local else (low, high)]
    ]
    return [share, *rows], []


def _own_rows_before(size: Any, node: Node, micro_batch: Any) -> Any:
    """Return how many rows the node's replica takes of all earlier micro-batches."""
    points = cut_points(node.integer("micro_batches"), node.get("sizes", ()))
    rows = cut_at(size, tf.constant(list(points), tf.int64)[: micro_batch + 1], points[-1])
    low, high = share_bounds(rows[:-1], rows[1:], *_replica(node), node.get("shares", ()))
    return tf.reduce_sum(high - low)


def _rows(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    (size,) = inputs
    if not node.has("micro_batch"):
        return [tf.stack([tf.zeros([], tf.int64), size, size])], []

    def find_bounds(size: Any, micro_batch: Any) -> list[Any]:
        return [tf.stack([*_bounds(size, node, micro_batch), size])]

    return _call_on_numbers(context, node, find_bounds, size), []


def _call_on_numbers(context: Context, node: Node, function: Callable[[Any, Any], list[Any]], size: Any) -> list[Any]:
    """Return ``function`` of the batch size and the node's micro-batch, computed by one op.

    Every micro-batch of every stage has its bounds, for which a dozen ops each would slow the build of the step.
    """
    specs = [tf.TensorSpec([], tf.int64)] * 2
    key = node.op, node.without(MICRO_BATCH).attrs
    shared = context.shared(key, lambda: internals.trace_function(function, specs, internals.NO_INLINE))
    outputs, _ = call(shared, [size, _micro_batch(context, node)], not_inlined=True)
    return outputs


def _loss_gradient(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    dtype = node.outputs[0].dtype.name
    if not inputs:
        return [tf.ones([], dtype)], []
    product, *scales = inputs
    for scale in scales:  # in the float64 of the share, which is rounded once
        product *= tf.cast(scale, product.dtype)
    return [tf.cast(product, dtype)], []


def _split(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    size, *tensors = inputs
    begin, end = _micro_batch_bounds(size, node, _micro_batch(context, node))
    low, high = share_bounds(begin, end, *_replica(node), node.get("shares", ()))
    receivers, outputs = node.integer("of"), []
    of_shares = node.get("of_shares", ())
    for tensor, axis in zip(tensors, node.integers("axes"), strict=True):
        for j in node.integers("receivers"):
            first, last = share_bounds(begin, end, j, receivers, of_shares)
            outputs.append(slice_axis(tensor, axis, tf.maximum(low, first) - low, tf.minimum(high, last) - low))
    return outputs, []


def _concat(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    pieces = node.integer("pieces")
    groups = [inputs[i : i + pieces] for i in range(0, len(inputs), pieces)]
    return [tf.concat(group, axis) for group, axis in zip(groups, node.integers("axes"), strict=True)], []


def _add(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    pieces = node.integer("pieces")
    if not pieces:
        return [tf.zeros(kind.shape.dims, kind.dtype.name) for kind in node.outputs], []
    return [tf.add_n(inputs[i : i + pieces]) for i in range(0, len(inputs), pieces)], []


def _gather_rows(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    count = node.integer("pieces")
    tensors, lengths = [], []
    for k, (axis, outer) in enumerate(zip(node.integers("axes"), node.integers("outer"), strict=True)):
        pieces = inputs[k * count : (k + 1) * count]
        lengths.append(tf.stack([tf.shape(piece, tf.int64)[axis] for piece in pieces]))
        tensors.append(_join(tf.concat([_part(piece, axis, outer) for piece in pieces], axis + 1), axis))
    return [*tensors, *lengths], []


def _cut_rows(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    axes, outers = node.integers("axes"), node.integers("outer")
    outputs = []
    for tensor, lengths, axis, outer in zip(inputs, inputs[len(axes) :], axes, outers, strict=False):
        pieces = tf.split(_part(tensor, axis, outer), lengths // outer, axis + 1, num=node.integer("pieces"))
        outputs += [_join(piece, axis) for piece in pieces]
    return outputs, []


def _together(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    with tf.control_dependencies(inputs):
        return [tf.identity(tensor) for tensor in inputs], []


def _part(tensor: Any, axis: int, outer: int) -> Any:
    """Return ``tensor`` with ``axis`` as two axes; the first has the length ``outer``."""
    shape = tf.shape(tensor, tf.int64)
    parts = [shape[:axis], [outer, shape[axis] // outer], shape[axis + 1 :]]
    return tf.reshape(tensor, tf.concat(parts, 0))


def _join(tensor: Any, axis: int) -> Any:
    """Return ``tensor`` with ``axis`` and the next one as one axis."""
    shape = tf.shape(tensor, tf.int64)
    parts = [shape[:axis], [shape[axis] * shape[axis + 1]], shape[axis + 2 :]]
    return tf.reshape(tensor, tf.concat(parts, 0))


def _merge(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    merged = _merge_values(node.string("kind"), inputs[::2], inputs[1::2])
    return [check_finite(merged, "the loss") if node.has("check") else merged], []


def _merge_values(kind: str, values: list[Any], shares: list[Any]) -> Any:
    if len(values) == 1:
        return tf.identity(values[0])
    match kind:
        case "concat":
            return tf.concat(values, 0)
        case "sum":
            return tf.add_n(values)
        case "first":
            return tf.identity(values[0])
    if values[0].shape.rank == 0:  # a product for each would be two ops a micro-batch
        return tf.add_n(tf.unstack(tf.stack(values) * tf.cast(tf.stack(shares), values[0].dtype)))
    return tf.add_n([value * tf.cast(share, value.dtype) for value, share in zip(values, shares, strict=True)])


def _merge_minibatches(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    match node.string("kind"):
        case "mean":
            return [tf.add_n(inputs) / len(inputs)], []
        case "stack":
            return [tf.stack(inputs)], []
        case kind:
            return [_merge_values(kind, inputs, [])], []


def _bounds(size: Any, node: Node, micro_batch: Any) -> tuple[Any, Any]:
    """Return the first and the end sample of the share of the micro-batch that the node's replica takes."""
    return share_bounds(*_micro_batch_bounds(size, node, micro_batch), *_replica(node), node.get("shares", ()))


def _micro_batch_bounds(size: Any, node: Node, micro_batch: Any) -> tuple[Any, Any]:
    """Return the first and the end sample of the micro-batch."""
    sizes = node.get("sizes", ())
    points = cut_points(node.integer("micro_batches"), sizes)
    first, end = micro_batch, micro_batch + 1
    if sizes:
        first, end = (tf.gather(tf.constant(list(points), tf.int64), place) for place in (first, end))
    return cut_at(size, first, points[-1]), cut_at(size, end, points[-1])


def _micro_batch(context: Context, node: Node) -> Any:
    """Return the number of the node's micro-batch in its minibatch, a tensor; in a template, a constant to be set."""
    if context.micro_batch is not None:
        return context.micro_batch % node.integer("micro_batches")
    number = 0 if node.name == TEMPLATE else micro_batch_in_minibatch(node)
    return tf.constant(number, tf.int64, name=MICRO_BATCH)


def _replica(node: Node) -> tuple[int, int]:
    return node.integer("replica"), node.integer("replicas")


def slice_axis(tensor: Any, axis: int, first: Any, last: Any) -> Any:
    """Return ``tensor[first:last]`` along one axis."""
    return tensor[(slice(None),) * axis + (slice(first, last),)]


HANDLERS: Mapping[OpName, Handler] = MappingProxyType(
    {
        OpName.MINIBATCH: _minibatch,
        OpName.BATCH_SIZE: lambda context, node, inputs: ([tf.shape(inputs[0], out_type=tf.int64)[0]], []),
        OpName.SLICE: _slice,
        OpName.ROW_BOUNDS: _rows,
        OpName.LOSS_GRADIENT: _loss_gradient,
        OpName.SPLIT: _split,
        OpName.CONCAT: _concat,
        OpName.ADD: _add,
        OpName.TOGETHER: _together,
        OpName.GATHER_ROWS: _gather_rows,
        OpName.CUT_ROWS: _cut_rows,
        OpName.MERGE: _merge,
        OpName.MERGE_MINIBATCHES: _merge_minibatches,
    }
)
