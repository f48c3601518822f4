"""Small models and batches that many cases share. Models are Keras models, which can be cut into four stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.exactness_cases.case import Training

ROWS = 16
"""Samples of every batch."""

STEPS = 3
"""Batches of every case."""

FEATURES, WIDTH = 6, 8
VOCABULARY, LENGTH = 11, 5

Column = Callable[[np.random.Generator], Any]


def cross_entropy(y: Any, logits: Any) -> Any:
    """Return the cross entropy of each row of labels and logits."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)


# --- batches


def batches(seed: int, *columns: Column) -> list[tuple[Any, ...]]:
    """Return the batches of a case: each column draws one tensor of each batch."""
    generator = np.random.default_rng(seed)
    return [tuple(column(generator) for column in columns) for _ in range(STEPS)]


def normal(*shape: int) -> Column:
    """Draw floats [batch, *shape]."""
    return lambda generator: tf.constant(generator.normal(size=(ROWS, *shape)), keras.config.floatx())


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Column:
    """Draw floats [batch, *shape] between ``low`` and ``high``."""
    return lambda generator: tf.constant(generator.uniform(low, high, (ROWS, *shape)), keras.config.floatx())


def integers(high: int, *shape: int, low: int = 0) -> Column:
    """Draw integers [batch, *shape] from ``low`` to ``high`` - 1."""
    return lambda generator: tf.constant(generator.integers(low, high, (ROWS, *shape)), tf.int32)


def mask(*shape: int, share: float = 0.6) -> Column:
    """Draw floats [batch, *shape] that are 1 with probability ``share``, else 0; never all zeros."""

    def draw(generator: np.random.Generator) -> Any:
        drawn = generator.uniform(size=(ROWS, *shape)) < share
        drawn.reshape(-1)[0] = True
        return tf.constant(drawn, keras.config.floatx())

    return draw


def probabilities(classes: int, *shape: int) -> Column:
    """Draw distributions [batch, *shape, classes]."""

    def draw(generator: np.random.Generator) -> Any:
        drawn = generator.uniform(0.1, 1.0, (ROWS, *shape, classes))
        return tf.constant(drawn / drawn.sum(-1, keepdims=True), keras.config.floatx())

    return draw


def padded_tokens(high: int = VOCABULARY, length: int = LENGTH) -> Column:
    """Draw token ids [batch, length] from 1 to ``high`` - 1; each row ends with padding, 0."""

    def draw(generator: np.random.Generator) -> Any:
        ids = generator.integers(1, high, (ROWS, length))
        lengths = generator.integers(1, length + 1, (ROWS, 1))
        return tf.constant(np.where(np.arange(length) < lengths, ids, 0), tf.int32)

    return draw


# --- models


def mlp(outputs: int, *, features: int = FEATURES, width: int = WIDTH, layers: int = 3, last: str | None = None) -> Any:
    """Return a model [batch, features] -> [batch, outputs] of ``layers`` hidden layers."""
    x = entry = keras.Input((features,))
    for _ in range(layers):
        x = keras.layers.Dense(width, "tanh")(x)
    return keras.Model(entry, keras.layers.Dense(outputs, last)(x))


def with_layers(make_layer: Callable[[], Any], outputs: int = 3, *, layers: int = 3) -> Any:
    """Return a model [batch, FEATURES] -> [batch, outputs] with a layer of ``make_layer`` after every hidden layer."""
    x = entry = keras.Input((FEATURES,))
    for _ in range(layers):
        x = keras.layers.Dense(WIDTH, "tanh")(x)
        x = make_layer()(x)
    return keras.Model(entry, keras.layers.Dense(outputs)(x))


def token_model(*middle: Any, outputs: int = VOCABULARY, mask_zero: bool = False) -> Any:
    """Return a model of token ids [batch, LENGTH]: an embedding, the layers ``middle``, and a dense layer."""
    x = entry = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, mask_zero=mask_zero)(x)
    for layer in middle:
        x = layer(x)
    return keras.Model(entry, keras.layers.Dense(outputs)(x))


def tagger() -> Any:
    """Return a model of token ids [batch, LENGTH] -> logits [batch, LENGTH, VOCABULARY], without masks."""
    return token_model(*(keras.layers.Dense(WIDTH, "tanh") for _ in range(2)))


# --- training


def sgd() -> Any:
    """Return the optimizer of cases that are not about optimizers."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def train(
    model: Any,
    loss_fn: Callable[..., Any],
    data: Sequence[tuple[Any, ...]],
    optimizer: Any = None,
    extra: Sequence[Any] = (),
) -> Training:
    """Return the training of a model's trainable variables, and the ``extra`` ones."""
    trained = [*model.trainable_variables, *extra]
    return Training(loss_fn, sgd() if optimizer is None else optimizer, trained, data)


def trained_with(model: Any, loss: Callable[..., Any], *columns: Column) -> Callable[[int], Training]:
    """Return the ``make`` of a case: ``model()`` predicts from the first column, ``loss(y, prediction, *others)``."""

    def make(seed: int) -> Training:
        built = model()

        @tf.function
        def loss_fn(x: Any, y: Any, *others: Any) -> Any:
            return loss(y, built(x, training=True), *others)

        return train(built, loss_fn, batches(seed, *columns))

    return make
