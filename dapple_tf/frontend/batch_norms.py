"""Record the calls of batch norm layers in training mode while a loss is traced, with the sums of their statistics.

The sums of several micro-batches and replicas add up, and give the statistics of all their samples together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.exactness import BatchNorm
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.dependence.elementwise import is_integer
from dapple_tf.frontend.dependence.kinds import Form, Kind
from dapple_tf.graph_passes.analysis.layers import live_nodes
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value


@dataclass(frozen=True)
class BatchNormCall:
    """A call of a batch norm layer in training mode.

    ``sums``: float64 [3, channels], a tensor of the trace: for each channel the weight of the samples (their number of
    entries, or that of a mask), and this times the mean, and times the variance plus the squared mean. ``rank`` and
    ``dtype``: of the input.
    """

    layer: keras.layers.BatchNormalization
    sums: Any
    rank: int
    dtype: str


class BatchNormRecorder:
    """Records the ``calls``, in order; for ``internals.replace_moments``."""

    def __init__(self) -> None:
        self.calls: list[BatchNormCall] = []

    def __call__(
        self,
        layer: keras.layers.BatchNormalization,
        inputs: Any,
        mask: Any,
        compute: Callable[[], tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        mean, variance = compute()
        wide_mean, wide_variance = (_widen(statistic) for statistic in (mean, variance))
        weight = _weight(layer, inputs, mask)
        sums = tf.stack([weight, weight * wide_mean, weight * (wide_variance + tf.square(wide_mean))])
        self.calls.append(BatchNormCall(layer, sums, inputs.shape.rank, inputs.dtype.name))
        return mean, variance


def _widen(statistic: Any) -> Any:
    """Return a mean or a variance as float64, since sums lose digits; Keras squeezes that of one channel and a mask."""
    return tf.reshape(tf.cast(statistic, tf.float64), [-1])


def join_sums(sums: Any) -> tuple[Any, Any]:
    """Return the mean and the variance (biased, as Keras takes it) of all samples of ``sums``; zeros without any."""
    weight, total, squares = tf.unstack(sums)
    mean = tf.math.divide_no_nan(total, weight)
    return mean, tf.math.divide_no_nan(squares, weight) - tf.square(mean)


def _weight(layer: keras.layers.BatchNormalization, inputs: Any, mask: Any) -> Any:
    """Return how many entries of each channel the statistics are taken over, as float64."""
    if mask is None:
        return count_entries(layer, inputs, tf.float64)
    return count_kept(layer, inputs, mask, tf.float64)


def count_entries(layer: keras.layers.BatchNormalization, inputs: Any, dtype: tf.DType) -> Any:
    """Return how many entries each channel of ``inputs`` has.

    Along axes of unknown length it sums ones. The length itself must not be used: the analysis replaces a length that
    is cast to a float by that of the whole batch.
    """
    channels, lengths = layer.axis % inputs.shape.rank, inputs.shape.as_list()
    first_entries = inputs[tuple(slice(None) if length is None else slice(0, 1) for length in lengths)]
    others = math.prod(length or 1 for axis, length in enumerate(lengths) if axis != channels)
    ones = tf.cast(tf.raw_ops.OnesLike(x=first_entries), dtype)
    return tf.fill([lengths[channels]], others * tf.reduce_sum(ones))


def count_kept(layer: keras.layers.BatchNormalization, inputs: Any, mask: Any, dtype: tf.DType) -> Any:
    """Return how many entries of each channel of ``inputs`` the ``mask`` keeps."""
    counted = tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs))
    axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
    return tf.reduce_sum(tf.cast(tf.cast(counted, tf.bool), dtype), axes)


# --- Refuse calls of batch norm layers whose statistics cannot be found in the graph of a loss


def statistics_writes(captured: Captured, choice: BatchNorm) -> list[Node]:
    """Return the nodes by which batch norm layers write moving statistics of each micro-batch.

    Raises CaptureError if another node writes such statistics: the layer's call is hidden in it; and if such a layer
    computes with the number of its samples: each call sees those of one micro-batch on one replica, and the statistics
    are taken over more. ``choice``: the
    value of ``batch_norm`` that needs to see the call.
    """
    assert captured.dependence is not None, "the analysis tells which layers normalise each micro-batch"
    once = captured.dependence.once
    writes = [node for node in captured.graph.nodes if node.effect is Effect.WRITE and node.name not in once]
    _check_seen(captured, writes, choice)
    found = [node for node in writes if node.has("batch_norm")]
    _check_sizes(captured.graph, captured.dependence.kinds, found, choice)
    return found


def _check_seen(captured: Captured, writes: Sequence[Node], choice: BatchNorm) -> None:
    """Raise CaptureError if a node that is no batch norm layer's own op writes such a layer's moving statistics."""
    others = {name: node for node in writes if not node.has("batch_norm") for name in node.strings("writes")}
    layers = {id(layer.moving_mean.value): layer for layer in internals.batch_norm_layers()} if others else {}
    for name, node in others.items():
        layer = layers.get(id(captured.variables.get(name)))
        if layer is not None:
            raise CaptureError(
                f"batch_norm={choice!r}: {node.name!r} ({node.op}) writes the statistics of layer {layer.name!r}: the "
                "layer is called in a nested tf.function, a loop or a condition, or not by its __call__. Call it in "
                "the loss itself, or take batch_norm='micro-batch'"
            )


def _check_sizes(graph: Graph, kinds: Mapping[Value, Kind], writes: Sequence[Node], choice: BatchNorm) -> None:
    """Raise CaptureError if a layer with one of the ``writes`` computes a float from the length of a batch axis."""
    calls, live = {node.integer("batch_norm") for node in writes}, live_nodes(graph)
    for node in graph.nodes:
        if node.name not in live or not node.has("batch_norm") or node.integer("batch_norm") not in calls:
            continue
        numbers = [value for value in node.values() if not is_integer(graph.type_of(value))]
        if any(kinds[value].form is Form.SIZE for value in numbers):
            raise CaptureError(
                f"batch_norm={choice!r}: layer {layer_of(node)!r} computes with the number of its samples "
                f"({node.name!r}, {node.op}): it sees those of one micro-batch on one replica, and its statistics are "
                "taken over more. Take batch_norm='micro-batch', or a layer that does not use that number"
            )


def layer_of(node: Node) -> str:
    """Return the name of the layer that made this node of a batch norm's call."""
    return node.string("layer" if node.has("layer") else "within")
