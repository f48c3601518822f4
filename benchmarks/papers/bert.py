"""BERT-L of the DAPPLE paper: the cost of any number of encoder layers on a V100, computed from shapes.

Hidden size 1024, 16 heads, 4096 inside, 30522 words: the weights have the bytes of the published profile exactly.
Sequences of 384 are usual for SQuAD, and agree with the published outputs of a layer for 2 samples, 4325376 bytes: the
hidden states (2 x 384 x 1024) and the attention mask (2 x 384 x 384), of 4 bytes each.
"""

from __future__ import annotations

from dataclasses import replace

import keras
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.profiler.profile import LayerCost, Profile

WIDTH, HEADS, INSIDE, WORDS, POSITIONS, LENGTH = 1024, 16, 4096, 30522, 512, 384
DROPOUT = 0.1


class Embed(keras.layers.Layer):
    """Sum of the embeddings of word, position and sentence: int32 [batch, length] to [batch, length, width]."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.tables = [keras.layers.Embedding(size, WIDTH) for size in (WORDS, POSITIONS, 2)]
        self.norm = keras.layers.LayerNormalization()
        self.dropout = keras.layers.Dropout(DROPOUT)

    def call(self, words: tf.Tensor, sentences: tf.Tensor) -> tf.Tensor:
        """Return the embeddings, normalized and with dropout."""
        word, position, sentence = self.tables
        x = word(words) + position(ops.arange(LENGTH)) + sentence(sentences)
        return self.dropout(self.norm(x), training=True)


class Encoder(keras.layers.Layer):
    """Attention, then an MLP, each with a residual connection and normalization: [batch, length, width]."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.inputs = [keras.layers.Dense(WIDTH) for _ in range(3)]
        self.output_ = keras.layers.Dense(WIDTH)
        self.up, self.down = keras.layers.Dense(INSIDE, "gelu"), keras.layers.Dense(WIDTH)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.dropout = keras.layers.Dropout(DROPOUT)

    def call(self, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Return the layer's output. ``mask``: [batch, length], 1 where there is a word."""
        first, second = self.norms
        x = first(x + self.dropout(_rows(self.output_, self.attend(x, mask), WIDTH), training=True))
        inside = _rows(self.up, x, INSIDE)
        return second(x + self.dropout(_rows(self.down, inside, WIDTH), training=True))

    def attend(self, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Return the attention of all heads."""
        q, k, v = (
            ops.transpose(ops.reshape(_rows(dense, x, WIDTH), (-1, LENGTH, HEADS, WIDTH // HEADS)), (0, 2, 1, 3))
            for dense in self.inputs
        )
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * (WIDTH // HEADS) ** -0.5
        weights = ops.softmax(scores + (1.0 - mask[:, None, None, :]) * -10000.0)
        mixed = ops.matmul(self.dropout(weights, training=True), v)
        return ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (-1, LENGTH, WIDTH))


def _rows(dense: keras.layers.Dense, x: tf.Tensor, width: int) -> tf.Tensor:
    """Return the dense layer as one matrix product with a row per word, as in BERT."""
    return ops.reshape(dense(ops.reshape(x, (-1, x.shape[-1]))), (-1, LENGTH, width))


def profile_two_layers(batch_size: int) -> Profile:
    """Return the analytic profile of two encoder layers on a V100, for ``batch_size`` samples."""
    embed, encoders = Embed("embeddings"), [Encoder(f"layer_{i}") for i in range(2)]
    span = keras.layers.Dense(2, name="span")

    def loss_fn(words: tf.Tensor, sentences: tf.Tensor, mask: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Return the loss of the answer's start and end, as in SQuAD."""
        x = embed(words, sentences)
        for encoder in encoders:
            x = encoder(x, mask)
        logits = tf.transpose(span(x), (0, 2, 1))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=places, logits=logits))

    batch = (
        tf.zeros([batch_size, LENGTH], tf.int32),
        tf.zeros([batch_size, LENGTH], tf.int32),
        tf.ones([batch_size, LENGTH]),
        tf.zeros([batch_size, 2], tf.int32),
    )
    tf.function(loss_fn).get_concrete_function(*batch)  # makes the variables without computing anything
    return dapple.analytic_profile(loss_fn, batch, "V100", model="BERT-L")


def repeat_layer(profile: Profile, layers: int) -> Profile:
    """Return the profile of ``layers`` encoder layers, from that of two: the second one's costs are repeated.

    Stages may start at whole encoder layers only. The profile has times for its own batch size alone.
    """
    parts = [layer.name.split("/")[0] for layer in profile.layers]
    first, end = parts.index("layer_0"), len(parts) - parts[::-1].index("layer_1")
    one = profile.layers[parts.index("layer_1") : end]
    found: list[LayerCost] = list(profile.layers[:first])
    starts = []
    for number in range(layers):
        starts.append(len(found))
        found += [replace(cost, name=cost.name.replace("layer_1/", f"layer_{number}/", 1)) for cost in one]
    found += profile.layers[end:]
    uncuttable = tuple(sorted(set(range(1, len(found))) - set(starts)))
    return replace(profile, layers=tuple(found), timings=(), uncuttable=uncuttable, unsplittable=())
