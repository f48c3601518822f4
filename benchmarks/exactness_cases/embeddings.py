"""Embeddings with repeated ids under every optimizer, and options of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    batches,
    cross_entropy,
    integers,
    mask,
    mlp,
    normal,
    train,
)
from benchmarks.exactness_cases.case import Case, Training

CLASSES = 3
FEW = 4
"""Ids in batches: every id occurs many times in a batch, and most rows of the table not at all."""


def repeated_ids(make_optimizer: Callable[[], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a classifier of bags of repeated ids."""

    def make(seed: int) -> Training:
        x = entry = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(VOCABULARY, WIDTH)(x)
        x = keras.layers.Flatten()(x)
        for _ in range(2):
            x = keras.layers.Dense(WIDTH, "tanh")(x)
        model = keras.Model(entry, keras.layers.Dense(CLASSES)(x))
        loss_fn = tf.function(lambda x, y: tf.reduce_mean(cross_entropy(y, model(x))))
        return train(model, loss_fn, batches(seed, integers(FEW, LENGTH), integers(CLASSES)), make_optimizer())

    return make


def dense_only(make_optimizer: Callable[[], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a classifier without embeddings."""

    def make(seed: int) -> Training:
        model = mlp(CLASSES)
        loss_fn = tf.function(lambda x, y: tf.reduce_mean(cross_entropy(y, model(x))))
        return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)), make_optimizer())

    return make


def masked_loss(seed: int) -> Training:
    """Repeated ids, Adam, and a loss over the tokens that count."""
    x = entry = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(x)
    x = keras.layers.Dense(WIDTH, "tanh")(x)
    model = keras.Model(entry, keras.layers.Dense(VOCABULARY)(x))

    @tf.function
    def loss_fn(x: Any, y: Any, keep: Any) -> Any:
        return tf.reduce_sum(cross_entropy(y, model(x)) * keep) / tf.reduce_sum(keep)

    data = batches(seed, integers(FEW, LENGTH), integers(VOCABULARY, LENGTH), mask(LENGTH))
    return train(model, loss_fn, data, adam())


def tied(seed: int) -> Training:
    """The table is the head's matrix too: it has a sparse and a dense use."""
    embed = keras.layers.Embedding(VOCABULARY, WIDTH)
    embed.build(())
    middle = mlp(WIDTH, features=WIDTH, layers=2)

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        found = middle(tf.reduce_mean(embed(x), 1))
        return tf.reduce_mean(cross_entropy(y, tf.matmul(found, embed.embeddings, transpose_b=True)))

    data = batches(seed, integers(FEW, LENGTH), integers(VOCABULARY))
    return train(embed, loss_fn, data, adam(), extra=middle.trainable_variables)


def looked_up_twice(seed: int) -> Training:
    """One table for users and items, gathered in two places."""
    table = tf.Variable(tf.random.stateless_normal((VOCABULARY, WIDTH), [seed, 1], dtype=keras.config.floatx()))
    middle = mlp(WIDTH, features=WIDTH, layers=2)

    @tf.function
    def loss_fn(user: Any, item: Any, y: Any) -> Any:
        score = tf.reduce_sum(middle(tf.gather(table, user)) * tf.nn.embedding_lookup(table, item), 1)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(y, score.dtype), score))

    data = batches(seed, integers(FEW), integers(FEW, low=2), integers(2))
    return train(middle, loss_fn, data, adam(), extra=[table])


def two_tables(seed: int) -> Training:
    """Features of several kinds, each with its table, and a norm over all gradients."""
    entries = [keras.Input((), dtype="int32") for _ in range(2)]
    found = [keras.layers.Embedding(VOCABULARY, WIDTH)(entry) for entry in entries]
    x = keras.layers.Concatenate()(found)
    for _ in range(2):
        x = keras.layers.Dense(WIDTH, "tanh")(x)
    model = keras.Model(entries, keras.layers.Dense(CLASSES)(x))
    loss_fn = tf.function(lambda a, b, y: tf.reduce_mean(cross_entropy(y, model([a, b]))))
    data = batches(seed, integers(FEW), integers(2), integers(CLASSES))
    return train(model, loss_fn, data, keras.optimizers.Adam(0.01, epsilon=1e-4, global_clipnorm=0.1))


def positions(seed: int) -> Training:
    """A table of positions that every sample gathers whole."""
    embed = keras.layers.Embedding(LENGTH, WIDTH)
    embed.build(())
    model = mlp(CLASSES, features=WIDTH)

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(cross_entropy(y, model(tf.reduce_mean(x * embed(tf.range(LENGTH)), 1))))

    data = batches(seed, normal(LENGTH, WIDTH), integers(CLASSES))
    return train(model, loss_fn, data, adam(), extra=embed.trainable_variables)


def adam() -> Any:
    return keras.optimizers.Adam(0.01, epsilon=1e-4)


def decayed_sgd() -> Any:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10, warmup_steps=2, warmup_target=0.2)
    return keras.optimizers.SGD(schedule, momentum=0.9)


# Divisors epsilon keep rounding errors of gradients near zero from becoming updates.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": adam,
    "amsgrad": lambda: keras.optimizers.Adam(0.01, epsilon=1e-4, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-4, weight_decay=0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, epsilon=1e-4),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-4, momentum=0.5, centered=True),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0, epsilon=1e-4),
    "adamax": lambda: keras.optimizers.Adamax(0.01, epsilon=1e-4),
    "nadam": lambda: keras.optimizers.Nadam(0.01, epsilon=1e-4),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=1e-3),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "adam_clipnorm": lambda: keras.optimizers.Adam(0.01, epsilon=1e-4, clipnorm=0.05),
    "weight_decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.05),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "schedule": decayed_sgd,
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}

CASES = (
    *(Case(f"repeated_ids_{name}", "embeddings", repeated_ids(make)) for name, make in OPTIMIZERS.items()),
    *(
        Case(f"dense_{name}", "embeddings", dense_only(OPTIMIZERS[name]))
        for name in ("adamw", "clipnorm", "clipvalue", "global_clipnorm", "ema", "schedule", "accumulation")
    ),
    Case("repeated_ids_masked_loss", "embeddings", masked_loss),
    Case("embedding_tied_to_head", "embeddings", tied),
    Case("embedding_looked_up_twice", "embeddings", looked_up_twice),
    Case("embeddings_of_two_features", "embeddings", two_tables),
    Case("embedding_of_positions", "embeddings", positions),
)
