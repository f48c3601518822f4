"""Parts that several transformers here have in common: initial values, attention, the pre-norm block, RMS norm."""

from __future__ import annotations

import random
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import ops

HIDDEN = -1e9
"""The number that is added to the score of a masked key."""

LONGEST_CONSTANT = 512


@dataclass(frozen=True)
class BlockOptions:
    """The sizes and settings that all blocks of one transformer share; an MLP has 4 x width hidden units.

    `stddev` is that of the initial weights; `residual_stddev` that of the two matrices whose products are added to
    the residual stream.
    """

    width: int
    heads: int
    dropout: float
    causal: bool
    stddev: float
    residual_stddev: float
    epsilon: float = 1e-3


def normal(seeds: random.Random, stddev: float) -> keras.Initializer:
    """Return an initializer that draws from a normal distribution, with the next seed."""
    return keras.initializers.RandomNormal(stddev=stddev, seed=seeds.getrandbits(31))


def dense(units: int, stddev: float, seeds: random.Random, *, name: str, dtype: str) -> keras.layers.Layer:
    """Return a dense layer without a bias."""
    return keras.layers.Dense(units, use_bias=False, kernel_initializer=normal(seeds, stddev), name=name, dtype=dtype)


def check_heads(width: int, heads: int) -> None:
    """Raise ValueError if the heads cannot share the width equally."""
    if width % heads:
        raise ValueError(f"a width of {width} is not a multiple of {heads} heads: change width or heads")


class Block(keras.layers.Layer):
    """Attention, then an MLP, each on normalized input and with a residual connection; [batch, length, width]."""

    def __init__(self, options: BlockOptions, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        width, epsilon = options.width, options.epsilon
        self.attention_norm = keras.layers.LayerNormalization(epsilon=epsilon, name="attention_norm", dtype=dtype)
        self.attention = SelfAttention(options, seeds, name="attention", dtype=dtype)
        self.mlp_norm = keras.layers.LayerNormalization(epsilon=epsilon, name="mlp_norm", dtype=dtype)
        self.up = keras.layers.Dense(
            4 * width, "gelu", kernel_initializer=normal(seeds, options.stddev), name="up", dtype=dtype
        )
        self.down = keras.layers.Dense(
            width, kernel_initializer=normal(seeds, options.residual_stddev), name="down", dtype=dtype
        )
        self.dropout = keras.layers.Dropout(options.dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x += self.dropout(self.attention(self.attention_norm(x)), training=training)
        x += self.dropout(self.down(self.up(self.mlp_norm(x))), training=training)
        return x


def add_blocks(x: tf.Tensor, layers: int, options: BlockOptions, seeds: random.Random, *, dtype: str) -> tf.Tensor:
    """Return x, [batch, length, width], after blocks named block_0, block_1, ... and a layer norm named norm."""
    for i in range(layers):
        x = Block(options, seeds, name=f"block_{i}", dtype=dtype)(x)
    return keras.layers.LayerNormalization(epsilon=options.epsilon, name="norm", dtype=dtype)(x)


class SelfAttention(keras.layers.Layer):
    """Attention of each position to all, or if causal to itself and those before it; [batch, length, width]."""

    def __init__(self, options: BlockOptions, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.width, self.heads, self.causal = options.width, options.heads, options.causal
        self.qkv = keras.layers.Dense(
            3 * self.width, kernel_initializer=normal(seeds, options.stddev), name="qkv", dtype=dtype
        )
        self.out = keras.layers.Dense(
            self.width, kernel_initializer=normal(seeds, options.residual_stddev), name="out", dtype=dtype
        )

    def call(self, x: tf.Tensor) -> tf.Tensor:
        length, per_head = x.shape[1], self.width // self.heads
        qkv = ops.reshape(self.qkv(x), (-1, length, 3, self.heads, per_head))
        q, k, v = ops.unstack(ops.transpose(qkv, (2, 0, 3, 1, 4)), 3)  # each [batch, heads, length, per_head]
        return self.out(attend(q * per_head**-0.5, k, v, hidden_future(length, x.dtype) if self.causal else None))


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, bias: tf.Tensor | np.ndarray | None = None) -> tf.Tensor:
    """Return the mean of `v` over the keys, weighted by the softmax of q k^T + bias, with the heads side by side.

    q: [batch, heads, queries, size], already scaled. k and v: [batch, heads, keys, size]. bias: anything that
    broadcasts to [batch, heads, queries, keys]. The result: [batch, queries, heads x size].
    """
    scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2)))
    if bias is not None:
        scores += bias
    return join_heads(ops.matmul(ops.softmax(scores), v))


def hidden_future(length: int, dtype: tf.DType) -> tf.Tensor | np.ndarray:
    """Return a bias [length, length] that hides every later position from each query.

    A short one is a constant. Constants of long ones in every layer would make the graph larger than 2 GB.
    """
    kind = tf.as_dtype(dtype)
    number = kind.as_numpy_dtype
    hidden = number(max(HIDDEN, float(kind.min) / 2))  # float16 ends at -65504
    if length <= LONGEST_CONSTANT:
        return np.triu(np.full((length, length), hidden, number), 1)
    positions = ops.arange(length)
    return ops.where(positions[:, None] < positions, hidden, number(0))


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Return the mean cross entropy of integer labels, in nats: a scalar."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def split_heads(x: tf.Tensor, heads: int) -> tf.Tensor:
    """Cut [batch, length, heads x size] into [batch, heads, length, size]."""
    return ops.transpose(ops.reshape(x, (-1, x.shape[1], heads, x.shape[2] // heads)), (0, 2, 1, 3))


def join_heads(x: tf.Tensor) -> tf.Tensor:
    """Put the heads of [batch, heads, length, size] side by side: [batch, length, heads x size]."""
    _, heads, length, size = x.shape
    return ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, length, heads * size))


class RMSNorm(keras.layers.Layer):
    """Division by the root mean square of the last axis, and a weight for each channel (Zhang and Sennrich, 2019)."""

    def __init__(self, *, epsilon: float, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.epsilon = epsilon

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + self.epsilon) * self.scale


class TiedHead(keras.layers.Layer):
    """Logits as products with the token embeddings: [batch, length, width] to [batch, length, vocabulary].

    The input is multiplied by `scale`, and a bias is added to the logits, where they are asked for.
    """

    def __init__(
        self,
        embedding: keras.layers.Embedding,
        *,
        scale: float | None = None,
        bias: bool = False,
        name: str,
        dtype: str,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.embedding, self.scale, self.use_bias = embedding, scale, bias

    def build(self, _: object) -> None:
        if self.use_bias:
            self.bias = self.add_weight(shape=[self.embedding.input_dim], initializer="zeros", name="bias")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        if self.scale is not None:
            x *= self.scale
        logits = ops.matmul(x, ops.transpose(self.embedding.embeddings))
        return logits + self.bias if self.use_bias else logits
