"""Losses that are sums over the batch are refused, means pass, and data-dependent divisors give a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.errors import DappleWarning, LossError
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.loss_check import check_loss

X = np.ones((4, 3), np.float32)
W = tf.Variable(tf.ones((3, 3)), name="w")
Loss = Callable[[tf.Tensor], tf.Tensor]


def each(x: tf.Tensor) -> tf.Tensor:
    """Return a loss for each sample, of shape [batch]."""
    return tf.reduce_sum(tf.square(x @ W), axis=1)


def size(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.shape(x)[0], tf.float32)


def mask(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x[:, 0] > 0, tf.float32)


def check(loss: Loss, *batch: Any) -> None:
    check_loss(capture(tf.function(loss, autograph=False), batch or (X,)))


def doubled_forty_times(x: tf.Tensor) -> tf.Tensor:
    total = tf.reduce_sum(each(x))
    for _ in range(40):  # following every path would take 2 ** 40 steps
        total = total + total
    return total


SUMS = {
    "sum": lambda x: tf.reduce_sum(each(x)),
    "of a matrix": lambda x: tf.reduce_sum(tf.square(x @ W)),
    "over axis 0, then 1": lambda x: tf.reduce_sum(tf.reduce_sum(tf.square(x @ W), axis=0)),
    "over axis 0, then a mean": lambda x: tf.reduce_mean(tf.reduce_sum(tf.square(x @ W), axis=0)),
    "a mean over axis 1, then a sum": lambda x: tf.reduce_sum(tf.reduce_mean(tf.square(x @ W), axis=1)),
    "over a negative axis": lambda x: tf.reduce_sum(tf.square(x @ W), axis=[-2, -1]),
    "of a transposed matrix": lambda x: tf.reduce_sum(tf.transpose(tf.square(x @ W))),
    "through an identity": lambda x: tf.identity(tf.reduce_sum(each(x))),
    "through a cast": lambda x: tf.cast(tf.reduce_sum(each(x)), tf.float64),
    "through a reshape": lambda x: tf.reshape(tf.reduce_sum(each(x), keepdims=True), ()),
    "through a squeeze": lambda x: tf.squeeze(tf.reduce_sum(tf.square(x @ W), keepdims=True)),
    "times a constant": lambda x: 0.5 * tf.reduce_sum(each(x)),
    "times a variable": lambda x: tf.reduce_sum(each(x)) * W[0, 0],
    "over a constant": lambda x: tf.reduce_sum(each(x)) / 4.0,
    "over a cast constant": lambda x: tf.reduce_sum(each(x)) / tf.cast(4, tf.float32),
    "negative": lambda x: -tf.reduce_sum(each(x)),
    "weighted": lambda x: tf.reduce_sum(each(x) * mask(x)),
    "masked": lambda x: tf.reduce_sum(tf.where(mask(x) > 0, each(x), 0.0)),
    "summand over a constant": lambda x: tf.reduce_sum(each(x) / 4.0),
    "plus a regulariser": lambda x: tf.reduce_sum(each(x)) + tf.reduce_sum(W * W),
    "plus a mean": lambda x: tf.add_n([tf.reduce_mean(each(x)), 0.1 * tf.reduce_sum(each(x)), tf.reduce_sum(W)]),
    "minus a mean": lambda x: tf.reduce_mean(each(x)) - tf.reduce_sum(each(x)),
    "doubled forty times": doubled_forty_times,
    "Keras, reduction='sum'": lambda x: keras.losses.MeanSquaredError(reduction="sum")(x, x @ W),
}

MEANS = {
    "mean": lambda x: tf.reduce_mean(each(x)),
    "of a matrix": lambda x: tf.reduce_mean(tf.square(x @ W)),
    "over axis 0, then a sum": lambda x: tf.reduce_sum(tf.reduce_mean(tf.square(x @ W), axis=0)),
    "a sum over axis 1 first": lambda x: tf.reduce_mean(tf.reduce_sum(tf.square(x @ W), axis=1)),
    "sum over the size": lambda x: tf.reduce_sum(each(x)) / size(x),
    "sum times one over the size": lambda x: tf.reduce_sum(each(x)) * (1.0 / size(x)),
    "one over the size times the sum": lambda x: (1.0 / size(x)) * tf.reduce_sum(each(x)),
    "summand over the size": lambda x: tf.reduce_sum(each(x) / size(x)),
    "summand times one over the size": lambda x: tf.reduce_sum((0.5 / size(x)) * each(x)),
    "average loss": lambda x: tf.nn.compute_average_loss(each(x)),
    "plus a regulariser": lambda x: tf.reduce_mean(each(x)) + 0.01 * tf.reduce_sum(W * W) + tf.nn.l2_loss(W),
    "weighted": lambda x: tf.reduce_mean(each(x) * mask(x)),
    "over a norm of each sample": lambda x: tf.reduce_mean(each(x) / (1.0 + tf.reduce_sum(x * x, axis=1))),
}


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_a_sum_over_the_batch_is_refused(loss: Loss) -> None:
    with pytest.raises(
        LossError, match=r"a sum over the batch \('.*' sums axis 0\), not a mean: .* use tf.reduce_mean"
    ):
        check(loss)


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_a_mean_passes_without_a_warning(loss: Loss) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(loss)


def test_a_sum_of_a_tensor_of_unknown_rank_passes() -> None:
    check(lambda x: tf.reduce_sum(tf.py_function(lambda y: y, [each(x)], tf.float32)) + tf.reduce_mean(each(x)))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: tf.reduce_sum(each(x) * mask(x)) / tf.reduce_sum(mask(x)),
        lambda x: tf.math.divide_no_nan(tf.reduce_sum(each(x) * mask(x)), tf.reduce_sum(mask(x))),
        lambda x: tf.reduce_sum(each(x) * mask(x)) * (1.0 / tf.reduce_sum(mask(x))),
        lambda x: tf.reduce_sum(each(x) * (mask(x) / tf.reduce_sum(mask(x)))),
        lambda x: 0.5 * tf.reduce_sum(each(x)) / tf.maximum(tf.reduce_sum(mask(x)), 1.0) + tf.reduce_sum(W),
        lambda x: keras.losses.Dice()(x, tf.sigmoid(x @ W)),  # a quotient of sums over the batch
        lambda x: keras.losses.Tversky()(x, tf.sigmoid(x @ W)),
        lambda x: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")(x, x @ W, mask(x)),
    ],
)
def test_a_mean_over_unmasked_samples_gives_a_warning(loss: Loss) -> None:
    with pytest.warns(
        DappleWarning, match=r"divided by '.*', which is computed from the batch's data .* gradients differ"
    ):
        check(loss)


def test_a_keras_mask_gives_a_warning() -> None:
    ids = np.array([[1, 2, 0], [1, 0, 0]])
    embedding, dense = keras.layers.Embedding(3, 2, mask_zero=True), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((3,)), embedding, dense])
    criterion = keras.losses.MeanSquaredError()
    with pytest.warns(DappleWarning, match="computed from the batch's data"):
        check(lambda x: criterion(tf.ones((tf.shape(x)[0], 3, 2)), model(x)), ids)


KERAS = """
    MeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredLogarithmicError Huber LogCosh
    CosineSimilarity Poisson KLDivergence BinaryCrossentropy BinaryFocalCrossentropy Hinge SquaredHinge
    CategoricalHinge CategoricalCrossentropy CategoricalFocalCrossentropy
