"""A random program: ops that are applied to drawn tensors, and a loss of the last result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.op_programs.applications import apply_op
from benchmarks.op_programs.sources import FEATURES, SEED, Choices, Pool


@dataclass(frozen=True)
class Program:
    """``ops`` are applied one after the other; ``numbers`` decide their operands and attributes, and the loss."""

    ops: tuple[str, ...]
    numbers: tuple[int, ...]

    def loss(self) -> tuple[Callable[..., Any], tuple[tf.Variable, tf.Variable]]:
        """Return the loss, a function of x [N, 24] and ids [N], and the variables that it trains."""
        w = tf.Variable(np.linspace(-1.0, 1.5, FEATURES), dtype=tf.float64, name="w")
        v = tf.Variable(1.25, dtype=tf.float64, name="v")

        def loss_fn(x: Any, ids: Any) -> Any:
            pool = Pool(x, ids, w, Choices(self.numbers))
            for op in self.ops:
                pool.earlier += [value for value in tf.nest.flatten(apply_op(op, pool)) if tf.is_tensor(value)]
            result = pool.choices.of(pool.earlier[-2:][::-1])
            return pool.choices.of(_ENDS)(pool, as_float(result), v) + 0.1 * tf.reduce_mean(tf.square(x * w))

        return loss_fn, (w, v)


def make_batch(samples: int) -> tuple[Any, Any]:
    """Return x and ids for a number of samples."""
    random = np.random.default_rng(samples)
    return tf.constant(random.normal(size=(samples, FEATURES))), tf.constant(random.integers(0, 4, samples), tf.int32)


def as_float(value: Any) -> Any:
    """Return a float64 tensor that depends on each entry of ``value``."""
    if value.dtype == tf.string:
        return tf.cast(tf.strings.to_hash_bucket_fast(value, 1000), tf.float64) / 500.0
    if value.dtype.is_complex:
        return tf.cast(tf.math.real(value) + 0.5 * tf.math.imag(value), tf.float64)
    return tf.cast(value, tf.float64)


def _per_sample(pool: Pool, value: Any, v: Any) -> Any:
    return tf.reduce_mean(tf.reshape(value, tf.stack([pool.size, -1])) * pool.x[:, :1]) * v


_ENDS: Sequence[Callable[[Pool, Any, Any], Any]] = (
    lambda pool, value, v: tf.reduce_mean(tf.sin(value) * v),
    lambda pool, value, v: tf.reduce_sum(tf.sin(value * v)) / tf.cast(pool.size, tf.float64),
    _per_sample,
    lambda pool, value, v: tf.reduce_mean(
        value * tf.random.stateless_normal(tf.shape(value), SEED, dtype=tf.float64) * v
    ),
    lambda pool, value, v: tf.reduce_sum(tf.sin(value * v)),
    lambda pool, value, v: tf.reduce_mean(tf.reduce_max(value * v, -1)),
    lambda pool, value, v: tf.reduce_mean(tf.sin(value)) * v,
)
