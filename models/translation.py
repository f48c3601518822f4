"""A generated translation task: sentences of a made language, and their translations into another one."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples.text import FIRST_WORD, PAD, SEPARATOR
from dapple_tf.examples.transformer import HIDDEN


def sentence_pairs(
    *, vocabulary: int, length: int, batch_size: int, seed: int = 0, sentences: int = 20_000
) -> tf.data.Dataset:
    """Return an endless data set of sentence pairs, in a shuffled order; iterating again gives the same batches again.

    Each element is (source, target), int32 [batch_size, length]: words from FIRST_WORD on, then SEPARATOR, then PAD.
    Every sentence has length / 2 words or more, frequent ones more often than rare ones. Its translation has
    another word for each word, in the reverse order.

    Raises ValueError if the vocabulary has no word, or if the length leaves no room for one.
    """
    words = vocabulary - FIRST_WORD
    if words < 1:
        raise ValueError(f"a vocabulary of {vocabulary} has no word beside {FIRST_WORD} marks: use a larger one")
    if length < 2:
        raise ValueError(f"sentences of length {length} have no room for a word and its end: use 2 or more")
    random = np.random.default_rng(seed)
    translations = random.permutation(words).astype(np.int32)
    drawn = (words * random.random((sentences, length)) ** 3).astype(np.int32)
    lengths = random.integers(length // 2, length, sentences)

    def mark_end(numbers: np.ndarray) -> np.ndarray:
        ends, columns = lengths[:, None], np.arange(length)
        marked = np.where(columns < ends, numbers + FIRST_WORD, np.where(columns == ends, SEPARATOR, PAD))
        return marked.astype(np.int32)

    reverse = np.maximum(lengths[:, None] - 1 - np.arange(length), 0)
    source, target = mark_end(drawn), mark_end(translations[np.take_along_axis(drawn, reverse, axis=1)])
    pairs = tf.data.Dataset.from_tensor_slices((source, target))
    shuffled = pairs.shuffle(sentences, seed=seed, reshuffle_each_iteration=False)
    return shuffled.repeat().batch(batch_size, drop_remainder=True).prefetch(2)


def translation_workload(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    *,
    vocabulary: int,
    length: int,
    batch_size: int,
    seed: int,
) -> dapple.Workload:
    """Return a model that translates, [source, shifted target] in and logits out, with its optimizer and pairs.

    The loss is the mean cross entropy over the positions of the target that are not PAD, in nats.
    """

    def loss_fn(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        logits = model([source, shift_right(target)], training=True)
        return mean_of_words(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=logits), target)

    data = sentence_pairs(vocabulary=vocabulary, length=length, batch_size=batch_size, seed=seed)
    return dapple.Workload(loss_fn, optimizer, data)


def mean_of_words(losses: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Return the mean of the losses [batch, length] over the positions of `target` that are not PAD."""
    weights = tf.cast(target != PAD, losses.dtype)
    return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)


def shift_right(target: tf.Tensor) -> tf.Tensor:
    """Return what the decoder sees while it predicts `target`, int32 [batch, length]: SEPARATOR, then the words."""
    return tf.pad(target[:, :-1], [[0, 0], [1, 0]], constant_values=SEPARATOR)


class HiddenPadding(keras.layers.Layer):
    """A bias that hides padding from attention: int32 [batch, length] to [batch, 1, length]."""

    def call(self, source: tf.Tensor) -> tf.Tensor:
        return keras.ops.cast(source == PAD, self.compute_dtype)[:, None, :] * HIDDEN
