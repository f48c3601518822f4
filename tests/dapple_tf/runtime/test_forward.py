"""Functions that run forward over the stages of a training step, without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import ExactnessError, UsageError

pytestmark = pytest.mark.usefixtures("float64")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(13, 6))
Y = RANDOM.normal(size=(13, 1))


@pytest.fixture
def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, "tanh", kernel_regularizer="l2", name=f"dense_{i}") for i in range(3)]
    dropout = keras.layers.Dropout(0.5, name="dropout", dtype="float64")
    return keras.Sequential(
        [keras.Input([6], dtype="float64"), *layers, dropout, keras.layers.Dense(1, name="last")], name="model"
    )


def make_loss(model: keras.Model, *, training: bool) -> Any:
    def loss_fn(x: Any, y: Any) -> Any:
        predicted = model(x, training=training)
        return tf.reduce_mean(tf.square(predicted - y)) + sum(model.losses), {"predicted": predicted}

    return loss_fn


@pytest.mark.parametrize(("replicas", "samples"), [(None, 13), ((2, 1, 3), 2), ((2, 1, 3), 13)])
def test_forward_gives_what_the_loss_function_gives(
    model: keras.Model, replicas: Sequence[int] | None, samples: int
) -> None:
    loss_fn = make_loss(model, training=False)
    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=3, replicas=replicas, micro_batches=4)
    before = model.get_weights()
    step.build(X, Y)
    loss, aux = step.forward(X[:samples], Y[:samples])
    expected, expected_aux = loss_fn(X[:samples], Y[:samples])
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    np.testing.assert_allclose(aux["predicted"], expected_aux["predicted"], rtol=1e-12)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


def test_forward_draws_as_the_loss_function_does(model: keras.Model) -> None:
    """The state of the seed generator advances by each call, as on one device."""
    loss_fn = make_loss(model, training=True)
    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=2, micro_batches=4)
    found = [float(step.forward(X, Y)[0]) for _ in range(2)]
    keras.utils.set_random_seed(1)
    model.layers[3].seed_generator.state.assign(model.layers[3].seed_generator.state - [0, 2])
    expected = [float(loss_fn(X, Y)[0]) for _ in range(2)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_plan_is_made_by_whichever_comes_first(model: keras.Model) -> None:
    step = dapple.pipeline(
        make_loss(model, training=True), optimizer=keras.optimizers.SGD(0.1), stages=["dense_1", "dropout"]
    )
    forward = step.forward_of(make_loss(model, training=False))
    for _ in range(2):  # without dropout, the stage of dropout starts at the layer after it
        np.testing.assert_allclose(forward(X, Y)[0], make_loss(model, training=False)(X, Y)[0], rtol=1e-12)
        step(X, Y)
    expected = make_loss(model, training=False)(X, Y)
    np.testing.assert_allclose(forward(X, Y)[0], expected[0], rtol=1e-12)
    assert {v.value.device.rpartition(":")[2] for v in model.get_layer("last").variables} == {"2"}


def test_a_function_of_a_frozen_model_runs_in_micro_batches(model: keras.Model) -> None:
    model.trainable = False
    step = dapple.pipeline(make_loss(model, training=True), optimizer=keras.optimizers.SGD(0.1), stages=2)
    forward = step.forward_of(make_loss(model, training=False))
    np.testing.assert_allclose(forward(X, Y)[0], make_loss(model, training=False)(X, Y)[0], rtol=1e-12)


def test_stages_auto_take_all_devices_before_training(model: keras.Model) -> None:
    step = dapple.pipeline(make_loss(model, training=True), optimizer=keras.optimizers.SGD(0.1), devices=[0, 1])
    forward = step.forward_of(make_loss(model, training=False))
    np.testing.assert_allclose(forward(X, Y)[0], make_loss(model, training=False)(X, Y)[0], rtol=1e-12)
    assert {v.value.device.rpartition(":")[2] for v in model.variables} == {"0", "1"}


def test_a_loss_that_combines_samples_is_refused_or_runs_once(model: keras.Model) -> None:
    def loss_fn(x: Any, y: Any) -> Any:
        return tf.sqrt(tf.reduce_mean(tf.square(model(x, training=False) - y)))

    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=2)
    with pytest.raises(ExactnessError, match="no sum or mean"):
        step.forward(X, Y)
    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=2, batch_loss=True)
    step.build(X, Y)
    np.testing.assert_allclose(step.forward(X, Y), loss_fn(X, Y), rtol=1e-12)


def test_forward_is_no_op_of_a_graph(model: keras.Model) -> None:
    step = dapple.pipeline(make_loss(model, training=True), optimizer=keras.optimizers.SGD(0.1), stages=2)
    with pytest.raises(UsageError, match="outside of any"):
        tf.function(step.forward, autograph=False)(tf.constant(X), tf.constant(Y))
