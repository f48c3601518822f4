"""Loops, gates, orders of the batch and mixed dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    batches,
    cross_entropy,
    integers,
    mlp,
    normal,
    padded_tokens,
    probabilities,
    train,
)
from benchmarks.exactness_cases.case import SINGLE_PRECISION, Case, Training, refused_and_exact

CLASSES = 3


def matrix(name: str, seed: int, *shape: int) -> Any:
    value = np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5
    return tf.Variable(tf.constant(value, keras.config.floatx()), name=name)


# --- loops


def while_rnn(seed: int) -> Training:
    """A recurrent cell in tf.while_loop, up to the longest sequence of the batch."""
    embed = keras.layers.Embedding(VOCABULARY, WIDTH)
    embed.build(())
    inner, outer, head = (
        matrix(name, seed + i, WIDTH, size)
        for i, (name, size) in enumerate({"inner": WIDTH, "outer": WIDTH, "head": CLASSES}.items())
    )

    @tf.function
    def loss_fn(ids: Any, y: Any) -> Any:
        x = embed(ids)
        longest = tf.reduce_max(tf.reduce_sum(tf.cast(ids != 0, tf.int32), 1))

        def body(i: Any, state: Any) -> Any:
            return i + 1, tf.tanh(tf.gather(x, i, axis=1) @ inner + state @ outer)

        _, state = tf.while_loop(lambda i, _: i < longest, body, [0, tf.zeros_like(x[:, 0])])
        return tf.reduce_mean(cross_entropy(y, state @ head))

    return train(embed, loss_fn, batches(seed, padded_tokens(), integers(CLASSES)), extra=[inner, outer, head])


def autograph_loop(seed: int) -> Training:
    """A Python loop over tf.range: the same layer several times."""
    model, head = keras.layers.Dense(FEATURES, "tanh"), mlp(CLASSES)
    model.build((None, FEATURES))

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        for _ in tf.range(3):
            x = x + model(x)
        return tf.reduce_mean(cross_entropy(y, head(x)))

    return train(head, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)), extra=model.trainable_variables)


def accumulated_in_time(seed: int) -> Training:
    """Sums along time: hazards of survival analysis."""
    model = mlp(LENGTH)

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        hazards = tf.math.softplus(model(x))
        survival = tf.exp(-tf.cumsum(hazards, 1))
        return tf.reduce_mean(tf.square(survival - tf.cumsum(y, 1, reverse=True)))

    return train(model, loss_fn, batches(seed, normal(FEATURES), probabilities(LENGTH)))


# --- mixtures of experts


def experts(balance: str) -> Callable[[int], Training]:
    """Return the ``make`` of a mixture of experts; ``balance``: none, of each row, or over the batch (Switch)."""

    def make(seed: int) -> Training:
        gate, *parts, head = [*(mlp(size, layers=1) for size in (4, *[WIDTH] * 4)), mlp(CLASSES, features=WIDTH)]

        @tf.function
        def loss_fn(x: Any, y: Any) -> Any:
            shares = tf.nn.softmax(gate(x))
            top = tf.one_hot(tf.argmax(shares, 1), 4, dtype=x.dtype)
            mixed = tf.reduce_sum(tf.stack([part(x) for part in parts], 1) * (top * shares)[:, :, None], 1)
            loss = tf.reduce_mean(cross_entropy(y, head(mixed)))
            if balance == "rows":
                loss += 0.1 * tf.reduce_mean(tf.square(tf.reduce_logsumexp(gate(x), 1)))
            if balance == "batch":
                loss += 0.1 * 4.0 * tf.reduce_sum(tf.reduce_mean(top, 0) * tf.reduce_mean(shares, 0))
            return loss

        extra = [variable for model in (*parts, head) for variable in model.trainable_variables]
        return train(gate, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)), extra=extra)

    return make


# --- orders of the batch


def mixed_up(partner: Callable[[Any, int], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of mixup: every sample is mixed with the row that ``partner(tensor, seed)`` puts there."""

    def make(seed: int) -> Training:
        model = mlp(CLASSES)

        @tf.function
        def loss_fn(x: Any, y: Any) -> Any:
            x, y = 0.7 * x + 0.3 * partner(x, seed), 0.7 * y + 0.3 * partner(y, seed)
            return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, model(x)))

        return train(model, loss_fn, batches(seed, normal(FEATURES), probabilities(CLASSES)))

    return make


