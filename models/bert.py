"""BERT (Devlin et al., 2018): an encoder that learns masked words, and whether one text follows another."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import keras
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.text import (
    CLASSIFY,
    FIRST_WORD,
    MASK,
    SEPARATOR,
    Corpus,
    count_starts,
    read_corpus,
    words,
)
from dapple_tf.examples.transformer import BlockOptions, SelfAttention, TiedHead, check_heads, cross_entropy, normal

INITIAL_STDDEV = 0.02
EPSILON = 1e-12
MASKED_SHARE = 0.15
"""The share of the tokens that are to be predicted."""


@dataclass(frozen=True)
class Size:
    """Sizes of a BERT; a feed-forward layer has 4 x width units."""

    layers: int
    width: int
    heads: int
    context: int = 512
    vocabulary: int = 30522


SCALES = {
    "48": Size(layers=48, width=1024, heads=16),  # DAPPLE's
    "large": Size(layers=24, width=1024, heads=16),
    "base": Size(layers=12, width=768, heads=12),
    "tiny": Size(layers=2, width=32, heads=2, context=24, vocabulary=200),
}


def bert(
    *,
    scale: str = "48",
    layers: int | None = None,
    context: int | None = None,
    dropout: float = 0.1,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 1e-4,
    corpus: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> dapple.Workload:
    """Return a BERT with its text and its optimizer.

    `scale`: "48" (DAPPLE's BERT-48), "large" (BERT-24), "base" or "tiny"; `layers` and `context` change it.

    The loss takes the five tensors of a batch of `masked_pairs`, and returns a scalar of `dtype`: the mean cross
    entropy of the masked words plus that of the next sentence, in nats.

    Raises ValueError for an unknown scale, or if the corpus is missing, empty or shorter than the context.
    """
    size = choose_size(SCALES, scale, layers=layers, context=context)
    model = build_bert(size, dropout=dropout, dtype=dtype, seed=seed)

    def loss_fn(
        tokens: tf.Tensor, segments: tf.Tensor, positions: tf.Tensor, labels: tf.Tensor, follows: tf.Tensor
    ) -> tf.Tensor:
        word, next_sentence = model([tokens, segments, positions], training=True)
        return cross_entropy(labels, word) + cross_entropy(follows, next_sentence)

    return dapple.Workload(
        loss_fn=loss_fn,
        optimizer=keras.optimizers.Adam(learning_rate),
        dataset=masked_pairs(
            words(read_corpus(corpus), size.vocabulary),
            vocabulary=size.vocabulary,
            context=size.context,
            batch_size=batch_size,
            seed=seed,
        ),
    )


def masked_pairs(corpus: Corpus, *, vocabulary: int, context: int, batch_size: int, seed: int = 0) -> tf.data.Dataset:
    """Return an endless data set of two texts each, with masked words; iterating again gives the same batches again.

    Each element is (tokens, segments, positions, labels, follows), int32: tokens and segments [batch_size, context],
    positions and labels of the masked words [batch_size, 15% of context], follows [batch_size]: 1 if the second text
    follows the first. Of the masked words 80% are MASK, 10% a random word, 10% themselves.

    Raises ValueError if the corpus is shorter than the context.
    """
    first = (context - 3) // 2
    second = context - 3 - first
    starts = count_starts(corpus, context)
    masked = max(1, round(MASKED_SHARE * context))
    data = tf.constant(corpus.data)
    marks = tf.constant([CLASSIFY, SEPARATOR], tf.int32)
    is_mark = tf.constant([1.0] + [0.0] * first + [1.0] + [0.0] * second + [1.0])
    segment = tf.constant([0] * (first + 2) + [1] * (second + 1))

    def cut(begin: tf.Tensor, length: int) -> tf.Tensor:
        return tf.gather(data, begin[:, None] + tf.range(length))

    def make(draws: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def uniform(number: int, shape: list[int], maximum: int) -> tf.Tensor:
            return tf.random.stateless_uniform(shape, draws[:2] + number, maxval=maximum, dtype=tf.int32)

        begin = uniform(0, [batch_size], starts)
        follows = uniform(1, [batch_size], 2)
        second_begin = tf.where(follows == 1, begin + first, uniform(2, [batch_size], starts))
        classify, separator = (tf.fill([batch_size, 1], mark) for mark in tf.unstack(marks))
        tokens = tf.concat([classify, cut(begin, first), separator, cut(second_begin, second), separator], 1)

        ranks = tf.random.stateless_uniform([batch_size, context], draws[:2] + 3) - is_mark
        positions = tf.sort(tf.math.top_k(ranks, masked).indices)
        labels = tf.gather(tokens, positions, batch_dims=1)
        tenth = uniform(4, [batch_size, masked], 10)
        shown = tf.where(tenth == 8, uniform(5, [batch_size, masked], vocabulary - FIRST_WORD) + FIRST_WORD, labels)
        shown = tf.where(tenth < 8, MASK, shown)
        rows = tf.repeat(tf.range(batch_size)[:, None], masked, axis=1)
        tokens = tf.tensor_scatter_nd_update(tokens, tf.stack([rows, positions], 2), shown)
        return tokens, tf.repeat(segment[None], batch_size, axis=0), positions, labels, follows

    draws = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=False)
    return draws.batch(2, drop_remainder=True).map(make).prefetch(2)


def build_bert(size: Size, *, dropout: float, dtype: str, seed: int) -> keras.Model:
    """Build the model: tokens, segments and positions in, logits of the masked words and of the next sentence out.

    The logits are [batch, positions, vocabulary] and [batch, 2], of `dtype`. Layers are named embed, block_0, block_1,
    ..., gather, words and next_sentence. The head of the words is tied to the token embedding.
    """
    check_heads(size.width, size.heads)
    seeds = random.Random(seed)
    options = BlockOptions(
        width=size.width,
        heads=size.heads,
        dropout=dropout,
        causal=False,
        stddev=INITIAL_STDDEV,
        residual_stddev=INITIAL_STDDEV,
        epsilon=EPSILON,
    )
    tokens = keras.Input([size.context], dtype="int32", name="tokens")
    segments = keras.Input([size.context], dtype="int32", name="segments")
    positions = keras.Input([None], dtype="int32", name="positions")
    embed = Embed(size, dropout, seeds, name="embed", dtype=dtype)
    x = embed(tokens, segments)
    for i in range(size.layers):
        x = PostNormBlock(options, seeds, name=f"block_{i}", dtype=dtype)(x)
    masked = GatherPositions(name="gather", dtype=dtype)(x, positions)
    word = MaskedWords(size.width, embed.token, seeds, name="words", dtype=dtype)(masked)
    next_sentence = NextSentence(size.width, seeds, name="next_sentence", dtype=dtype)(x)
    return keras.Model([tokens, segments, positions], [word, next_sentence], name="bert")


class Embed(keras.layers.Layer):
    """Normalized sum of the embeddings of token, segment and position: int32 [batch, context] twice to [.., width]."""

    def __init__(self, size: Size, dropout: float, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.token, self.segment, self.position = (
            keras.layers.Embedding(rows, size.width, normal(seeds, INITIAL_STDDEV), name=part, dtype=dtype)
            for part, rows in (("token", size.vocabulary), ("segment", 2), ("position", size.context))
        )
        self.norm = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm", dtype=dtype)
        self.dropout = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)

    def call(self, tokens: tf.Tensor, segments: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.token(tokens) + self.segment(segments) + self.position(keras.ops.arange(tokens.shape[1]))
        return self.dropout(self.norm(x), training=training)


class PostNormBlock(keras.layers.Layer):
    """Attention, then an MLP, each with a residual connection and then normalized; [batch, context, width]."""

    def __init__(self, options: BlockOptions, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.attention = SelfAttention(options, seeds, name="attention", dtype=dtype)
        self.up = keras.layers.Dense(
            4 * options.width, "gelu", kernel_initializer=normal(seeds, options.stddev), name="up", dtype=dtype
        )
        self.down = keras.layers.Dense(
            options.width, kernel_initializer=normal(seeds, options.residual_stddev), name="down", dtype=dtype
        )
        self.attention_norm, self.mlp_norm = (
            keras.layers.LayerNormalization(epsilon=options.epsilon, name=part, dtype=dtype)
            for part in ("attention_norm", "mlp_norm")
        )
        self.dropout = keras.layers.Dropout(options.dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x), training=training))
        return self.mlp_norm(x + self.dropout(self.down(self.up(x)), training=training))


class GatherPositions(keras.layers.Layer):
    """The vectors at some positions: [batch, context, width] and int32 [batch, positions] to [.., positions, width]."""

    def call(self, x: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        return tf.gather(x, positions, batch_dims=1)


class MaskedWords(keras.layers.Layer):
    """Logits of the words at the masked positions: [batch, positions, width] to [batch, positions, vocabulary]."""

    def __init__(
        self, width: int, embedding: keras.layers.Embedding, seeds: random.Random, *, name: str, dtype: str
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.transform = keras.layers.Dense(
            width, "gelu", kernel_initializer=normal(seeds, INITIAL_STDDEV), name="transform", dtype=dtype
        )
        self.norm = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm", dtype=dtype)
        self.head = TiedHead(embedding, bias=True, name="head", dtype=dtype)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.norm(self.transform(x)))


class NextSentence(keras.layers.Layer):
    """Logits of whether the second text follows the first: [batch, context, width] to [batch, 2]."""

    def __init__(self, width: int, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.pooler = keras.layers.Dense(
            width, "tanh", kernel_initializer=normal(seeds, INITIAL_STDDEV), name="pooler", dtype=dtype
        )
        self.head = keras.layers.Dense(2, kernel_initializer=normal(seeds, INITIAL_STDDEV), name="head", dtype=dtype)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.head(self.pooler(x[:, 0]))
