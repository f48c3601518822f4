"""Problems with rows looked up by ids that occur often: slices of gradients cross between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.equality.one_device import Problem

ROWS, POSITIONS, WIDTH = 9, 3, 4


def plain_adam() -> Any:
    return keras.optimizers.Adam(0.01)


def clipping_adam() -> Any:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.01)


def embedding(*, again: bool = False, make_optimizer: Callable[[], Any] = plain_adam) -> Callable[[], Problem]:
    """Return a function that makes a problem: rows of a table and of positions, two dense layers.

    ``again``: the last layer looks up rows of the table too.
    """

    def make() -> Problem:
        random = np.random.default_rng(0)
        shapes = {"table": (ROWS, WIDTH), "position": (POSITIONS, WIDTH), "w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}
        found = {name: tf.Variable(random.normal(size=shape), name=name) for name, shape in shapes.items()}

        def loss_fn(ids: Any, y: Any) -> Any:
            with tf.name_scope("look_up"):
                rows = tf.gather(found["table"], ids) + tf.gather(found["position"], tf.range(POSITIONS))
                h = tf.reduce_mean(tf.tanh(rows), 1)
            for name, scope in (("w", "dense_0"), ("v", "dense_1")):
                with tf.name_scope(scope):
                    h = tf.tanh(h @ found[name])
            if again:
                with tf.name_scope("again"):
                    h += tf.reduce_sum(tf.gather(found["table"], ids[:, :2]), 1)
            return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1))

        return Problem(loss_fn, found, make_optimizer)

    return make


def id_batches(sizes: Sequence[int] = (11, 7, 11)) -> list[tuple[Any, ...]]:
    """Return batches of ids and targets of these sizes."""
    random = np.random.default_rng(1)
    return [
        (tf.constant(random.integers(0, 4, size=(n, POSITIONS))), tf.constant(random.normal(size=(n, WIDTH))))
        for n in sizes
    ]
