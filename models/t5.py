"""T5 (Raffel et al., 2019): an encoder and a decoder with tied embeddings and relative positions in buckets."""

from __future__ import annotations

import random
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.transformer import RMSNorm, TiedHead, attend, dense, hidden_future, normal, split_heads
from dapple_tf.examples.translation import HiddenPadding, translation_workload

EPSILON = 1e-6
BUCKETS, FARTHEST = 32, 128
"""Relative positions have 32 buckets; the last one is for distances from 128 on."""


@dataclass(frozen=True)
class Size:
    """Sizes of a T5: encoder and decoder have `layers` blocks each; heads are `per_head` channels wide."""

    layers: int
    width: int
    heads: int
    per_head: int
    hidden: int
    length: int = 512
    vocabulary: int = 32128


SCALES = {
    "base": Size(layers=12, width=768, heads=12, per_head=64, hidden=3072),
    "small": Size(layers=6, width=512, heads=8, per_head=64, hidden=2048),
    "tiny": Size(layers=2, width=32, heads=2, per_head=16, hidden=64, length=8, vocabulary=60),
}


def t5(
    *,
    scale: str = "base",
    layers: int | None = None,
    length: int | None = None,
    dropout: float = 0.1,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> dapple.Workload:
    """Return a T5 with a generated translation task and its optimizer.

    `scale`: "base", "small" or "tiny"; `layers` (of the encoder, and of the decoder) and `length`
    change it.

    The loss takes source and target, int32 [batch, length], and returns a scalar of `dtype`: the mean cross entropy in
    nats over all words of the targets.

    Raises ValueError for an unknown scale, or a length below 2.
    """
    size = choose_size(SCALES, scale, layers=layers, length=length)
    model = build_t5(size, dropout=dropout, dtype=dtype, seed=seed)
    return translation_workload(
        model,
        keras.optimizers.Adam(learning_rate),
        vocabulary=size.vocabulary,
        length=size.length,
        batch_size=batch_size,
        seed=seed,
    )


def build_t5(size: Size, *, dropout: float, dtype: str, seed: int) -> keras.Model:
    """Build the model: source and shifted target in, int32 [batch, length]; logits [batch, length, vocabulary] out.

    Layers are named embed, encoder_bias, encoder_0, ..., encoder_norm, decoder_bias, decoder_0, ..., decoder_norm and
    head. Both inputs and the head share one embedding; all blocks of the encoder share one bias of relative positions,
    and so do those of the decoder.
    """
    seeds = random.Random(seed)
    source = keras.Input([size.length], dtype="int32", name="source")
    target = keras.Input([size.length], dtype="int32", name="target")
    embed = keras.layers.Embedding(size.vocabulary, size.width, normal(seeds, 1.0), name="embed", dtype=dtype)
    padding = HiddenPadding(name="hidden_padding", dtype=dtype)(source)[:, None]

    def drop(x: tf.Tensor, name: str) -> tf.Tensor:
        return keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name=name, dtype=dtype)(x)

    bias = RelativeBias(size, causal=False, seeds=seeds, name="encoder_bias", dtype=dtype)(source)
    x = drop(embed(source), "encoder_embed_dropout")
    for i in range(size.layers):
        x = EncoderBlock(size, dropout, seeds, name=f"encoder_{i}", dtype=dtype)(x, bias, padding)
    x = RMSNorm(epsilon=EPSILON, name="encoder_norm", dtype=dtype)(x)
    memory = drop(x, "encoder_dropout")

    bias = RelativeBias(size, causal=True, seeds=seeds, name="decoder_bias", dtype=dtype)(target)
    x = drop(embed(target), "decoder_embed_dropout")
    for i in range(size.layers):
        x = DecoderBlock(size, dropout, seeds, name=f"decoder_{i}", dtype=dtype)(x, memory, bias, padding)
    x = RMSNorm(epsilon=EPSILON, name="decoder_norm", dtype=dtype)(x)
    x = drop(x, "decoder_dropout")
    logits = TiedHead(embed, scale=size.width**-0.5, name="head", dtype=dtype)(x)
    return keras.Model([source, target], logits, name="t5")


