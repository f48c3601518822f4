"""The losses of classification and regression: the functions of Keras, and others that are means over samples."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    integers,
    mlp,
    normal,
    probabilities,
    trained_with,
    uniform,
)
from benchmarks.exactness_cases.case import Case, Training

OUTPUTS = 3


def model(last: str | None = None) -> Any:
    return lambda: mlp(OUTPUTS, last=last)


def keras_loss(name: str, y: Any, last: str | None = None, **options: Any) -> Case:
    """Return the case of a loss of Keras, by the name of its class, for targets drawn by ``y``."""

    def make(seed: int) -> Training:
        return trained_with(model(last), getattr(keras.losses, name)(**options), normal(FEATURES), y)(seed)

    words = "".join(f"_{key}" for key in options if key != "from_logits")
    return Case(f"{name}{words}", "supervised", make)


def written(name: str, loss: Any, y: Any, last: str | None = None) -> Case:
    """Return the case of a loss that a user writes."""
    return Case(name, "supervised", trained_with(model(last), loss, normal(FEATURES), y))


# --- losses of (targets, predictions [batch, OUTPUTS])


def pinball(y: Any, z: Any) -> Any:
    quantiles = tf.constant([0.1, 0.5, 0.9], z.dtype)
    error = y - z
    return tf.reduce_mean(tf.maximum(quantiles * error, (quantiles - 1.0) * error))


def gaussian_likelihood(y: Any, z: Any) -> Any:
    mean, log_variance = z[:, 0], z[:, 1]
    return 0.5 * tf.reduce_mean(log_variance + tf.square(y[:, 0] - mean) * tf.exp(-log_variance))


def mixture_density(y: Any, z: Any) -> Any:
    return -tf.reduce_mean(tf.reduce_logsumexp(tf.nn.log_softmax(z) - tf.square(y - z), 1))


def ordinal(y: Any, z: Any) -> Any:
    above = tf.cast(y[:, None] > tf.range(OUTPUTS), z.dtype)
    return tf.reduce_mean(tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(above, z), 1))


def pairs_of_classes(y: Any, z: Any) -> Any:
    """Listwise and pairwise ranking inside each row (a query's documents)."""
    differences = z[:, :, None] - z[:, None, :]
    wanted = tf.sign(y[:, :, None] - y[:, None, :])
    return tf.reduce_mean(tf.math.softplus(-wanted * differences))


def confidence_penalty(y: Any, z: Any) -> Any:
    log = tf.nn.log_softmax(z)
    entropy = -tf.reduce_sum(tf.exp(log) * log, 1)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=z) - 0.1 * entropy)


def sum_and_mean(y: Any, z: Any) -> Any:
    return tf.reduce_mean(tf.square(y - z)) + 1e-3 * tf.reduce_sum(tf.square(z))


def explicit_sum_of_squares(y: Any, z: Any) -> Any:
    return tf.nn.l2_loss(y - z)


def root_of_each_row(y: Any, z: Any) -> Any:
    return tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(y - z), 1) + 1e-6))


BINARY, FLOATS, POSITIVE = probabilities(OUTPUTS), normal(OUTPUTS), uniform(OUTPUTS, low=0.5, high=3.0)
SIGNS, CLASS = integers(2, OUTPUTS), integers(OUTPUTS)

CASES = (
    keras_loss("BinaryCrossentropy", BINARY, from_logits=True),
    keras_loss("BinaryCrossentropy", BINARY, "sigmoid", label_smoothing=0.1),
    keras_loss("BinaryFocalCrossentropy", SIGNS, "sigmoid", gamma=2.0, apply_class_balancing=True),
    keras_loss("CategoricalCrossentropy", BINARY, "softmax"),
    keras_loss("CategoricalCrossentropy", BINARY, from_logits=True, label_smoothing=0.1),
    keras_loss("CategoricalFocalCrossentropy", BINARY, "softmax", gamma=2.0),
    keras_loss("SparseCategoricalCrossentropy", CLASS, "softmax"),
    keras_loss("CosineSimilarity", FLOATS),
    keras_loss("Hinge", SIGNS),
    keras_loss("SquaredHinge", SIGNS),
    keras_loss("CategoricalHinge", SIGNS),
    keras_loss("Huber", FLOATS, delta=0.5),
    keras_loss("KLDivergence", BINARY, "softmax"),
    keras_loss("LogCosh", FLOATS),
    keras_loss("MeanSquaredError", FLOATS),
    keras_loss("MeanSquaredError", FLOATS, reduction="sum"),
    keras_loss("MeanAbsoluteError", FLOATS),
    keras_loss("MeanAbsolutePercentageError", POSITIVE),
    keras_loss("MeanSquaredLogarithmicError", POSITIVE, "softplus"),
    keras_loss("Poisson", POSITIVE, "softplus"),
    written("pinball", pinball, FLOATS),
    written("gaussian_likelihood", gaussian_likelihood, FLOATS),
    written("mixture_density", mixture_density, FLOATS),
    written("ordinal", ordinal, CLASS),
    written("ranking_in_each_row", pairs_of_classes, FLOATS),
    written("confidence_penalty", confidence_penalty, CLASS),
    written("sum_and_mean", sum_and_mean, FLOATS),
    written("l2_loss", explicit_sum_of_squares, FLOATS),
    written("root_of_each_row", root_of_each_row, FLOATS),
)
