"""Statistics of batch norm layers in training mode over several micro-batches and replicas: recorded, or joined.

*Recorded* (``batch_norm="deferred"``): the sums of a layer's statistics are recorded while a loss is traced. Those of
several micro-batches and replicas add up, and give the statistics of all their samples together.

*Joined* (``batch_norm="sync"``): a layer takes mean and variance of a micro-batch over all replicas of its stage. In
the trace its statistics (weight, mean and variance of each channel) pass through an Identity that has another gradient
than an Identity usually has. It marks the place where replicas join their statistics: each replica gets the statistics
of all samples, and in backward the sum of the gradients that all replicas have for these (``passes.join_replicas``).
The gradient has a second Identity, which marks the place of this sum. With one replica, and where a stage's function
runs by itself, both Identities return their inputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node
from dapple_tf.graph_passes.passes.function_parts import JOIN


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
        self, layer: keras.layers.BatchNormalization, inputs: Any, mask: Any, compute: Callable[[], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        mean, variance = compute()
        # As float64, since sums lose digits; Keras squeezes the statistics of one channel with a mask.
        wide_mean, wide_variance = (tf.reshape(tf.cast(each, tf.float64), [-1]) for each in (mean, variance))
        weight = count_entries(layer, inputs, mask, tf.float64)
        sums = tf.stack([weight, weight * wide_mean, weight * (wide_variance + tf.square(wide_mean))])
        self.calls.append(BatchNormCall(layer, sums, inputs.shape.rank, inputs.dtype.name))
        return mean, variance


def join_sums(sums: Any) -> tuple[Any, Any]:
    """Return the mean and the variance (biased, as Keras takes it) of all samples of ``sums``; zeros without any."""
    weight, total, squares = tf.unstack(sums)
    mean = tf.math.divide_no_nan(total, weight)
    return mean, tf.math.divide_no_nan(squares, weight) - tf.square(mean)


def count_entries(layer: keras.layers.BatchNormalization, inputs: Any, mask: Any, dtype: tf.DType) -> Any:
    """Return how many entries of each channel of ``inputs`` statistics are taken over: those that the ``mask`` keeps.

    Without a mask (None) these are all. Along axes of unknown length it sums ones. The length itself must not be used:
    the analysis replaces a length that is cast to a float by that of the whole batch.
    """
    channels, lengths = layer.axis % inputs.shape.rank, inputs.shape.as_list()
    if mask is not None:
        counted = tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs))
        axes = [axis for axis in range(len(lengths)) if axis != channels]
        return tf.reduce_sum(tf.cast(tf.cast(counted, tf.bool), dtype), axes)
    first_entries = inputs[tuple(slice(None) if length is None else slice(0, 1) for length in lengths)]
    others = math.prod(length or 1 for axis, length in enumerate(lengths) if axis != channels)
    ones = tf.cast(tf.raw_ops.OnesLike(x=first_entries), dtype)
    return tf.fill([lengths[channels]], others * tf.reduce_sum(ones))


# --- Join mean and variance over replicas


_MOMENTS, _SUM = "moments", "sum"
_GRADIENT = "_gradient_op_type"  # the attribute in which TensorFlow keeps the name of another gradient
_GRADIENTS = MappingProxyType({_MOMENTS: "DappleJoinMoments", _SUM: "DappleJoinSum"})


def join_moments(
    layer: keras.layers.BatchNormalization, inputs: Any, mask: Any, compute: Callable[[], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Return mean and variance over all replicas; for ``internals.replace_moments``."""
    mean, variance = compute()
    weight = count_entries(layer, inputs, mask, inputs.dtype)
    flat = [tf.reshape(statistic, [-1]) for statistic in (mean, variance)]  # Keras squeezes one channel with a mask
    own = tf.stack([weight, *(flat if mask is None else _without_epsilon(weight, *flat))])
    weight, *found = tf.unstack(_identity(own, _MOMENTS))
    whole = found if mask is None else _with_epsilon(weight, *found)
    return tf.reshape(whole[0], tf.shape(mean)), tf.reshape(whole[1], tf.shape(variance))


