"""A problem whose loss adds sums over samples to variables: each replica adds those of its own samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.equality.one_device import Problem

WIDTH = 4


def totals(make_optimizer: Any) -> Problem:
    """Return two dense layers; the first counts large entries, the second adds up what it computes."""
    random = np.random.default_rng(0)
    w, v = (tf.Variable(random.normal(size=(WIDTH, WIDTH)), name=name) for name in ("w", "v"))
    total = tf.Variable(np.zeros(WIDTH), trainable=False, name="total")
    count = tf.Variable(5, trainable=False, name="count")

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            h = tf.tanh(x @ w)
            count.assign_add(tf.reduce_sum(tf.cast(h > 0.5, tf.int32)))
        with tf.name_scope("layer1"):
            h = tf.tanh(h @ v)
            total.assign_add(tf.reduce_sum(h, 0))
        return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1))

    return Problem(loss_fn, {"w": w, "v": v, "total": total, "count": count}, make_optimizer)
