"""GNMT (Wu et al., 2016): an encoder and a decoder of LSTM layers with attention and residual connections."""

from __future__ import annotations

import random
from dataclasses import dataclass

import keras
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.translation import HiddenPadding, translation_workload

INITIAL_LIMIT = 0.1
"""Weights are drawn uniformly from -0.1 to 0.1."""


@dataclass(frozen=True)
class Size:
    """Sizes of a GNMT: encoder and decoder have `layers` LSTM layers each."""

    layers: int
    width: int
    length: int
    vocabulary: int


SCALES = {
    "16": Size(layers=8, width=1024, length=36, vocabulary=36560),  # DAPPLE's; sentences of 36 words as in its profile
    "tiny": Size(layers=2, width=16, length=8, vocabulary=60),
}


def gnmt(
    *,
    scale: str = "16",
    layers: int | None = None,
    length: int | None = None,
    dropout: float = 0.2,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 1e-4,
    seed: int = 0,
) -> dapple.Workload:
    """Return a GNMT with a generated translation task and its optimizer.

    `scale`: "16" (8 + 8 layers) or "tiny"; `layers` (of the encoder, and of the decoder) and `length` change it.

    The loss takes source and target, int32 [batch, length], and returns a scalar of `dtype`: the mean cross entropy in
    nats over all words of the targets.

    Raises ValueError for an unknown scale, fewer than two layers, or a length below 2.
    """
    size = choose_size(SCALES, scale, layers=layers, length=length)
    model = build_gnmt(size, dropout=dropout, dtype=dtype, seed=seed)
    return translation_workload(
        model,
        keras.optimizers.Adam(learning_rate),
        vocabulary=size.vocabulary,
        length=size.length,
        batch_size=batch_size,
        seed=seed,
    )


def build_gnmt(size: Size, *, dropout: float, dtype: str, seed: int) -> keras.Model:
    """Build the model: source and shifted target in, int32 [batch, length]; logits [batch, length, vocabulary] out.

    Layers are named encoder_embed, encoder_0, ..., decoder_embed, decoder_0, attention, decoder_1, ... and head. Every
    decoder layer but the first one takes the attention's result beside the output of the layer before. From the third
    layer on, the output of the layer before is added to that of the layer.
    """
    if size.layers < 2:
        raise ValueError(f"a GNMT has 2 layers or more in its encoder and decoder, not {size.layers}")
    seeds = random.Random(seed)

    def embedding(name: str) -> keras.layers.Layer:
        return keras.layers.Embedding(size.vocabulary, size.width, _uniform(seeds), name=name, dtype=dtype)

    def lstm(name: str, **options: object) -> keras.layers.Layer:
        return lstm_layer(size.width, dropout, seeds, name=name, dtype=dtype, **options)

    source = keras.Input([size.length], dtype="int32", name="source")
    target = keras.Input([size.length], dtype="int32", name="target")
    hidden_padding = HiddenPadding(name="hidden_padding", dtype=dtype)(source)

    x = embedding("encoder_embed")(source)
    x = keras.layers.Bidirectional(
        lstm("encoder_0_forward"),
        backward_layer=lstm("encoder_0_backward", go_backwards=True),
        name="encoder_0",
        dtype=dtype,
    )(x)
    for i in range(1, size.layers):
        above = lstm(f"encoder_{i}")(x)
        x = above + x if i > 1 else above
    memory = x

    x = lstm("decoder_0")(embedding("decoder_embed")(target))
    attended = AdditiveAttention(size.width, seeds, name="attention", dtype=dtype)(x, memory, hidden_padding)
    for i in range(1, size.layers):
        above = lstm(f"decoder_{i}")(ops.concatenate([x, attended], axis=-1))
        x = above + x if i > 1 else above
    logits = keras.layers.Dense(size.vocabulary, kernel_initializer=_uniform(seeds), name="head", dtype=dtype)(x)
    return keras.Model([source, target], logits, name="gnmt")


def lstm_layer(
    width: int, dropout: float, seeds: random.Random, *, name: str, dtype: str, **options: object
) -> keras.layers.Layer:
    """Return an LSTM of `width` units that gives its output at every position, with dropout of its input."""
    return keras.layers.LSTM(
        width,
        kernel_initializer=_uniform(seeds),
        recurrent_initializer=_uniform(seeds),
        dropout=dropout,
        seed=seeds.getrandbits(31),
        return_sequences=True,
        name=name,
        dtype=dtype,
        **options,
    )


class AdditiveAttention(keras.layers.Layer):
    """Normalized additive attention (Bahdanau et al., 2014) of decoder states to encoder states.

    queries: [batch, targets, width]; memory: [batch, sources, width]; bias: [batch, 1, sources]; the result is
    [batch, targets, width].
    """

    def __init__(self, width: int, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.query, self.key = (
            keras.layers.Dense(width, use_bias=False, kernel_initializer=_uniform(seeds), name=part, dtype=dtype)
            for part in ("query", "key")
        )
        self.width, self.initializer = width, _uniform(seeds)

    def build(self, *_: object) -> None:
        self.direction = self.add_weight(shape=[self.width], initializer=self.initializer, name="direction")
        self.gain = self.add_weight(shape=[], initializer=keras.initializers.Constant(self.width**-0.5), name="gain")
        self.bias = self.add_weight(shape=[self.width], initializer="zeros", name="bias")

    def call(self, queries: tf.Tensor, memory: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
        sums = ops.tanh(self.query(queries)[:, :, None] + self.key(memory)[:, None] + self.bias)
        direction = self.direction * (self.gain * ops.rsqrt(ops.sum(ops.square(self.direction))))
        scores = ops.sum(sums * direction, axis=-1) + bias
        return ops.matmul(ops.softmax(scores), memory)


def _uniform(seeds: random.Random) -> keras.Initializer:
    return keras.initializers.RandomUniform(-INITIAL_LIMIT, INITIAL_LIMIT, seed=seeds.getrandbits(31))
