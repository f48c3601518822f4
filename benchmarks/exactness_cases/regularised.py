"""Regularisers, constraints and reparametrised weights: terms that do not depend on the batch, or on its mean."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    WIDTH,
    batches,
    cross_entropy,
    integers,
    mask,
    mlp,
    normal,
    train,
    trained_with,
)
from benchmarks.exactness_cases.case import Case, Training, refused_and_exact

CLASSES = 3


def dense(outputs: int = WIDTH, activation: str | None = "tanh", **options: Any) -> Any:
    return keras.layers.Dense(outputs, activation, **options)


def chain(*layers: Any) -> Any:
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def with_model_losses(make_layer: Any, masked: bool = False) -> Any:
    """Return the ``make`` of a model of ``make_layer()`` layers, whose ``losses`` the user adds to the loss."""

    def make(seed: int) -> Training:
        model = chain(*(make_layer() for _ in range(3)), dense(CLASSES, None))

        @tf.function
        def loss_fn(x: Any, y: Any, keep: Any) -> Any:
            losses = cross_entropy(y, model(x, training=True))
            total = tf.reduce_sum(losses * keep) / tf.reduce_sum(keep) if masked else tf.reduce_mean(losses)
            return total + tf.add_n(model.losses)

        return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), mask()))

    return make


class Penalty(keras.layers.Layer):
    """Adds the mean of its squared input to the model's losses."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class NormalisedDense(keras.layers.Layer):
    """Weight normalisation: a direction and a length for every unit."""

    def build(self, shape: Any) -> None:
        self.direction = self.add_weight(shape=(shape[-1], WIDTH), initializer="glorot_uniform", name="direction")
        self.length = self.add_weight(shape=(WIDTH,), initializer="ones", name="length")

    def call(self, x: Any) -> Any:
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.square(self.direction), 0))
        return keras.ops.tanh(keras.ops.matmul(x, self.direction * (self.length / norm)))


def with_layers_of(make_layer: Any) -> Any:
    """Return the ``make`` of a classifier of ``make_layer()`` layers."""

    def make(seed: int) -> Training:
        model = chain(*(make_layer() for _ in range(3)), dense(CLASSES, None))
        loss_fn = tf.function(lambda x, y: tf.reduce_mean(cross_entropy(y, model(x, training=True))))
        return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))

    return make


def l2_in_loss(masked: bool) -> Any:
    """Return the ``make`` of a loss with a sum of the squares of all kernels."""

    def make(seed: int) -> Training:
        model = mlp(CLASSES)
        kernels = [variable for variable in model.trainable_variables if variable.path.endswith("kernel")]

        @tf.function
        def loss_fn(x: Any, y: Any, keep: Any) -> Any:
            losses = cross_entropy(y, model(x))
            total = tf.reduce_sum(losses * keep) / tf.reduce_sum(keep) if masked else tf.reduce_sum(losses) / 12.0
            return total + 0.01 * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])

        return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), mask()))

    return make


def elastic_weights(seed: int) -> Training:
    """Elastic weight consolidation: the distance to old weights, weighted by constants."""
    model = mlp(CLASSES)
    old = [tf.constant(variable.numpy() + 0.1) for variable in model.trainable_variables]

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        distances = [
            tf.reduce_sum(tf.square(variable - value))
            for variable, value in zip(model.trainable_variables, old, strict=True)
        ]
        return tf.reduce_sum(cross_entropy(y, model(x))) + 0.5 * tf.add_n(distances)

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


def scaled_by_weights(seed: int) -> Training:
    """A mean over the batch times a factor of the weights alone."""
    model = mlp(CLASSES)
    kernel = model.layers[1].kernel

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        loss = tf.reduce_mean(cross_entropy(y, model(x)))
        return loss * (1.0 + 0.1 * tf.reduce_mean(tf.square(kernel))) + 0.01 * tf.norm(tf.convert_to_tensor(kernel))

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


def squared_mean_activation(y: Any, logits: Any) -> Any:
    """The mean activation over the batch is to be a constant (sparse autoencoders)."""
    mean = tf.reduce_mean(tf.sigmoid(logits), 0)
    divergence = 0.1 * tf.math.log(0.1 / mean) + 0.9 * tf.math.log(0.9 / (1.0 - mean))
    return tf.reduce_mean(cross_entropy(y, logits)) + 0.1 * tf.reduce_sum(divergence)


CASES = (
    *(
        Case(name, "regularised", with_model_losses(make_layer))
        for name, make_layer in {
            "kernel_regularizer": lambda: dense(kernel_regularizer=keras.regularizers.L2(0.01)),
            "kernel_regularizer_l1_l2": lambda: dense(
                kernel_regularizer=keras.regularizers.L1L2(0.01, 0.01), bias_regularizer="l2"
            ),
            "activity_regularizer": lambda: dense(activity_regularizer=keras.regularizers.L2(0.01)),
        }.items()
    ),
    Case(
        "kernel_regularizer_masked_loss",
        "regularised",
        with_model_losses(lambda: dense(kernel_regularizer=keras.regularizers.L2(0.01)), masked=True),
    ),
    Case(
        "activity_regularizer_masked_loss",
        "regularised",
        with_model_losses(lambda: dense(activity_regularizer=keras.regularizers.L1(0.01)), masked=True),
    ),
    Case("added_loss", "regularised", with_model_losses(lambda: keras.Sequential([dense(), Penalty()]))),
    Case("l2_in_masked_loss", "regularised", l2_in_loss(masked=True)),
    Case("l2_in_sum_by_constant", "regularised", l2_in_loss(masked=False)),
    Case("elastic_weights_and_sum", "regularised", elastic_weights),
    Case("scaled_by_weights", "regularised", scaled_by_weights),
    Case("weight_normalisation", "regularised", with_layers_of(NormalisedDense)),
    Case("spectral_normalisation", "regularised", with_layers_of(lambda: keras.layers.SpectralNormalization(dense()))),
    Case("unit_norm_constraint", "regularised", with_layers_of(lambda: dense(kernel_constraint="unit_norm"))),
    *refused_and_exact(
        "mean_activation",
        "regularised",
        trained_with(lambda: mlp(CLASSES), squared_mean_activation, normal(FEATURES), integers(CLASSES)),
    ),
)