class RelativeBias(keras.layers.Layer):
    """A learned bias for each head and bucket of relative positions: [1, heads, length, length], for all samples.

    With `causal` it also hides later positions.
    """

    def __init__(self, size: Size, *, causal: bool, seeds: random.Random, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.heads, self.causal, self.initializer = size.heads, causal, normal(seeds, size.width**-0.5)

    def build(self, _: object) -> None:
        self.table = self.add_weight(shape=[BUCKETS, self.heads], initializer=self.initializer, name="table")

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        positions = np.arange(tokens.shape[1])
        numbers = bucket_numbers(positions - positions[:, None], causal=self.causal)
        bias = ops.transpose(ops.take(self.table, numbers, axis=0), (2, 0, 1))[None]
        return bias + hidden_future(len(positions), bias.dtype) if self.causal else bias


def bucket_numbers(relative: np.ndarray, *, causal: bool) -> np.ndarray:
    """Return the bucket of each relative position (of the key, seen from the query), int32.

    Short distances have a bucket each; longer ones share buckets whose bounds grow exponentially. Without `causal` the
    upper half of the buckets is for keys that come after the query.
    """
    buckets = BUCKETS if causal else BUCKETS // 2
    distance = np.maximum(-relative, 0) if causal else np.abs(relative)
    exact = buckets // 2
    steps = np.log(np.maximum(distance, exact) / exact) / np.log(FARTHEST / exact) * (buckets - exact)
    number: np.ndarray = np.where(distance < exact, distance, np.minimum(exact + steps.astype(np.int32), buckets - 1))
    if not causal:
        number += buckets * (relative > 0)
    return number.astype(np.int32)


class EncoderBlock(keras.layers.Layer):
    """Attention and an MLP, each on normalized input and with a residual connection; [batch, length, width]."""

    def __init__(self, size: Size, dropout: float, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.attention = Attention(size, seeds, name="attention", dtype=dtype)
        self.mlp = FeedForward(size, dropout, seeds, name="mlp", dtype=dtype)
        self.attention_norm, self.mlp_norm = (
            RMSNorm(epsilon=EPSILON, name=part, dtype=dtype) for part in ("attention_norm", "mlp_norm")
        )
        self.dropout = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)

    def call(self, x: tf.Tensor, bias: tf.Tensor, padding: tf.Tensor, training: bool = False) -> tf.Tensor:
        normed = self.attention_norm(x)
        x += self.dropout(self.attention(normed, normed, bias + padding), training=training)
        return x + self.dropout(self.mlp(self.mlp_norm(x), training=training), training=training)


class DecoderBlock(keras.layers.Layer):
    """Attention to earlier positions, attention to the encoder's result, and an MLP; [batch, length, width]."""

    def __init__(self, size: Size, dropout: float, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.attention, self.cross_attention = (
            Attention(size, seeds, name=part, dtype=dtype) for part in ("attention", "cross_attention")
        )
        self.mlp = FeedForward(size, dropout, seeds, name="mlp", dtype=dtype)
        self.attention_norm, self.cross_attention_norm, self.mlp_norm = (
            RMSNorm(epsilon=EPSILON, name=part, dtype=dtype)
            for part in ("attention_norm", "cross_attention_norm", "mlp_norm")
        )
        self.dropout = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)

    def call(
        self, x: tf.Tensor, memory: tf.Tensor, bias: tf.Tensor, padding: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        normed = self.attention_norm(x)
        x += self.dropout(self.attention(normed, normed, bias), training=training)
        normed = self.cross_attention_norm(x)
        x += self.dropout(self.cross_attention(normed, memory, padding), training=training)
        return x + self.dropout(self.mlp(self.mlp_norm(x), training=training), training=training)


class Attention(keras.layers.Layer):
    """Attention of x to memory, both [batch, length, width], with a bias that is added to the scores.

    Scores are not scaled: the initial weights of the queries are smaller instead.
    """

    def __init__(self, size: Size, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.heads = size.heads
        joined = size.heads * size.per_head
        self.q, self.k, self.v, self.out = (
            dense(units, stddev, seeds, name=part, dtype=dtype)
            for part, units, stddev in (
                ("q", joined, (size.width * size.per_head) ** -0.5),
                ("k", joined, size.width**-0.5),
                ("v", joined, size.width**-0.5),
                ("out", size.width, joined**-0.5),
            )
        )

    def call(self, x: tf.Tensor, memory: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
        q, k, v = (split_heads(y, self.heads) for y in (self.q(x), self.k(memory), self.v(memory)))
        return self.out(attend(q, k, v, bias))


class FeedForward(keras.layers.Layer):
    """Two matrices with ReLU and dropout between; [batch, length, width]."""

    def __init__(self, size: Size, dropout: float, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.up = dense(size.hidden, size.width**-0.5, seeds, name="up", dtype=dtype)
        self.down = dense(size.width, size.hidden**-0.5, seeds, name="down", dtype=dtype)
        self.dropout = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.down(self.dropout(ops.relu(self.up(x)), training=training))
