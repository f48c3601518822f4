"""A decoder as Llama has it (Touvron et al., 2023): RMS norm, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.text import read_corpus, text_workload, words
from dapple_tf.examples.transformer import RMSNorm, attend, check_heads, dense, hidden_future, normal, split_heads

INITIAL_STDDEV = 0.02
EPSILON = 1e-5


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama; `heads` query heads share `key_heads` heads of keys and values."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    context: int
    vocabulary: int
    rotary_base: float = 10_000.0


SCALES = {
    "8b": Size(32, 4096, 32, 8, 14336, context=8192, vocabulary=128_256, rotary_base=500_000.0),  # Llama 3
    "7b": Size(32, 4096, 32, 32, 11008, context=4096, vocabulary=32_000),  # Llama 2
    "1.1b": Size(22, 2048, 32, 4, 5632, context=2048, vocabulary=32_000),  # TinyLlama (Zhang et al., 2024)
    "tiny": Size(2, 32, 4, 2, 48, context=16, vocabulary=200),
}


def llama(
    *,
    scale: str = "8b",
    layers: int | None = None,
    context: int | None = None,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 3e-4,
    corpus: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> dapple.Workload:
    """Return a Llama with its text and its optimizer.

    `scale`: "8b" (Llama 3), "7b" (Llama 2), "1.1b" (TinyLlama) or "tiny"; `layers` and `context` change it.

    The loss takes x and y, int32 [batch, context], and returns a scalar of `dtype`: the mean cross entropy in nats
    over all batch x context positions.

    Raises ValueError for an unknown scale, or if the corpus is missing, empty or shorter than the context.
    """
    size = choose_size(SCALES, scale, layers=layers, context=context)
    model = build_llama(size, dtype=dtype, seed=seed)
    return decoder_workload(model, size, learning_rate, corpus=corpus, batch_size=batch_size, seed=seed)


def build_llama(size: Size, *, dtype: str, seed: int) -> keras.Model:
    """Build the model: int32 [batch, context] in, logits [batch, context, vocabulary] of `dtype` out.

    Its layers are named embed, block_0, block_1, ..., norm and head. No layer has a bias.
    """

    def make_mlp(seeds: random.Random) -> keras.layers.Layer:
        return SwiGLU(size.width, size.hidden, seeds, name="mlp", dtype=dtype)

    return build_decoder(size, make_mlp, name="llama", dtype=dtype, seed=seed)


def build_decoder(
    size: Size, make_mlp: Callable[[random.Random], keras.layers.Layer], *, name: str, dtype: str, seed: int
) -> keras.Model:
    """Build a model as `build_llama` does, whose blocks have the feed-forward layers that `make_mlp` makes."""
    check_heads(size.width, size.heads)
    check_heads(size.heads, size.key_heads)
    seeds = random.Random(seed)
    tokens = keras.Input([size.context], dtype="int32", name="tokens")
    x = keras.layers.Embedding(size.vocabulary, size.width, normal(seeds, INITIAL_STDDEV), name="embed", dtype=dtype)(
        tokens
    )
    for i in range(size.layers):
        x = RMSNormBlock(size, make_mlp(seeds), seeds, name=f"block_{i}", dtype=dtype)(x)
    x = RMSNorm(epsilon=EPSILON, name="norm", dtype=dtype)(x)
    logits = dense(size.vocabulary, INITIAL_STDDEV, seeds, name="head", dtype=dtype)(x)
    return keras.Model(tokens, logits, name=name)


def decoder_workload(
    model: keras.Model,
    size: Size,
    learning_rate: float,
    *,
    corpus: str | os.PathLike[str] | None,
    batch_size: int,
    seed: int,
) -> dapple.Workload:
    """Return a decoder of this size with its words and AdamW."""
    optimizer = keras.optimizers.AdamW(learning_rate, weight_decay=0.1, beta_2=0.95)
    text = words(read_corpus(corpus), size.vocabulary)
    return text_workload(model, optimizer, text, context=size.context, batch_size=batch_size, seed=seed)


class RMSNormBlock(keras.layers.Layer):
    """Attention, then `mlp`, each on normalized input and with a residual connection; [batch, context, width]."""

    def __init__(self, size: Size, mlp: keras.layers.Layer, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.attention_norm, self.mlp_norm = (
            RMSNorm(epsilon=EPSILON, name=part, dtype=dtype) for part in ("attention_norm", "mlp_norm")
        )
        self.attention = GroupedQueryAttention(size, seeds, name="attention", dtype=dtype)
        self.mlp = mlp

    def call(self, x: tf.Tensor) -> tf.Tensor:
        x += self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class SwiGLU(keras.layers.Layer):
    """A feed-forward layer whose hidden units are gated by the SiLU of others (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.gate, self.up = (dense(hidden, INITIAL_STDDEV, seeds, name=part, dtype=dtype) for part in ("gate", "up"))
        self.down = dense(width, INITIAL_STDDEV, seeds, name="down", dtype=dtype)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.down(ops.silu(self.gate(x)) * self.up(x))


class GroupedQueryAttention(keras.layers.Layer):
    """Causal attention in which several query heads share one head of keys and values (Ainslie et al., 2023)."""

    def __init__(self, size: Size, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.size = size
        per_head = size.width // size.heads
        self.q = dense(size.width, INITIAL_STDDEV, seeds, name="q", dtype=dtype)
        self.k, self.v = (
            dense(size.key_heads * per_head, INITIAL_STDDEV, seeds, name=part, dtype=dtype) for part in ("k", "v")
        )
        self.out = dense(size.width, INITIAL_STDDEV, seeds, name="out", dtype=dtype)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        heads, key_heads = self.size.heads, self.size.key_heads
        q, k, v = (
            split_heads(layer(x), count) for layer, count in ((self.q, heads), (self.k, key_heads), (self.v, key_heads))
        )
        q, k = rotate(q, self.size.rotary_base), rotate(k, self.size.rotary_base)
        k, v = (ops.repeat(y, heads // key_heads, axis=1) for y in (k, v))
        return self.out(attend(q * q.shape[-1] ** -0.5, k, v, hidden_future(x.shape[1], x.dtype)))


def rotate(x: tf.Tensor, base: float) -> tf.Tensor:
    """Turn pairs of channels by angles that grow with the position (Su et al., 2021); [batch, heads, length, size].

    Pair i is channels i and i + size / 2; its angle at position p is p / base^(2 i / size).
    """
    length, size = x.shape[2:]
    frequencies = ops.cast(base ** -(np.arange(0, size, 2) / size), x.dtype)
    angles = ops.arange(length, dtype=x.dtype)[:, None] * frequencies
    cos, sin = ops.cos(angles), ops.sin(angles)
    first, second = ops.split(x, 2, axis=-1)
    return ops.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