def shuffled(x: Any, seed: int) -> Any:
    return tf.gather(x, tf.random.experimental.stateless_shuffle(tf.range(tf.shape(x)[0]), [seed, 1]))


def halves(seed: int) -> Training:
    """The first half of the batch against the second."""
    model = mlp(CLASSES)

    @tf.function
    def loss_fn(x: Any) -> Any:
        z = model(x)
        half = tf.shape(z)[0] // 2
        return tf.reduce_mean(tf.square(z[:half] - z[half : 2 * half] - 1.0))

    return train(model, loss_fn, batches(seed, normal(FEATURES)))


def first_sample(seed: int) -> Training:
    """Only the first samples of the batch have a loss."""
    model = mlp(CLASSES)

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        losses = cross_entropy(y, model(x))
        return tf.reduce_mean(losses[:3])

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


# --- dtypes


def features_of_several_kinds(seed: int) -> Training:
    """Integers, booleans and bytes beside floats."""
    embed, model = keras.layers.Embedding(VOCABULARY, 3), mlp(CLASSES, features=FEATURES + 7)
    embed.build(())

    @tf.function
    def loss_fn(x: Any, ids: Any, flags: Any, pixels: Any, y: Any) -> Any:
        scaled = tf.cast(pixels, x.dtype) / 255.0
        parts = [x, embed(ids), tf.cast(flags, x.dtype), scaled]
        weight = tf.where(flags[:, 0], 2.0 * tf.ones_like(x[:, 0]), tf.ones_like(x[:, 0]))
        return tf.reduce_sum(weight * cross_entropy(y, model(tf.concat(parts, 1)))) / tf.reduce_sum(weight)

    def flags(generator: Any) -> Any:
        return tf.constant(generator.integers(0, 2, (ROWS, 2)), tf.bool)

    def pixels(generator: Any) -> Any:
        return tf.constant(generator.integers(0, 256, (ROWS, 2)), tf.uint8)

    data = batches(seed, normal(FEATURES), integers(VOCABULARY), flags, pixels, integers(CLASSES))
    return train(model, loss_fn, data, extra=embed.trainable_variables)


def part_in_single_precision(seed: int) -> Training:
    """The second half of the model computes in float32, and counts there."""
    first = mlp(WIDTH, layers=2)
    second = keras.Sequential(
        [keras.Input((WIDTH,)), *(keras.layers.Dense(size, dtype="float32") for size in (WIDTH, CLASSES))]
    )

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        keep = tf.cast(y > 0, tf.float32)
        losses = cross_entropy(y, second(tf.cast(first(x), tf.float32)))
        return tf.reduce_sum(losses * keep) / tf.reduce_sum(keep)

    data = batches(seed, normal(FEATURES), integers(CLASSES))
    return train(first, loss_fn, data, extra=second.trainable_variables)


CASES = (
    Case("while_loop_rnn", "control flow", while_rnn),
    Case("autograph_loop", "control flow", autograph_loop),
    Case("cumulative_sum_in_time", "control flow", accumulated_in_time),
    Case("experts", "control flow", experts("none")),
    Case("experts_balanced_by_rows", "control flow", experts("rows")),
    *refused_and_exact("experts_balanced_over_batch", "control flow", experts("batch")),
    Case("mixup_reversed", "batch order", mixed_up(lambda x, _: tf.reverse(x, [0]))),
    Case("mixup_rolled", "batch order", mixed_up(lambda x, _: tf.roll(x, 1, 0))),
    Case("mixup_shuffled", "batch order", mixed_up(shuffled)),
    *refused_and_exact("halves_compared", "batch order", halves),
    *refused_and_exact("first_samples", "batch order", first_sample),
    Case("features_of_several_kinds", "dtypes", features_of_several_kinds),
    Case("part_in_single_precision", "dtypes", part_in_single_precision, tolerance=SINGLE_PRECISION),
)
