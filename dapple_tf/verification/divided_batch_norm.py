"""Plain training in which only batch norm takes the batch in pieces: the samples of each micro-batch and replica."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals

SizesOf = Callable[[keras.Layer], Sequence[Sequence[int]]]
"""Returns the samples of the pieces that a layer takes, micro-batch by micro-batch, one for each replica."""


@contextlib.contextmanager
def divide_batch_norm(sizes_of: SizesOf, *, deferred: bool = False) -> Iterator[None]:
    """In the block, inside a tf.function, Keras's batch norm takes its input in pieces, one after the other.

    The sum of a layer's sizes must divide the number of rows of its input, which may have several rows for each sample
    ([samples x steps, channels]). Each piece is normalised by itself. Each replica writes moving statistics of its own,
    in order, and their means are kept; if ``deferred``, they are written once, from the mean and the variance of all
    pieces together.

    Only for calls in the graph under construction: an inner tf.function keeps its traces, which would then be used
    elsewhere.
    """
    graph = tf.compat.v1.get_default_graph()

    def call(original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if tf.compat.v1.get_default_graph() is not graph or not training or not layer.trainable:
            return original(layer, inputs, training=training, mask=mask)
        sizes = sizes_of(layer)
        steps = tf.shape(inputs)[0] // sum(map(sum, sizes))
        rows = [size * steps for micro_batch in sizes for size in micro_batch]
        pieces = tf.split(inputs, rows)
        masks = [None] * len(rows) if mask is None else tf.split(mask, rows)
        weights = rows if mask is None else [tf.math.count_nonzero(piece) for piece in masks]

        def normalise(i: int) -> Any:
            return original(layer, pieces[i], training=training, mask=masks[i])

        if deferred:
            outputs = _write_once(layer, normalise, weights)
        else:
            outputs = _write_in_turn(layer, normalise, len(rows), len(sizes[0]))
        return tf.ensure_shape(tf.concat(outputs, 0), inputs.shape)

    with internals.replace_batch_norm(call):
        yield


def _write_in_turn(layer: Any, normalise: Callable[[int], Any], count: int, replicas: int) -> list[Any]:
    """Return the pieces' outputs; the layer keeps the mean of what the replicas write one piece after the other."""
    statistics = [variable.value for variable in layer.non_trainable_variables]
    start = [tf.identity(variable) for variable in statistics]
    outputs: list[Any] = [None] * count
    ends = []
    for replica in range(replicas):
        for variable, value in zip(statistics, start, strict=True):
            variable.assign(value)
        for i in range(replica, count, replicas):
            outputs[i] = normalise(i)
        ends.append([tf.identity(variable) for variable in statistics])
    for variable, values in zip(statistics, zip(*ends, strict=True), strict=True):
        variable.assign(tf.add_n(values) / replicas)
    return outputs


def _write_once(layer: Any, normalise: Callable[[int], Any], weights: Sequence[Any]) -> list[Any]:
    """Return the pieces' outputs; the layer writes as if it had the statistics of all pieces together."""
    statistics = [variable.value for variable in layer.non_trainable_variables]
    start = [tf.identity(variable) for variable in statistics]
    found: list[tuple[Any, Any]] = []

    def record(layer: Any, inputs: Any, mask: Any, compute: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        found.append(compute())
        return found[-1]

    with internals.replace_moments(record):
        outputs = [normalise(i) for i in range(len(weights))]
    for variable, value in zip(statistics, start, strict=True):
        variable.assign(value)
    means, variances = (
        tf.stack([tf.reshape(tf.cast(value, tf.float64), [-1]) for value in values])  # Keras squeezes one channel
        for values in zip(*found, strict=True)
    )
    shares = tf.cast(tf.stack(weights), tf.float64)[:, tf.newaxis]
    shares = tf.math.divide_no_nan(shares, tf.reduce_sum(shares))
    mean = tf.reduce_sum(shares * means, 0)
    variance = tf.reduce_sum(shares * (variances + tf.square(means - mean)), 0)
    whole = tf.cast(mean, found[0][0].dtype), tf.cast(variance, found[0][1].dtype)
    with internals.replace_moments(lambda *_: whole):
        normalise(0)
    return outputs
