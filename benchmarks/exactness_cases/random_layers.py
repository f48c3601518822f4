"""Layers that draw random numbers: the masks must be those of one device."""

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
    integers,
    mask,
    normal,
    token_model,
    train,
    trained_with,
    with_layers,
)
from benchmarks.exactness_cases.case import Case, Training
from benchmarks.exactness_cases.layers import CLASSES, classifier, mean
from benchmarks.exactness_cases.masked import masked_lm
from dapple_tf.examples.gpt import build_gpt


def sequences(*middle: Callable[[], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a model of token ids with these layers, and a loss over the tokens that count."""
    return trained_with(
        lambda: token_model(*(layer() for layer in middle)),
        masked_lm,
        integers(VOCABULARY, LENGTH),
        integers(VOCABULARY, LENGTH),
        mask(LENGTH),
    )


def gpt(dropout: float) -> Callable[[int], Training]:
    """Return the ``make`` of a small GPT with dropout in every block."""

    def make(seed: int) -> Training:
        model = build_gpt(
            layers=4, width=8, heads=2, context=4, dropout=dropout, tied=False, dtype=keras.config.floatx(), seed=seed
        )
        loss_fn = tf.function(lambda x, y: mean(y, model(x, training=True)))
        return train(model, loss_fn, batches(seed, integers(256, 4), integers(256, 4)))

    return make


class StochasticDepth(keras.layers.Layer):
    """Leaves out a residual branch for some samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = keras.layers.Dense(WIDTH, "tanh")
        self.generator = keras.random.SeedGenerator(3)

    def build(self, shape: Any) -> None:
        self.branch.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x + 0.8 * self.branch(x)
        drawn = keras.random.uniform((keras.ops.shape(x)[0], 1), dtype=x.dtype, seed=self.generator)
        return x + keras.ops.cast(drawn < 0.8, x.dtype) * self.branch(x)


class LayerDrop(keras.layers.Layer):
    """Leaves out a residual branch for the whole batch: one draw without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = keras.layers.Dense(WIDTH, "tanh")
        self.generator = keras.random.SeedGenerator(3)

    def build(self, shape: Any) -> None:
        self.branch.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        drawn = keras.random.uniform((), dtype=x.dtype, seed=self.generator)
        return x + keras.ops.cast(drawn < 0.6, x.dtype) * self.branch(x)


class DroppedAttention(keras.layers.Layer):
    """Multi-head attention with dropout of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.3, seed=5)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.attention(x, x, training=training)


def monte_carlo(seed: int) -> Training:
    """The mean over four passes with other dropout masks each."""
    model = with_layers(lambda: keras.layers.Dropout(0.3, seed=seed), CLASSES)

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        return mean(y, tf.add_n([model(x, training=True) for _ in range(4)]) / 4.0)

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


def r_drop(seed: int) -> Training:
    """R-Drop: two passes with other masks must agree."""
    model = with_layers(lambda: keras.layers.Dropout(0.3, seed=seed), CLASSES)

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        a, b = (tf.nn.log_softmax(model(x, training=True)) for _ in range(2))
        return mean(y, a) + mean(y, b) + tf.reduce_mean(tf.exp(a) * (a - b))

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


def shared_generator(seed: int) -> Training:
    """All dropout layers of the model, in whatever stage, draw from one generator."""
    generator = keras.random.SeedGenerator(seed)

    def drop(x: Any) -> Any:
        return keras.random.dropout(x, 0.4, seed=generator)

    x = entry = keras.Input((FEATURES,))
    for _ in range(3):
        x = keras.layers.Dense(WIDTH, "tanh")(x)
        x = keras.layers.Lambda(drop, output_shape=(WIDTH,))(x)
    model = keras.Model(entry, keras.layers.Dense(CLASSES)(x))
    loss_fn = tf.function(lambda x, y: mean(y, model(x, training=True)))
    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


def time_major(seed: int) -> Training:
    """Noise of shape [time, batch, width]: the batch is not its outermost axis."""
    embed = keras.layers.Embedding(VOCABULARY, WIDTH)
    embed.build(())
    kernel = tf.Variable(tf.random.stateless_normal((WIDTH, VOCABULARY), [seed, 1], dtype=keras.config.floatx()))

    @tf.function
    def loss_fn(ids: Any, y: Any) -> Any:
        x = tf.transpose(embed(ids), (1, 0, 2))
        x = tf.tanh(tf.nn.experimental.stateless_dropout(x, 0.4, seed=[seed, 2]))
        return mean(tf.transpose(y), x @ kernel)

    data = batches(seed, integers(VOCABULARY, LENGTH), integers(VOCABULARY, LENGTH))
    return train(embed, loss_fn, data, extra=[kernel])


def images(layer: Callable[[], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a small image classifier with ``layer()`` after every convolution."""

    def model() -> Any:
        x = entry = keras.Input((6, 6, 2))
        for _ in range(3):
            x = layer()(keras.layers.Conv2D(4, 3, padding="same", activation="tanh")(x))
        return keras.Model(entry, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x)))

    return trained_with(model, mean, normal(6, 6, 2), integers(CLASSES))


def dense() -> Any:
    return keras.layers.Dense(WIDTH, "tanh")


CASES = (
    Case("gpt_dropout_0.1", "random", gpt(0.1)),
    Case("gpt_dropout_0.5", "random", gpt(0.5)),
    *(
        Case(name, "random", classifier(make_layer))
        for name, make_layer in {
            "dropout_0.1": lambda: keras.layers.Dropout(0.1),
            "dropout_0.5": lambda: keras.layers.Dropout(0.5, seed=1),
            "gaussian_noise": lambda: keras.layers.GaussianNoise(0.3),
            "gaussian_dropout": lambda: keras.layers.GaussianDropout(0.3),
            "alpha_dropout": lambda: keras.layers.AlphaDropout(0.2),
            "dropout_of_units": lambda: keras.layers.Dropout(0.4, noise_shape=(1, WIDTH)),
            "dropout_of_samples": lambda: keras.layers.Dropout(0.4, noise_shape=(None, 1)),
            "stochastic_depth": StochasticDepth,
            "layer_drop": LayerDrop,
        }.items()
    ),
    Case("spatial_dropout_1d", "random", sequences(dense, lambda: keras.layers.SpatialDropout1D(0.4), dense)),
    Case("spatial_dropout_2d", "random", images(lambda: keras.layers.SpatialDropout2D(0.4))),
    Case("dropout_of_images", "random", images(lambda: keras.layers.Dropout(0.3))),
    Case("dropout_and_masked_loss", "random", sequences(lambda: keras.layers.Dropout(0.2), dense, dense)),
    Case("attention_dropout", "random", sequences(DroppedAttention, dense)),
    Case(
        "lstm_dropout", "random", sequences(lambda: keras.layers.LSTM(WIDTH, dropout=0.3, return_sequences=True), dense)
    ),
    Case(
        "gru_recurrent_dropout",
        "random",
        sequences(lambda: keras.layers.GRU(WIDTH, recurrent_dropout=0.3, return_sequences=True), dense),
    ),
    Case("monte_carlo_dropout", "random", monte_carlo),
    Case("r_drop", "random", r_drop),
    Case("dropout_shared_generator", "random", shared_generator),
    Case("dropout_time_major", "random", time_major),
)