def _without_epsilon(weight: Any, mean: Any, variance: Any) -> list[Any]:
    """Return mean and variance of the entries that a mask keeps, from what Keras takes for them.

    Keras divides the sums by ``weight`` + epsilon, and takes the variance around this mean.
    """
    scale = tf.math.divide_no_nan(weight + keras.config.epsilon(), weight)
    return [scale * mean, scale * variance - tf.square(scale * mean - mean)]


def _with_epsilon(weight: Any, mean: Any, variance: Any) -> list[Any]:
    """Return what Keras takes for mean and variance of the entries that a mask keeps: undo ``_without_epsilon``."""
    scale = weight / (weight + keras.config.epsilon())
    return [scale * mean, scale * (variance + tf.square(mean - scale * mean))]


def join(kind: str, pieces: Sequence[Any]) -> Any:
    """Return the ``pieces`` of all replicas as one: [3, channels] each.

    ``kind`` is moments (weight, mean and variance of each channel), or sum.
    """
    return _JOINS[kind](tf.stack(pieces))


def _join_pieces(pieces: Any) -> Any:
    weights, means, variances = tf.unstack(pieces, axis=1)
    weight = tf.reduce_sum(weights, 0)
    shares = tf.math.divide_no_nan(weights, weight)
    mean = tf.reduce_sum(shares * means, 0)
    return tf.stack([weight, mean, tf.reduce_sum(shares * (variances + tf.square(means - mean)), 0)])


_JOINS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {_MOMENTS: _join_pieces, _SUM: lambda pieces: tf.reduce_sum(pieces, 0)}
)


def _identity(tensor: Any, kind: str) -> Any:
    """Return ``tensor`` by an Identity that marks where replicas join; its kind is the name of its gradient."""
    with tf.compat.v1.get_default_graph().gradient_override_map({"Identity": _GRADIENTS[kind]}):
        return tf.identity(tensor, name=f"join_{kind}")


def _moments_gradient(op: tf.Operation, gradient: Any) -> Any:
    """Return the gradient for a replica's own statistics; weights, counts of entries, have none.

    It is the sum over replicas of the gradients of the joined statistics, times the derivatives of ``_join_pieces``.
    The joined variance does not change with the joined mean in it: the differences to the mean add up to 0.
    """
    weight, mean, _ = tf.unstack(op.inputs[0])
    whole_weight, whole_mean, _ = tf.unstack(op.outputs[0])
    _, of_mean, of_variance = tf.unstack(_identity(gradient, _SUM))
    share = tf.math.divide_no_nan(weight, whole_weight)
    own = [share * (of_mean + 2 * (mean - whole_mean) * of_variance), share * of_variance]
    return tf.stack([tf.zeros_like(weight), *own])


tf.RegisterGradient(_GRADIENTS[_MOMENTS])(_moments_gradient)


def mark_joins(graph: Graph, captured: Graph | None = None) -> Graph:
    """Return ``graph`` in which the Identities where replicas join have the attribute ``join`` and the effect JOIN.

    Identities that run once a step, or in the loss head, do not: they already get the whole batch. ``captured``: the
    marked graph of the loss, if ``graph`` is the joint graph of its forward and backward.
    """

    def mark(node: Node) -> Node:
        kind = _kind(node)
        known = None if captured is None else captured.by_name.get(node.name)
        if kind is None or (known is not None and not known.has(JOIN)) or node.has("once") or node.has("loss_head"):
            return node
        return dataclasses.replace(node.with_attrs(**{JOIN: kind}), effect=Effect.JOIN)

    return graph.replace(nodes=tuple(map(mark, graph.nodes)))


def _kind(node: Node) -> str | None:
    """Return how the node joins the values of replicas, or None if it does not."""
    gradient = node.get(_GRADIENT) if node.op == "Identity" else None
    return next((kind for kind, name in _GRADIENTS.items() if gradient == name.encode()), None)
