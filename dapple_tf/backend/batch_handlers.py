"""Handlers of the ops that cut the batch into micro-batches and replicas' shares, and put results together again."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from dapple_tf.backend.handler import Context, Handler, Outcome, check_finite
from dapple_tf.graph_passes.analysis.row_bounds import (
    cut_at,
    cut_points,
    micro_batch_bounds,
    replica_bounds,
    share_bounds,
)
from dapple_tf.graph_passes.ir.graph import Node
from dapple_tf.graph_passes.ir.ops import OpName


def _minibatch(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    size, *tensors = inputs
    first, end = micro_batch_bounds(size, node.integer("minibatch"), node.integer("minibatches"))
    return [tensor[first:end] for tensor in tensors], []


def _batch_size(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    return [tf.shape(inputs[0], out_type=tf.int64)[0]], []


def _slice(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    size, *tensors = inputs
    if node.integer("micro_batches") == 1 and node.integer("replicas") == 1:
        return [tf.ones([], tf.float64), *tensors], []
    low, high = _bounds(size, node)
    share = tf.cast(high - low, tf.float64) / tf.cast(size, tf.float64)
    local = node.integers("local") if node.has("local") else ()
    first = _own_rows_before(size, node) if local else low
    starts = [first if i in local else low for i in range(len(tensors))]
    rows = [tensor[start : start + high - low] for tensor, start in zip(tensors, starts, strict=True)]
    return [share, *rows], []


def _own_rows_before(size: Any, node: Node) -> Any:
    """Return how many rows the node's replica takes of all earlier micro-batches."""
    points, m = cut_points(node.integer("micro_batches"), _sizes(node)), _micro_batch(node)
    rows = cut_at(size, tf.constant(list(points[: m + 1]), tf.int64), points[-1])
    low, high = share_bounds(rows[:-1], rows[1:], *_replica(node), _shares(node))
    return tf.reduce_sum(high - low)


def _rows(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    (size,) = inputs
    low, high = _bounds(size, node) if node.has("micro_batch") else (tf.zeros([], tf.int64), size)
    return [tf.stack([low, high, size])], []


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
    low, high = _bounds(size, node)
    begin, end = micro_batch_bounds(size, _micro_batch(node), node.integer("micro_batches"), _sizes(node))
    receivers, outputs = node.integer("of"), []
    of_shares = _shares(node, "of_shares")
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
    """Return ``tensor`` with ``axis`` as two axes, of which the first has the length ``outer``."""
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
    return tf.add_n([value * tf.cast(share, value.dtype) for value, share in zip(values, shares, strict=True)])


def _merge_minibatches(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    match node.string("kind"):
        case "mean":
            return [tf.add_n(inputs) / len(inputs)], []
        case "stack":
            return [tf.stack(inputs)], []
        case kind:
            return [_merge_values(kind, inputs, [])], []


def _bounds(size: Any, node: Node) -> tuple[Any, Any]:
    """Return the first and the end sample of the share of the node's micro-batch that its replica takes."""
    cut = node.integer("micro_batches"), *_replica(node), _sizes(node), _shares(node)
    return replica_bounds(size, _micro_batch(node), *cut)


def _micro_batch(node: Node) -> int:
    """Return the number of the micro-batch in its minibatch: micro-batches are numbered through a window of several."""
    return node.integer("micro_batch") % node.integer("micro_batches")


def _replica(node: Node) -> tuple[int, int]:
    return node.integer("replica"), node.integer("replicas")


def _sizes(node: Node) -> tuple[int, ...]:
    """Return the given samples of each micro-batch; none where they are equal."""
    return node.integers("sizes") if node.has("sizes") else ()


def _shares(node: Node, name: str = "shares") -> tuple[int, ...]:
    """Return how the replicas of a stage share rows; empty where equally."""
    return node.integers(name) if node.has(name) else ()


def slice_axis(tensor: Any, axis: int, first: Any, last: Any) -> Any:
    """Return ``tensor[first:last]`` along one axis."""
    return tensor[(slice(None),) * axis + (slice(first, last),)]


HANDLERS: Mapping[OpName, Handler] = MappingProxyType(
    {
        OpName.MINIBATCH: _minibatch,
        OpName.BATCH_SIZE: _batch_size,
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
