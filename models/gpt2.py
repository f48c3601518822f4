"""GPT-2 (Radford et al., 2019), at its published sizes and those of the pipeline papers, on text of words."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import keras

import dapple_tf as dapple
from dapple_tf.examples.gpt import Embed
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.text import read_corpus, text_workload, words
from dapple_tf.examples.transformer import BlockOptions, TiedHead, add_blocks, check_heads

INITIAL_STDDEV = 0.02
EPSILON = 1e-5


@dataclass(frozen=True)
class Size:
    """Sizes of a GPT-2; a feed-forward layer has 4 x width units."""

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50257


SCALES = {
    "345m": Size(layers=24, width=1024, heads=16),
    "124m": Size(layers=12, width=768, heads=12),
    "762m": Size(layers=36, width=1280, heads=20),
    "1.3b": Size(layers=24, width=2048, heads=16),  # AutoPipe's and Megatron's, not one of GPT-2's paper
    "1.5b": Size(layers=48, width=1600, heads=25),
    "tiny": Size(layers=2, width=32, heads=2, context=16, vocabulary=200),
}


def gpt2(
    *,
    scale: str = "345m",
    layers: int | None = None,
    context: int | None = None,
    dropout: float = 0.1,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 1e-4,
    corpus: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> dapple.Workload:
    """Return a GPT-2 with its text and its optimizer.

    `scale`: "345m", "124m", "762m", "1.3b", "1.5b" or "tiny"; `layers` and `context` change it.

    The loss takes x and y, int32 [batch, context], and returns a scalar of `dtype`: the mean cross entropy in nats
    over all batch x context positions.

    Raises ValueError for an unknown scale, or if the corpus is missing, empty or shorter than the context.
    """
    size = choose_size(SCALES, scale, layers=layers, context=context)
    model = build_gpt2(size, dropout=dropout, dtype=dtype, seed=seed)
    return text_workload(
        model,
        keras.optimizers.AdamW(learning_rate, weight_decay=0.01),
        words(read_corpus(corpus), size.vocabulary),
        context=size.context,
        batch_size=batch_size,
        seed=seed,
    )


def build_gpt2(size: Size, *, dropout: float, dtype: str, seed: int) -> keras.Model:
    """Build the model: int32 [batch, context] in, logits [batch, context, vocabulary] of `dtype` out.

    Its layers are named embed, dropout, block_0, block_1, ..., norm and head, which is tied to the token embedding.
    """
    check_heads(size.width, size.heads)
    seeds = random.Random(seed)
    options = BlockOptions(
        width=size.width,
        heads=size.heads,
        dropout=dropout,
        causal=True,
        stddev=INITIAL_STDDEV,
        residual_stddev=INITIAL_STDDEV / (2 * size.layers) ** 0.5,
        epsilon=EPSILON,
    )
    tokens = keras.Input([size.context], dtype="int32", name="tokens")
    embed = Embed(size.vocabulary, size.width, size.context, INITIAL_STDDEV, seeds, name="embed", dtype=dtype)
    x = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)(embed(tokens))
    x = add_blocks(x, size.layers, options, seeds, dtype=dtype)
    logits = TiedHead(embed.token, name="head", dtype=dtype)(x)
    return keras.Model(tokens, logits, name="gpt2")
