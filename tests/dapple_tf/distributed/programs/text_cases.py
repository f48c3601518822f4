"""Problems with text: a lookup table that several ranks read, and sequences whose length is unknown in the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.equality.one_device import Problem

WORDS, WIDTH, LENGTH = ["a", "b", "c", "d"], 4, 3


def _matrices(*names: str) -> dict[str, tf.Variable]:
    random = np.random.default_rng(0)
    return {name: tf.Variable(random.normal(size=(len(WORDS) + 1, WIDTH)), name=name) for name in names}


def looked_up() -> Problem:
    """The first layer numbers words by a table, the last one labels by the same table."""
    numbers = tf.range(1, len(WORDS) + 1, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(WORDS, numbers), 0)
    found = _matrices("table", "classes")
    w = tf.Variable(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)), name="w")

    def loss_fn(words: Any, labels: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.reduce_mean(tf.gather(found["table"], table.lookup(words)), 1)
        with tf.name_scope("second"):
            h = tf.tanh(h @ w)
        with tf.name_scope("third"):
            wanted = tf.gather(found["classes"], table.lookup(labels))
            return tf.reduce_mean(tf.reduce_sum(tf.square(h - wanted), 1))

    return Problem(loss_fn, {**found, "w": w}, lambda: keras.optimizers.Adam(0.01))


def word_batches() -> Sequence[tuple[Any, ...]]:
    random = np.random.default_rng(2)
    draw = [random.choice([*WORDS, "other"], (n, LENGTH + 1)) for n in (11, 7, 11)]
    return [(tf.constant(words[:, 1:]), tf.constant(words[:, 0])) for words in draw]


def of_open_lengths() -> Problem:
    """Attention over sequences whose length the loss's ``input_signature`` does not say."""
    found = _matrices("table")
    random = np.random.default_rng(3)
    weights = {name: tf.Variable(random.normal(size=(WIDTH, WIDTH)), name=name) for name in ("w", "v")}

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None], tf.float64)])
    def loss_fn(ids: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.tanh(tf.einsum("btw,wv->btv", tf.gather(found["table"], ids), weights["w"]))
        with tf.name_scope("second"):
            h = tf.nn.softmax(tf.einsum("btw,bsw->bts", h, h)) @ h
            h = tf.tanh(tf.einsum("btw,wv->btv", h, weights["v"]))
            mask = tf.cast(ids > 0, tf.float64)
        errors = tf.square(tf.reduce_sum(h, 2) - y[:, tf.newaxis]) * mask
        return tf.reduce_sum(errors) / tf.reduce_sum(mask)

    return Problem(loss_fn, {**found, **weights}, lambda: keras.optimizers.Adam(0.01))


def of_ragged_and_sparse() -> Problem:
    """Ragged words, embedded in the first stage and reduced in the second, and a sparse matrix in the second."""
    found = _matrices("table")
    w = tf.Variable(np.random.default_rng(3).normal(size=(len(WORDS) + 1, WIDTH)), name="w")

    def loss_fn(words: Any, features: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.ragged.map_flat_values(tf.tanh, tf.gather(found["table"], words))
        with tf.name_scope("second"):
            h = tf.reduce_sum(h, axis=1) + tf.sparse.sparse_dense_matmul(features, w)
            return tf.reduce_mean(tf.square(tf.reduce_sum(h, 1) - y))

    return Problem(loss_fn, {**found, "w": w}, lambda: keras.optimizers.Adam(0.01))


def ragged_and_sparse_batches() -> Sequence[tuple[Any, ...]]:
    random, batches = np.random.default_rng(5), []
    for samples, longest in ((11, 5), (11, 9), (7, 2)):
        lengths = random.integers(0, longest + 1, samples)
        words = tf.RaggedTensor.from_row_lengths(random.integers(0, 5, lengths.sum()), lengths)
        features = random.normal(size=(samples, 5)) * (random.random((samples, 5)) < 0.3)
        batches.append((words, tf.sparse.from_dense(features), tf.constant(random.normal(size=samples))))
    return batches


def batches_of_lengths() -> Sequence[tuple[Any, ...]]:
    random = np.random.default_rng(4)
    sizes = ((11, 5), (11, 9), (7, 2), (11, 5))
    return [(tf.constant(random.integers(0, 5, size)), tf.constant(random.normal(size=size[0]))) for size in sizes]