"""


@pytest.mark.parametrize("name", KERAS.split())
def test_keras_losses_pass(name: str) -> None:
    criterion = getattr(keras.losses, name)()
    check(lambda x, y: criterion(y, tf.sigmoid(x @ W)), X, np.eye(4, 3, dtype=np.float32))


def test_sparse_losses_pass() -> None:
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    check(lambda x, y: criterion(y, x @ W), X, np.array([0, 1, 2, 0]))
    check(lambda x, y: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ W)), X, np.zeros(4, int))


@pytest.mark.parametrize("weights", [np.float32(0.5), None])
def test_a_keras_loss_with_weights_for_samples_passes(weights: Any) -> None:
    criterion = keras.losses.MeanSquaredError()
    check(lambda x: criterion(x, x @ W, sample_weight=mask(x) if weights is None else weights))


def test_the_regularisers_and_activity_of_a_keras_model_pass() -> None:
    dense = keras.layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l1")
    model = keras.Sequential([keras.Input((3,)), dense, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    check(lambda x: tf.reduce_mean(tf.square(model(x, training=True))) + tf.add_n(model.losses))


NONLINEAR: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "root of a mean": lambda x: tf.sqrt(tf.reduce_mean(each(x))),
    "one sample": lambda x: each(x)[0],
    "largest": lambda x: tf.reduce_max(each(x)),
    "norm": lambda x: tf.norm(each(x)),
    "l2": lambda x: tf.nn.l2_loss(each(x)),
    "contraction": lambda x: tf.einsum("i,i->", each(x), each(x)),
    "scaled root of a mean": lambda x: 0.5 * tf.sqrt(tf.reduce_mean(each(x))) + 1.0,
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_a_loss_that_combines_samples_other_than_by_a_mean_gives_a_warning(name: str) -> None:
    with pytest.warns(DappleWarning, match="after samples were combined, so it is probably not a mean"):
        check(NONLINEAR[name])
