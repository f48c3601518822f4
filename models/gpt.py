"""A byte-level GPT: a decoder-only transformer that learns to predict the next byte of a text."""

from __future__ import annotations

import os
import random

import keras
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.text import BYTE_VALUES, read_corpus, text_workload
from dapple_tf.examples.transformer import BlockOptions, TiedHead, add_blocks, check_heads, normal

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
    return text_workload(
        model,
        keras.optimizers.Adam(learning_rate),
        read_corpus(corpus),
        context=context,
        batch_size=batch_size,
        seed=seed,
    )


def build_gpt(
    *, layers: int, width: int, heads: int, context: int, dropout: float, tied: bool, dtype: str, seed: int
) -> keras.Model:
    """Build the model: int32 [batch, context] in, logits [batch, context, 256] of `dtype` out.

    Its layers are named embed, block_0, block_1, ..., norm and head. With `tied` the head is the transpose of
    the token embedding and has no variable of its own.
    """
    check_heads(width, heads)
    seeds = random.Random(seed)
    options = BlockOptions(
        width=width,
        heads=heads,
        dropout=dropout,
        causal=True,
        stddev=INITIAL_STDDEV,
        # Each block adds two terms to the residual stream; scaled so, its variance at the top is the same at any depth.
        residual_stddev=INITIAL_STDDEV / (2 * layers) ** 0.5,
    )

    tokens = keras.Input([context], dtype="int32", name="tokens")
    embed = Embed(BYTE_VALUES, width, context, INITIAL_STDDEV, seeds, name="embed", dtype=dtype)
    x = add_blocks(embed(tokens), layers, options, seeds, dtype=dtype)
    if tied:
        logits = TiedHead(embed.token, name="head", dtype=dtype)(x)
    else:
        logits = keras.layers.Dense(
            BYTE_VALUES, use_bias=False, kernel_initializer=normal(seeds, INITIAL_STDDEV), name="head", dtype=dtype
        )(x)
    return keras.Model(tokens, logits, name="gpt")


class Embed(keras.layers.Layer):
    """Sum of the embeddings of each token and its position: int32 [batch, context] to [batch, context, width]."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        context: int,
        stddev: float,
        seeds: random.Random,
        *,
        name: str,
        dtype: str,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.token = keras.layers.Embedding(vocabulary, width, normal(seeds, stddev), name="token", dtype=dtype)
        self.position = keras.layers.Embedding(context, width, normal(seeds, stddev), name="position", dtype=dtype)

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        return self.token(tokens) + self.position(ops.arange(tokens.shape[1]))
