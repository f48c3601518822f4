"""Record the calls of batch norm layers in training mode while a loss is traced, with the sums of their statistics.

The sums of several micro-batches and replicas add up, and give the statistics of all their samples together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf


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
        wide_mean, wide_variance = (_widen(statistic) for statistic in (mean, variance))
        weight = count_entries(layer, inputs, mask, tf.float64)
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
