"""XLNet (Yang et al., 2019): predicts words in a random order, by two-stream attention with relative positions."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.text import Corpus, count_starts, read_corpus, words
from dapple_tf.examples.transformer import (
    HIDDEN,
    TiedHead,
    attend,
    check_heads,
    cross_entropy,
    dense,
    normal,
    split_heads,
)

INITIAL_STDDEV = 0.02
EPSILON = 1e-12
PREDICTED_SHARE = 1 / 6
"""The share of the words that are predicted: the last ones of the random order."""


@dataclass(frozen=True)
class Size:
    """Sizes of an XLNet; a feed-forward layer has 4 x width units."""

    layers: int
    width: int
    heads: int
    context: int = 512
    vocabulary: int = 32_000


SCALES = {
    "36": Size(layers=36, width=1024, heads=16),  # DAPPLE's
    "tiny": Size(layers=2, width=32, heads=2, context=18, vocabulary=200),
}


def xlnet(
    *,
    scale: str = "36",
    layers: int | None = None,
    context: int | None = None,
    dropout: float = 0.1,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 1e-4,
    corpus: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> dapple.Workload:
    """Return an XLNet with its text and its optimizer.

    `scale`: "36" (DAPPLE's XLNet-36) or "tiny"; `layers` and `context` change it.

    The loss takes the four tensors of a batch of `permuted_windows`, and returns a scalar of `dtype`: the mean cross
    entropy of the predicted words, in nats.

    Raises ValueError for an unknown scale, or if the corpus is missing, empty or shorter than the context.
    """
    size = choose_size(SCALES, scale, layers=layers, context=context)
    model = build_xlnet(size, dropout=dropout, dtype=dtype, seed=seed)

    def loss_fn(tokens: tf.Tensor, order: tf.Tensor, positions: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        logits = model([tokens, order, positions], training=True)
        return cross_entropy(labels, logits)

    return dapple.Workload(
        loss_fn=loss_fn,
        optimizer=keras.optimizers.Adam(learning_rate),
        dataset=permuted_windows(
            words(read_corpus(corpus), size.vocabulary), context=size.context, batch_size=batch_size, seed=seed
        ),
    )


def permuted_windows(corpus: Corpus, *, context: int, batch_size: int, seed: int = 0) -> tf.data.Dataset:
    """Return an endless data set of windows with a random order of their words; iterating again gives the same again.

    Each element is (tokens, order, positions, labels), int32: tokens and order [batch_size, context], where a word may
    see those of lower order; positions and labels of the predicted words [batch_size, context / 6].

    Raises ValueError if the corpus is shorter than the context.
    """
    starts = count_starts(corpus, context)
    predicted = max(1, round(PREDICTED_SHARE * context))
    data = tf.constant(corpus.data)

    def make(draws: tf.Tensor) -> tuple[tf.Tensor, ...]:
        begin = tf.random.stateless_uniform([batch_size, 1], draws, maxval=starts, dtype=tf.int32)
        tokens = tf.gather(data, begin + tf.range(context))
        permutation = tf.argsort(tf.random.stateless_uniform([batch_size, context], draws + 1))
        order = tf.argsort(permutation)  # of each position, its place in the permutation
        positions = tf.sort(permutation[:, context - predicted :])
        return tokens, order, positions, tf.gather(tokens, positions, batch_dims=1)

    draws = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=False)
    return draws.batch(2, drop_remainder=True).map(make).prefetch(2)


def build_xlnet(size: Size, *, dropout: float, dtype: str, seed: int) -> keras.Model:
    """Build the model: tokens, order and positions in, logits [batch, positions, vocabulary] of `dtype` out.

    Layers are named embed, query, masks, distances, block_0, block_1, ... and head, which is tied to the embedding.
    """
    check_heads(size.width, size.heads)
    seeds = random.Random(seed)
    tokens = keras.Input([size.context], dtype="int32", name="tokens")
    order = keras.Input([size.context], dtype="int32", name="order")
    positions = keras.Input([None], dtype="int32", name="positions")

    def drop(x: tf.Tensor, name: str) -> tf.Tensor:
        return keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name=name, dtype=dtype)(x)

    embed = keras.layers.Embedding(
        size.vocabulary, size.width, normal(seeds, INITIAL_STDDEV), name="embed", dtype=dtype
    )
    content = drop(embed(tokens), "embed_dropout")
    query = drop(QueryStart(size.width, seeds, name="query", dtype=dtype)(positions), "query_dropout")
    masks = Masks(size.context, name="masks", dtype=dtype)(order, positions)
    distances = Distances(size, name="distances", dtype=dtype)(tokens)
    for i in range(size.layers):
        block = TwoStreamBlock(size, dropout, seeds, name=f"block_{i}", dtype=dtype)
        content, query = block(content, query, distances, *masks)
    logits = TiedHead(embed, bias=True, name="head", dtype=dtype)(drop(query, "head_dropout"))
    return keras.Model([tokens, order, positions], logits, name="xlnet")


class QueryStart(keras.layers.Layer):
    """The first vectors of the query stream, all equal: int32 [batch, positions] to [batch, positions, width]."""

    def __init__(self, width: int, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.width, self.initializer = width, normal(seeds, INITIAL_STDDEV)

    def build(self, _: object) -> None:
        self.vector = self.add_weight(shape=[self.width], initializer=self.initializer, name="vector")

    def call(self, positions: tf.Tensor) -> tf.Tensor:
        return ops.zeros_like(positions, dtype=self.compute_dtype)[:, :, None] + self.vector


class Masks(keras.layers.Layer):
    """Make the attention masks of both streams and the positions of the queries, from order and positions.

    Two biases [batch, 1, context, context] for attention: the content of a position sees itself and those of lower
    order, its query only those of lower order. Then 0/1 [batch, positions, context]: 1 where a query stands.
    """

    def __init__(self, context: int, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.context = context

    def call(self, order: tf.Tensor, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        of_query, of_key = order[:, None, :, None], order[:, None, None, :]
        content, query = (
            ops.cast(hidden, self.compute_dtype) * HIDDEN for hidden in (of_key > of_query, of_key >= of_query)
        )
        return content, query, ops.one_hot(positions, self.context, dtype=self.compute_dtype)


class Distances(keras.layers.Layer):
    """Sinusoids of the distances context, context - 1, ..., 1 - context: [2 x context, width], for all samples."""

    def __init__(self, size: Size, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.size = size

    def call(self, _: tf.Tensor) -> tf.Tensor:
        distances = ops.arange(self.size.context, -self.size.context, -1, dtype=self.compute_dtype)
        frequencies = 10_000.0 ** -(np.arange(0, self.size.width, 2) / self.size.width)
        angles = distances[:, None] * ops.cast(frequencies, self.compute_dtype)
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


class TwoStreamBlock(keras.layers.Layer):
    """Attention, then an MLP, with the same weights for both streams, each added to its input and normalized.

    content: [batch, context, width]; query: [batch, positions, width]; both are returned.
    """

    def __init__(self, size: Size, dropout: float, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.attention = RelativeAttention(size, seeds, name="attention", dtype=dtype)
        self.up, self.down = (
            keras.layers.Dense(
                units, activation, kernel_initializer=normal(seeds, INITIAL_STDDEV), name=part, dtype=dtype
            )
            for part, units, activation in (("up", 4 * size.width, "gelu"), ("down", size.width, None))
        )
        self.attention_norm, self.mlp_norm = (
            keras.layers.LayerNormalization(epsilon=EPSILON, name=part, dtype=dtype)
            for part in ("attention_norm", "mlp_norm")
        )
        self.dropout = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)

    def call(
        self,
        content: tf.Tensor,
        query: tf.Tensor,
        distances: tf.Tensor,
        content_bias: tf.Tensor,
        query_bias: tf.Tensor,
        places: tf.Tensor,
        training: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        attended = self.attention(content, query, distances, content_bias, query_bias, places)
        streams = []
        for x, change in zip((content, query), attended, strict=True):
            x = self.attention_norm(x + self.dropout(change, training=training))
            streams.append(self.mlp_norm(x + self.dropout(self.down(self.up(x)), training=training)))
        return streams[0], streams[1]


class RelativeAttention(keras.layers.Layer):
    """Attention of both streams to the content, by content and by distance (Dai et al., 2019, section 3.3)."""

    def __init__(self, size: Size, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.size = size
        self.q, self.k, self.v, self.distance, self.out = (
            dense(size.width, INITIAL_STDDEV, seeds, name=part, dtype=dtype)
            for part in ("q", "k", "v", "distance", "out")
        )
        self.initializers = [normal(seeds, INITIAL_STDDEV) for _ in range(2)]

    def build(self, *_: object) -> None:
        shape = [self.size.heads, 1, self.size.width // self.size.heads]
        self.content_bias, self.distance_bias = (
            self.add_weight(shape=shape, initializer=initializer, name=name)
            for name, initializer in zip(("content_bias", "distance_bias"), self.initializers, strict=True)
        )

    def call(
        self,
        content: tf.Tensor,
        query: tf.Tensor,
        distances: tf.Tensor,
        content_bias: tf.Tensor,
        query_bias: tf.Tensor,
        places: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        heads = self.size.heads
        k, v = (split_heads(layer(content), heads) for layer in (self.k, self.v))
        by_distance = split_heads(self.distance(distances)[None], heads)[0]  # [heads, 2 x context, size]

        def mix(q: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
            """Return [batch, context, width] from queries [batch, heads, context, size]."""
            scale = q.shape[-1] ** -0.5
            scores = ops.einsum("bhqs,hds->bhqd", (q + self.distance_bias) * scale, by_distance)
            return attend((q + self.content_bias) * scale, k, v, take_distances(scores) + bias)

        # The weights of distances are rows for every position, so a query is put at its place, and taken from there.
        q = ops.einsum("bpc,bphs->bhcs", places, self._by_head(self.q(query)))
        of_query = ops.einsum("bpc,bcw->bpw", places, mix(q, query_bias))
        return self.out(mix(split_heads(self.q(content), heads), content_bias)), self.out(of_query)

    def _by_head(self, x: tf.Tensor) -> tf.Tensor:
        return ops.reshape(x, (-1, ops.shape(x)[1], self.size.heads, self.size.width // self.size.heads))


def take_distances(scores: tf.Tensor) -> tf.Tensor:
    """Return, for query i and key j, the score of distance i - j: [..., n, 2 n] to [..., n, n].

    Column c of the scores is for distance n - c. So row i of the result begins at column n - i: without the first n
    entries, and as rows of 2 n - 1 instead of 2 n, the entries that are wanted stand below each other.
    """
    _, heads, n, columns = scores.shape
    rows = ops.reshape(scores, (-1, heads, columns, n))[:, :, 1:]
    return ops.reshape(rows, (-1, heads, n, columns - 1))[..., :n]
