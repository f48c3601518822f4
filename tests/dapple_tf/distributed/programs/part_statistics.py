"""Train two replicas on their own rows only, with losses that are divided by various statistics of the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from tests.equality.one_device import relative_error

SAMPLES, WIDTH, CLASSES = 17, 6, 3
Statistic = Callable[[Any, Any], Any]


def real(value: Any) -> Any:
    return tf.cast(value, tf.float64)


@functools.cache
def class_weights() -> tf.Variable:
    """Return a variable that nothing but the statistics reads."""
    return tf.Variable([0.5, 1.0, 2.0], dtype=tf.float64, trainable=False, name="class_weights")


def rows_of(mask: Any) -> Any:
    return real(tf.shape(mask)[0])


# Each is computed from a mask of floats and from classes. Those that can be combined from parts need a rank's own rows
# only.
COMBINABLE: Mapping[str, Statistic] = {
    "sum": lambda mask, y: tf.reduce_sum(mask),
    "squares": lambda mask, y: tf.nn.l2_loss(mask),
    "product": lambda mask, y: tf.reduce_prod(mask + 0.8),
    "min and max": lambda mask, y: tf.reduce_min(mask) + tf.reduce_max(mask),
    "all and any": lambda mask, y: 1 + real(tf.reduce_all(mask > 0)) + real(tf.reduce_any(y > 1)),
    "count": lambda mask, y: real(tf.math.count_nonzero(mask > 0.3)),
    "sum of chosen rows": lambda mask, y: tf.reduce_sum(tf.boolean_mask(mask, mask > 0.5)),
    "sums of classes": lambda mask, y: tf.reduce_max(tf.math.unsorted_segment_sum(mask, y, CLASSES)),
    "sum of repeated rows": lambda mask, y: tf.reduce_sum(
        tf.reshape(tf.stack([mask, mask], 1), [2 * tf.shape(mask)[0]])
    ),
    "weights of a variable": lambda mask, y: tf.reduce_sum(tf.gather(class_weights(), y)),
    "ones": lambda mask, y: tf.reduce_sum(tf.ones([tf.shape(mask)[0], 3], tf.float64)),
}
NOT_COMBINABLE: Mapping[str, Statistic] = {
    "rows over the size": lambda mask, y: tf.reduce_sum(mask / rows_of(mask)),
    "sum with 1/size in each row": lambda mask, y: tf.reduce_sum(mask + 1 / real(tf.size(mask))),
    "power of the size": lambda mask, y: tf.reduce_sum(mask ** (1 / rows_of(mask))),
    "max of products with the size": lambda mask, y: tf.reduce_max(mask * rows_of(mask)),
    "positions": lambda mask, y: tf.reduce_sum(mask * real(tf.range(tf.shape(mask)[0]))),
    "number of chosen rows": lambda mask, y: real(tf.shape(tf.where(mask > 0.3))[0]),
    "mean": lambda mask, y: tf.reduce_mean(mask),
    "variance": lambda mask, y: tf.math.reduce_variance(mask) + 0.1,
    "largest weights of a variable": lambda mask, y: tf.reduce_sum(tf.sort(tf.gather(class_weights(), y) + mask)[-4:]),
    "logsumexp": lambda mask, y: tf.reduce_logsumexp(mask),
    "running sum": lambda mask, y: tf.reduce_sum(tf.cumsum(mask)),
    "mirrored": lambda mask, y: tf.reduce_sum(mask * tf.reverse(mask, [0])),
    "first": lambda mask, y: mask[0] + 1,
    "outer product": lambda mask, y: tf.reduce_sum(mask[:, tf.newaxis] * mask),
    "argmax": lambda mask, y: real(tf.argmax(mask)) + 1,
    "repeated by the size": lambda mask, y: tf.reduce_sum(tf.tile(mask[:, tf.newaxis], [1, tf.shape(mask)[0]])),
}


def run() -> dict[str, dict[str, Any]]:
    """Return by statistic the relative errors of loss and weights, and whether this rank needs all of the mask."""
    return {name: _train(statistic) for name, statistic in {**COMBINABLE, **NOT_COMBINABLE}.items()}


def make_loss(statistic: Statistic, w: tf.Variable) -> Callable[..., Any]:
    def loss_fn(x: Any, y: Any, mask: Any) -> Any:
        errors = tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ w)
        return tf.reduce_sum(errors * mask) / statistic(mask, y)

    return loss_fn


def batch() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(SAMPLES, WIDTH)), random.integers(0, CLASSES, SAMPLES)
    return tf.constant(x), tf.constant(y), tf.constant(random.random(SAMPLES))


def new_weights() -> tf.Variable:
    return tf.Variable(np.random.default_rng(1).normal(size=(WIDTH, CLASSES)))


def _train(statistic: Statistic) -> dict[str, Any]:
    whole, found, expected = batch(), new_weights(), new_weights()
    class_weights()  # a trace must not make it
    step = dapple.pipeline(
        make_loss(statistic, found),
        optimizer=keras.optimizers.SGD(0.1),
        stages=1,
        replicas=[2],
        micro_batches=3,
        example_batch=whole,
    )
    needed = list(step.needs.rows(SAMPLES).values())
    own = [tf.concat([tensor[a:b] for a, b in rows], 0) for tensor, rows in zip(whole, needed, strict=True)]
    loss = float(step(*own, local=True))
    step.gather()
    with tf.GradientTape() as tape:
        wanted = make_loss(statistic, expected)(*whole)
    keras.optimizers.SGD(0.1).apply([tape.gradient(wanted, expected)], [expected])
    errors = {"loss": relative_error(loss, float(wanted)), "w": relative_error(found.numpy(), expected.numpy())}
    return {"errors": errors, "needs all": ((0, SAMPLES),) in needed}
