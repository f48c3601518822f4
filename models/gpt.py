"""A byte-level GPT: a decoder-only transformer that learns to predict the next byte of a text."""

from __future__ import annotations

import os
import random

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.text import BYTE_VALUES, read_corpus, windows

INITIAL_STDDEV = 0.06
"""Standard deviation of every weight matrix and embedding; at a width of 128 it learns faster than the usual 0.02."""


def gpt(
    *,
    layers: int = 8,
    width: int = 128,
    heads: int = 4,
    context: int = 96,
    dropout: float = 0.0,
    tied: bool = False,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    corpus: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> dapple.Workload:
    """Return a GPT with its text and its optimizer.

    The loss takes x and y, int32 [batch, context], and returns a scalar of `dtype`: the mean cross entropy in nats
    over all batch x context positions. The same seed gives the same weights and batches.

    Raises ValueError if `heads` does not divide `width`, or if the corpus is missing, empty or shorter than
    the context.
    """
    model = build_gpt(
        layers=layers,
        width=width,
        heads=heads,
        context=context,
        dropout=dropout,
        tied=tied,
        dtype=dtype,
        seed=seed,
    )

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        logits = model(x, training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))

    return dapple.Workload(
        loss_fn=loss_fn,
        optimizer=keras.optimizers.Adam(learning_rate),
        dataset=windows(read_corpus(corpus), context=context, batch_size=batch_size, seed=seed),
    )


def build_gpt(
    *, layers: int, width: int, heads: int, context: int, dropout: float, tied: bool, dtype: str, seed: int
) -> keras.Model:
    """Build the model: int32 [batch, context] in, logits [batch, context, 256] of `dtype` out.

    Its layers are named embed, block_0, block_1, ..., norm and head. With `tied` the head is the transpose of
    the token embedding and has no variable of its own.
    """
    if width % heads:
        raise ValueError(f"a width of {width} is not a multiple of {heads} heads: change width or heads")
    seeds = random.Random(seed)

    tokens = keras.Input([context], dtype="int32", name="tokens")
    embed = Embed(width, context, seeds, name="embed", dtype=dtype)
    x = embed(tokens)
    for i in range(layers):
        x = Block(width, heads, layers, dropout, seeds, name=f"block_{i}", dtype=dtype)(x)
    x = keras.layers.LayerNormalization(name="norm", dtype=dtype)(x)
    if tied:
        logits = TiedHead(embed.token, name="head", dtype=dtype)(x)
    else:
        logits = keras.layers.Dense(
            BYTE_VALUES, use_bias=False, kernel_initializer=_normal(seeds), name="head", dtype=dtype
        )(x)
    return keras.Model(tokens, logits, name="gpt")


class Embed(keras.layers.Layer):
    """Sum of the embeddings of each byte and its position: int32 [batch, context] to [batch, context, width]."""

    def __init__(self, width: int, context: int, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.token = keras.layers.Embedding(BYTE_VALUES, width, _normal(seeds), name="token", dtype=dtype)
        self.position = keras.layers.Embedding(context, width, _normal(seeds), name="position", dtype=dtype)

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        return self.token(tokens) + self.position(ops.arange(tokens.shape[1]))


class Block(keras.layers.Layer):
    """Attention, then an MLP, each on normalized input and with a residual connection; [batch, context, width]."""

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        dropout: float,
        seeds: random.Random,
        *,
        name: str,
        dtype: str,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        # Each block adds two terms to the residual stream; scaled so, its variance at the top is the same at any depth.
        residual = INITIAL_STDDEV / (2 * layers) ** 0.5
        self.attention_norm = keras.layers.LayerNormalization(name="attention_norm", dtype=dtype)
        self.attention = CausalSelfAttention(width, heads, residual, seeds, name="attention", dtype=dtype)
        self.mlp_norm = keras.layers.LayerNormalization(name="mlp_norm", dtype=dtype)
        self.up = keras.layers.Dense(4 * width, "gelu", kernel_initializer=_normal(seeds), name="up", dtype=dtype)
        self.down = keras.layers.Dense(width, kernel_initializer=_normal(seeds, residual), name="down", dtype=dtype)
        self.dropout = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x += self.dropout(self.attention(self.attention_norm(x)), training=training)
        x += self.dropout(self.down(self.up(self.mlp_norm(x))), training=training)
        return x


class CausalSelfAttention(keras.layers.Layer):
    """Attention of each position to itself and those before it; [batch, context, width]."""

    def __init__(self, width: int, heads: int, residual: float, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.width, self.heads = width, heads
        self.qkv = keras.layers.Dense(3 * width, kernel_initializer=_normal(seeds), name="qkv", dtype=dtype)
        self.out = keras.layers.Dense(width, kernel_initializer=_normal(seeds, residual), name="out", dtype=dtype)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        context, per_head = x.shape[1], self.width // self.heads
        qkv = ops.reshape(self.qkv(x), (-1, context, 3, self.heads, per_head))
        q, k, v = ops.unstack(ops.transpose(qkv, (2, 0, 3, 1, 4)), 3)  # each [batch, heads, context, per_head]

        future = np.triu(np.full((context, context), -1e9, x.dtype.as_numpy_dtype), 1)
        scores = ops.matmul(q * per_head**-0.5, ops.transpose(k, (0, 1, 3, 2))) + future
        mixed = ops.matmul(ops.softmax(scores), v)
        return self.out(ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (-1, context, self.width)))


class TiedHead(keras.layers.Layer):
    """Logits as products with the token embeddings: [batch, context, width] to [batch, context, 256]."""

    def __init__(self, embedding: keras.layers.Embedding, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.embedding = embedding

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def _normal(seeds: random.Random, stddev: float = INITIAL_STDDEV) -> keras.Initializer:
    return keras.initializers.RandomNormal(stddev=stddev, seed=seeds.getrandbits(31))
