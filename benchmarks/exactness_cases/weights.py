"""Weights of classes and samples, in every reduction that Keras has and in those that users write."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    LENGTH,
    VOCABULARY,
    batches,
    cross_entropy,
    integers,
    mlp,
    normal,
    tagger,
    train,
    trained_with,
    uniform,
)
from benchmarks.exactness_cases.case import Case, Training

CLASSES = 3
WEIGHTS = (0.2, 1.0, 2.5)


def classifier() -> Any:
    return mlp(CLASSES)


# --- class weights: losses of (labels [batch], logits [batch, CLASSES])


def of_classes(y: Any, dtype: Any) -> Any:
    return tf.gather(tf.constant(WEIGHTS, dtype), y)


def mean_of_weighted(y: Any, logits: Any) -> Any:
    return tf.reduce_mean(of_classes(y, logits.dtype) * cross_entropy(y, logits))


def by_sum_of_weights(y: Any, logits: Any) -> Any:
    weights = of_classes(y, logits.dtype)
    return tf.reduce_sum(weights * cross_entropy(y, logits)) / tf.reduce_sum(weights)


def balanced(y: Any, logits: Any) -> Any:
    """Each class has the weight 1 / its count in the batch."""
    counts = tf.reduce_sum(tf.one_hot(y, CLASSES, dtype=logits.dtype), 0)
    weights = tf.gather(1.0 / tf.maximum(counts, 1.0), y)
    return tf.reduce_sum(weights * cross_entropy(y, logits)) / CLASSES


def effective_number(y: Any, logits: Any) -> Any:
    """Class-balanced loss: (1 - beta) / (1 - beta ^ count), from bincount, normalised to the number of classes."""
    counts = tf.cast(tf.math.bincount(y, minlength=CLASSES), logits.dtype)
    weights = 0.1 / (1.0 - tf.pow(tf.constant(0.9, logits.dtype), tf.maximum(counts, 1.0)))
    weights = weights / tf.reduce_sum(weights) * CLASSES
    return tf.reduce_mean(tf.gather(weights, y) * cross_entropy(y, logits))


def positives_weighted(y: Any, logits: Any) -> Any:
    """Binary losses, where positives weigh as much as negatives do."""
    labels = tf.cast(y > 0, logits.dtype)[:, None]
    positive = tf.reduce_sum(1.0 - labels) / tf.maximum(tf.reduce_sum(labels), 1.0)
    losses = tf.nn.weighted_cross_entropy_with_logits(labels, logits[:, :1], positive)
    return tf.reduce_mean(losses)


# --- sample weights


def keras_weights(loss: Any, reduction: str) -> Any:
    """Return the ``make`` of a Keras loss with a weight for each sample."""
    return lambda seed: trained_with(
        classifier,
        loss(from_logits=True, reduction=reduction),
        normal(FEATURES),
        integers(CLASSES),
        uniform(low=0.1, high=3.0),
    )(seed)


def keras_none(seed: int) -> Training:
    """No reduction by Keras: the user divides the sum by the weights' sum."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    return trained_with(
        classifier,
        lambda y, logits, weights: tf.reduce_sum(loss(y, logits, weights)) / tf.reduce_sum(weights),
        normal(FEATURES),
        integers(CLASSES),
        uniform(low=0.1, high=3.0),
    )(seed)


def keras_none_mean(seed: int) -> Training:
    """No reduction by Keras: ``tf.nn.compute_average_loss``, as in the guide to custom training loops."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return trained_with(
        classifier,
        lambda y, logits: tf.nn.compute_average_loss(loss(y, logits)),
        normal(FEATURES),
        integers(CLASSES),
    )(seed)


def weights_of_tokens(reduction: str) -> Any:
    """Return the ``make`` of a Keras loss with a weight for each token, some of them zero."""

    def make(seed: int) -> Training:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        columns = (integers(VOCABULARY, LENGTH), integers(VOCABULARY, LENGTH), uniform(LENGTH, low=0.0))
        return trained_with(tagger, loss, *columns)(seed)

    return make


def compiled_loss(seed: int) -> Training:
    """The loss of a compiled Keras model, with sample weights."""
    model = mlp(CLASSES)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    @tf.function
    def loss_fn(x: Any, y: Any, weights: Any) -> Any:
        return model.compute_loss(x, y, model(x, training=True), weights)

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), uniform(low=0.1, high=3.0)))


def softmax_weights(y: Any, logits: Any, scores: Any) -> Any:
    """Weights are a softmax over the batch of a column of the batch."""
    return tf.reduce_sum(tf.nn.softmax(scores, 0) * cross_entropy(y, logits))


def importance(y: Any, logits: Any, scores: Any) -> Any:
    """Weights divided by the largest of the batch."""
    return tf.reduce_mean(scores / tf.reduce_max(scores) * cross_entropy(y, logits))


def standardised(y: Any, logits: Any, scores: Any) -> Any:
    """Policy gradient: advantages less their mean, divided by their standard deviation."""
    advantages = (scores - tf.reduce_mean(scores)) / (tf.math.reduce_std(scores) + 1e-8)
    return tf.reduce_mean(advantages * cross_entropy(y, logits))


SPARSE = keras.losses.SparseCategoricalCrossentropy
REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")

CASES = (
    *(
        Case(name, "weights", trained_with(classifier, loss, normal(FEATURES), integers(CLASSES)))
        for name, loss in {
            "class_weights_mean": mean_of_weighted,
            "class_weights_by_their_sum": by_sum_of_weights,
            "class_weights_balanced": balanced,
            "class_weights_effective_number": effective_number,
            "class_weights_positives": positives_weighted,
        }.items()
    ),
    *(Case(f"sample_weights_{reduction}", "weights", keras_weights(SPARSE, reduction)) for reduction in REDUCTIONS),
    *(Case(f"token_weights_{reduction}", "weights", weights_of_tokens(reduction)) for reduction in REDUCTIONS),
    Case("sample_weights_none", "weights", keras_none),
    Case("sample_weights_average_loss", "weights", keras_none_mean),
    Case("sample_weights_compute_loss", "weights", compiled_loss),
    *(
        Case(name, "weights", trained_with(classifier, loss, normal(FEATURES), integers(CLASSES), uniform(low=0.1)))
        for name, loss in {
            "weights_by_largest": importance,
            "weights_standardised": standardised,
            "weights_softmax_over_batch": softmax_weights,
        }.items()
    ),
)
