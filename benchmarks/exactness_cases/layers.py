"""Normalisations, convolutions, recurrences and attention without random draws."""

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
    normal,
    token_model,
    train,
    trained_with,
    with_layers,
)
from benchmarks.exactness_cases.case import Case, Expected, Training, refused_and_exact

CLASSES = 3


def mean(y: Any, logits: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def classifier(make_layer: Callable[[], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a classifier with a layer of ``make_layer`` after every hidden layer."""
    return trained_with(lambda: with_layers(make_layer), mean, normal(FEATURES), integers(CLASSES))


def images(*middle: Callable[[], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a classifier of images [8, 8, 2] with these layers."""

    def model() -> Any:
        x = entry = keras.Input((8, 8, 2))
        for layer in middle:
            x = layer()(x)
        return keras.Model(entry, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(x)))

    return trained_with(model, mean, normal(8, 8, 2), integers(CLASSES))


def sequences(*middle: Callable[[], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a model that labels every token."""
    return trained_with(
        lambda: token_model(*(layer() for layer in middle)),
        mean,
        integers(VOCABULARY, LENGTH),
        integers(VOCABULARY, LENGTH),
    )


def frozen_batch_norm(seed: int) -> Training:
    """Batch norm in inference mode, as in fine-tuning."""
    model = with_layers(keras.layers.BatchNormalization, CLASSES)
    loss_fn = tf.function(lambda x, y: mean(y, model(x, training=False)))
    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


def batch_norm_without_gamma(seed: int) -> Training:
    """One batch norm of many layers has another effect on its neighbours' biases."""
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(WIDTH, use_bias=False),
            keras.layers.BatchNormalization(scale=False, momentum=0.5),
            keras.layers.Activation("tanh"),
            keras.layers.Dense(WIDTH, "tanh"),
            keras.layers.Dense(WIDTH, "tanh"),
            keras.layers.Dense(CLASSES),
        ]
    )
    loss_fn = tf.function(lambda x, y: mean(y, model(x, training=True)))
    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


class MiniBatchDeviation(keras.layers.Layer):
    """The standard deviation over the batch as one more feature, as in progressive GANs."""

    def call(self, x: Any) -> Any:
        deviation = keras.ops.mean(keras.ops.std(x, axis=0))
        return keras.ops.concatenate([x, keras.ops.ones_like(x[:, :1]) * deviation], 1)


class AttentionOverBatch(keras.layers.Layer):
    """Samples attend to each other."""

    def call(self, x: Any) -> Any:
        scores = keras.ops.softmax(keras.ops.matmul(x, keras.ops.transpose(x)), axis=1)
        return x + keras.ops.matmul(scores, x)


class SelfAttention(keras.layers.Layer):
    """Multi-head attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        return x + self.attention(x, x, use_causal_mask=True)


def conv(filters: int = 4, **options: Any) -> Callable[[], Any]:
    return lambda: keras.layers.Conv2D(filters, 3, padding="same", activation="tanh", **options)


def dense() -> Any:
    return keras.layers.Dense(WIDTH, "tanh")


LAYERS = keras.layers
EQUAL_AFTER_DENSE = {
    "layer_norm": lambda: LAYERS.LayerNormalization(),
    "rms_norm": lambda: LAYERS.RMSNormalization(),
    "group_norm": lambda: LAYERS.GroupNormalization(2),
    "unit_norm": lambda: LAYERS.UnitNormalization(),
    "prelu": lambda: LAYERS.PReLU(),
}
EQUAL_OF_IMAGES = {
    "conv_max_pool": (conv(), LAYERS.MaxPooling2D, conv(), LAYERS.MaxPooling2D),
    "conv_average_pool": (conv(), lambda: LAYERS.AveragePooling2D(2), conv(strides=2)),
    "depthwise_conv": (conv(), lambda: LAYERS.DepthwiseConv2D(3, activation="tanh"), conv()),
    "separable_conv": (conv(), lambda: LAYERS.SeparableConv2D(4, 3, activation="tanh"), conv(dilation_rate=2)),
    "transposed_conv": (
        conv(strides=2),
        lambda: LAYERS.Conv2DTranspose(4, 3, strides=2, activation="tanh"),
        LAYERS.UpSampling2D,
        lambda: LAYERS.GlobalMaxPooling2D(keepdims=True),
    ),
    "group_norm_of_images": (
        conv(),
        lambda: LAYERS.GroupNormalization(2),
        conv(),
        lambda: LAYERS.GroupNormalization(4),
    ),
}
EQUAL_OF_SEQUENCES = {
    "lstm": (lambda: LAYERS.LSTM(WIDTH, return_sequences=True), dense),
    "gru_backwards": (lambda: LAYERS.GRU(WIDTH, return_sequences=True, go_backwards=True), dense),
    "bidirectional": (lambda: LAYERS.Bidirectional(LAYERS.LSTM(4, return_sequences=True)), dense),
    "causal_attention": (SelfAttention, LAYERS.LayerNormalization, dense, SelfAttention),
    "conv_1d": (lambda: LAYERS.Conv1D(WIDTH, 3, padding="causal", activation="tanh"), dense),
}

CASES = (
    *(Case(name, "layers", classifier(layer)) for name, layer in EQUAL_AFTER_DENSE.items()),
    *(Case(name, "layers", images(*layers)) for name, layers in EQUAL_OF_IMAGES.items()),
    *(Case(name, "layers", sequences(*layers)) for name, layers in EQUAL_OF_SEQUENCES.items()),
    Case("batch_norm_frozen", "layers", frozen_batch_norm),
    Case("batch_norm", "layers", classifier(lambda: LAYERS.BatchNormalization(momentum=0.5)), Expected.DOCUMENTED),
    Case("batch_norm_once", "layers", batch_norm_without_gamma, Expected.DOCUMENTED),
    Case(
        "batch_norm_of_images",
        "layers",
        images(conv(), LAYERS.BatchNormalization, conv(), LAYERS.BatchNormalization),
        Expected.DOCUMENTED,
    ),
    Case(
        "batch_norm_deferred",
        "layers",
        classifier(lambda: LAYERS.BatchNormalization(momentum=0.5)),
        Expected.DOCUMENTED,
        {"batch_norm": "deferred"},
    ),
    Case(
        "batch_norm_sync",
        "layers",
        classifier(lambda: LAYERS.BatchNormalization(momentum=0.5)),
        Expected.DOCUMENTED,
        {"batch_norm": "sync"},
    ),
    Case("mini_batch_deviation", "layers", classifier(MiniBatchDeviation), Expected.REFUSED),
    Case("attention_over_batch", "layers", classifier(AttentionOverBatch), Expected.REFUSED),
    *refused_and_exact(
        "embeddings_of_batch_compared",
        "layers",
        trained_with(
            lambda: with_layers(dense, CLASSES),
            lambda y, z: mean(y, tf.matmul(z, z, transpose_b=True) @ z),
            normal(FEATURES),
            integers(CLASSES),
        ),
    ),
)
