"""A decoder with a mixture of experts: each token goes to a few of many feed-forward layers."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass

import keras
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.llama import INITIAL_STDDEV, build_decoder, decoder_workload
from dapple_tf.examples.llama import Size as LlamaSize
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.transformer import dense, normal

BALANCE_WEIGHT = 0.02
"""The weight of the balance loss."""


@dataclass(frozen=True)
class Size(LlamaSize):
    """Sizes of a Llama whose feed-forward layers are `experts`, of which each token is sent to `chosen`.

    In each sample an expert has room for capacity x chosen x context / experts tokens, rounded up.
    """

    experts: int = 8
    chosen: int = 2
    capacity: float = 1.25


SCALES = {
    "8x7b": Size(32, 4096, 32, 8, 14336, context=4096, vocabulary=32_000, rotary_base=1e6),  # Mixtral's
    "tiny": Size(2, 32, 4, 2, 48, context=16, vocabulary=200, experts=4),
}


def moe(
    *,
    scale: str = "8x7b",
    layers: int | None = None,
    context: int | None = None,
    experts: int | None = None,
    balance: str = "sample",
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 3e-4,
    corpus: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> dapple.Workload:
    """Return a decoder with a mixture of experts, its text and its optimizer.

    `scale`: "8x7b" (the sizes of Mixtral, Jiang et al., 2024) or "tiny"; `layers`, `context` and `experts` change it.
    `balance`: "sample" computes the balance loss of each sample and takes the mean, as GShard does for its groups
    (Lepikhin et al., 2020, algorithm 1). "batch" computes it from the routing of the whole batch, which is no mean over
    samples: a pipeline then needs `batch_loss=True`.

    The loss takes x and y, int32 [batch, context], and returns a scalar of `dtype`: the mean cross entropy in nats
    over all batch x context positions, plus BALANCE_WEIGHT times the balance loss of each layer.

    Raises ValueError for an unknown scale or balance, or if the corpus is missing, empty or shorter than the context.
    """
    size = choose_size(SCALES, scale, layers=layers, context=context, experts=experts)
    model = build_moe(size, balance=balance, dtype=dtype, seed=seed)
    return decoder_workload(model, size, learning_rate, corpus=corpus, batch_size=batch_size, seed=seed)


def build_moe(size: Size, *, balance: str, dtype: str, seed: int) -> keras.Model:
    """Build the model: int32 [batch, context] in, logits [batch, context, vocabulary] of `dtype` out.

    Its layers are named embed, block_0, block_1, ..., norm and head. `model.losses` has a balance loss of each block.
    """
    if balance not in ("sample", "batch"):
        raise ValueError(f"there is no balance {balance!r}: choose one of sample, batch")
    if size.chosen > size.experts:
        raise ValueError(f"{size.chosen} of {size.experts} experts cannot be chosen: use more experts")

    def make_mlp(seeds: random.Random) -> keras.layers.Layer:
        return Experts(size, balance, seeds, name="experts", dtype=dtype)

    return build_decoder(size, make_mlp, name="moe", dtype=dtype, seed=seed)


class Experts(keras.layers.Layer):
    """SwiGLU experts; each token goes to those that its router rates highest; [batch, context, width].

    Tokens are dispatched by products with 0/1 tensors (Lepikhin et al., 2020). Each sample has room of its own at every
    expert, so which tokens find no room does not depend on the other samples. The residual connection carries those.
    """

    def __init__(self, size: Size, balance: str, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.size, self.balance = size, balance
        self.room = math.ceil(size.capacity * size.chosen * size.context / size.experts)
        self.router = dense(size.experts, INITIAL_STDDEV, seeds, name="router", dtype=dtype)
        self.initializers = [normal(seeds, INITIAL_STDDEV) for _ in range(3)]

    def build(self, _: object) -> None:
        inward = [self.size.experts, self.size.width, self.size.hidden]
        outward = [self.size.experts, self.size.hidden, self.size.width]
        self.gate, self.up, self.down = (
            self.add_weight(shape=shape, initializer=initializer, name=name)
            for name, shape, initializer in zip(
                ("gate", "up", "down"), (inward, inward, outward), self.initializers, strict=True
            )
        )

    def call(self, x: tf.Tensor) -> tf.Tensor:
        ratings = ops.softmax(self.router(x))  # [batch, context, experts]
        dispatch, combine, load = self._route(ratings)
        self.add_loss(BALANCE_WEIGHT * self._imbalance(ratings, load))

        inputs = ops.einsum("bser,bsw->berw", dispatch, x)  # r: a place at an expert
        hidden = ops.silu(ops.einsum("berw,ewh->berh", inputs, self.gate))
        hidden *= ops.einsum("berw,ewh->berh", inputs, self.up)
        return ops.einsum("bser,berw->bsw", combine, ops.einsum("berh,ehw->berw", hidden, self.down))

    def _route(self, ratings: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return where tokens go, with which weight they return, and the share of the tokens that each expert gets.

        The first two are [batch, context, experts, room], the last one [batch, experts].
        """
        context, experts, chosen = self.size.context, self.size.experts, self.size.chosen
        weights, numbers = ops.top_k(ratings, chosen)  # each [batch, context, chosen]
        weights /= ops.sum(weights, axis=-1, keepdims=True)
        # All first choices come before all second ones: [batch, chosen x context, experts].
        choices = ops.one_hot(ops.transpose(numbers, (0, 2, 1)), experts, dtype="int32")
        queue = ops.reshape(choices, (-1, chosen * context, experts))
        places = ops.sum((ops.cumsum(queue, axis=1) - queue) * queue, axis=-1)
        places = ops.one_hot(places, self.room, dtype=self.compute_dtype)  # zeros where there is no room
        places = ops.reshape(places, (-1, chosen, context, self.room))
        choices = ops.cast(choices, self.compute_dtype)
        dispatch = ops.einsum("bkse,bksr->bser", choices, places)
        combine = ops.einsum("bkse,bksr,bsk->bser", choices, places, weights)
        return dispatch, combine, ops.mean(ops.cast(queue, self.compute_dtype), axis=1)

    def _imbalance(self, ratings: tf.Tensor, load: tf.Tensor) -> tf.Tensor:
        """Return a scalar: 1 if all experts get as many tokens and as high ratings, and more otherwise."""
        rating = ops.mean(ratings, axis=1)  # [batch, experts]
        if self.balance == "batch":
            rating, load = ops.mean(rating, axis=0, keepdims=True), ops.mean(load, axis=0, keepdims=True)
        return self.size.experts * ops.mean(ops.sum(load * rating, axis=-1))
