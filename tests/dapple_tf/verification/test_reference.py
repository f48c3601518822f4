"""The reference of verify: the steps of one device, against eager training loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.verification.reference import cut_samples
from tests.dapple_tf.verification.models import (
    Model,
    dense_layers,
    embeddings,
    numbers,
    one_device,
    repeated_ids,
    train_one_step,
    values,
)

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
    "global clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.01),
}


def assert_close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("make", "batch"), [(dense_layers, numbers()), (embeddings, repeated_ids())])
@pytest.mark.parametrize("jit_compile", [None, True])
def test_the_plain_step_is_that_of_an_eager_training_loop(
    make: Callable[[], Model], batch: Any, optimizer: str, jit_compile: bool | None
) -> None:
    model, loss_fn = make()
    wanted_optimizer = OPTIMIZERS[optimizer]()
    loss, gradients = train_one_step(model, loss_fn, wanted_optimizer, batch)
    wanted = values(model, wanted_optimizer)

    model, loss_fn = make()
    loss_fn = loss_fn if jit_compile is None else tf.function(loss_fn, jit_compile=True)
    found_optimizer = OPTIMIZERS[optimizer]()
    outcome = one_device(model, loss_fn, found_optimizer).train(batch)
    assert_close(outcome.loss, loss)
    for found, gradient in zip(outcome.gradients.values(), gradients, strict=True):
        assert isinstance(found, tf.IndexedSlices) == isinstance(gradient, tf.IndexedSlices)
        assert_close(tf.convert_to_tensor(found), tf.convert_to_tensor(gradient))
    for found, value in zip(values(model, found_optimizer), wanted, strict=True):
        assert_close(found, value)
    for found, value in zip(outcome.variables.values(), values(model, found_optimizer), strict=True):
        np.testing.assert_array_equal(found, value)


def test_the_loss_may_be_a_callable_that_needs_autograph_and_returns_aux() -> None:
    model, loss_fn = dense_layers()

    def conditional(batch: Any) -> Any:
        loss = loss_fn(batch["x"], batch["y"])
        if tf.reduce_sum(batch["x"]) > 1e9:
            loss *= 2.0
        return loss, {"count": tf.size(batch["x"]), "rows": tf.shape(batch["x"])[0]}

    x, y = numbers()
    outcome = one_device(model, conditional, keras.optimizers.SGD(0.1)).train(({"x": x, "y": y},))
    assert outcome.aux == (32, 8)


def test_a_variable_without_a_gradient_has_none() -> None:
    model, loss_fn = dense_layers()
    idle = keras.Variable(1.0, name="idle")
    model.first = idle  # now one of the model's variables
    with pytest.warns(UserWarning, match="Gradients do not exist for variables \\['idle'\\]"):
        outcome = one_device(model, loss_fn, keras.optimizers.SGD(0.1)).train(numbers())
    assert outcome.gradients["idle"] is None
    assert outcome.variables["idle"] == 1.0


# --- micro-batches in turn


def test_parts_of_the_batch_are_weighted_by_their_samples() -> None:
    """Seven samples in three parts: of two, two and three."""
    batch = numbers(7)
    parts = cut_samples(7, 3)
    assert [part.stop - part.start for part in parts] == [2, 2, 3]
    model, loss_fn = dense_layers()
    plain = one_device(model, loss_fn, keras.optimizers.Adam(0.01)).train(batch)
    model, loss_fn = dense_layers()
    in_turn = one_device(model, loss_fn, keras.optimizers.Adam(0.01)).train_in_turn(batch, parts)
    assert_close(in_turn.loss, plain.loss)
    for name, gradient in plain.gradients.items():
        assert_close(in_turn.gradients[name], gradient)
    assert in_turn.aux is None


def test_sparse_gradients_of_parts_are_those_of_the_batch() -> None:
    """The rows of all parts in the order of the samples: Keras's Adam squares each row of an id by itself."""
    batch, parts = repeated_ids(7), cut_samples(7, 3)
    outcomes = []
    for train in (lambda one: one.train(batch), lambda one: one.train_in_turn(batch, parts)):
        model, loss_fn = embeddings()
        outcomes.append(train(one_device(model, loss_fn, keras.optimizers.Adam(0.01))))
    plain, in_turn = (next(iter(outcome.gradients.values())) for outcome in outcomes)
    np.testing.assert_array_equal(in_turn.indices, plain.indices)
    assert_close(in_turn.values, plain.values)
    for name in outcomes[0].gradients:
        assert_close(outcomes[1].variables[name], outcomes[0].variables[name])


def test_each_part_is_normalised_by_itself_and_writes_the_statistics_in_order() -> None:
    model, loss_fn = dense_layers(keras.layers.BatchNormalization(momentum=0.5, name="norm", dtype="float64"))
    x, _ = batch = numbers(8)
    hidden = model.layers[0](x).numpy()
    one_device(model, loss_fn, keras.optimizers.SGD(0.1)).train_in_turn(batch, cut_samples(8, 2))
    expected = np.zeros(8)
    for part in (hidden[:4], hidden[4:]):
        expected = 0.5 * expected + 0.5 * part.mean(axis=0)
    assert_close(model.get_layer("norm").moving_mean.numpy(), expected)


# --- plain training whose batch norm takes the parts in turn


def normalised() -> Model:
    return dense_layers(keras.layers.BatchNormalization(momentum=0.5, name="norm", dtype="float64"))


@pytest.mark.parametrize("is_function", [False, True])
def test_with_batch_norm_alone_it_is_the_parts_in_turn(is_function: bool) -> None:
    batch, parts = numbers(7), cut_samples(7, 3)
    outcomes = []
    for train in (
        lambda one: one.train_in_turn(batch, parts),
        lambda one: one.train_divided(batch, lambda layer: [[2], [2], [3]]),
    ):
        model, loss_fn = normalised()
        loss_fn = tf.function(loss_fn, jit_compile=True) if is_function else loss_fn
        outcomes.append(train(one_device(model, loss_fn, keras.optimizers.SGD(0.1))))
    in_turn, divided = outcomes
    assert_close(divided.loss, in_turn.loss)
    for name, gradient in in_turn.gradients.items():
        np.testing.assert_allclose(divided.gradients[name], gradient, rtol=1e-11, atol=1e-16)
    for layer in ("moving_mean", "moving_variance"):
        assert_close(divided.variables[f"net/norm/{layer}"], in_turn.variables[f"net/norm/{layer}"])


def test_what_is_counted_over_the_batch_stays_so() -> None:
    """A mean over the samples that a mask keeps: the parts keep different numbers of samples."""
    x, y = numbers(6)
    mask = tf.constant([[1.0], [0.0], [0.0], [1.0], [1.0], [1.0]], tf.float64)
    model, _ = normalised()

    def loss_fn(x: Any, y: Any, mask: Any) -> Any:
        return tf.reduce_sum(mask * tf.square(model(x, training=True) - y)) / tf.reduce_sum(mask)

    one = one_device(model, loss_fn, keras.optimizers.SGD(0.1))
    first, norm, last = model.layers
    outputs = tf.concat([last(norm(first(part), training=True)) for part in (x[:3], x[3:])], 0)
    for statistic, start in ((norm.moving_mean, 0.0), (norm.moving_variance, 1.0)):
        statistic.assign(tf.fill(statistic.shape, start))
    expected = tf.reduce_sum(mask * tf.square(outputs - y)) / 4
    assert_close(one.train_divided((x, y, mask), lambda layer: [[3], [3]]).loss, expected)


def test_each_replica_writes_statistics_of_its_own_and_their_means_are_kept() -> None:
    """Replica r has half r of each micro-batch of four: samples 0-1 and 4-5, or 2-3 and 6-7."""
    model, loss_fn = normalised()
    x, _ = batch = numbers(8)
    first, norm, _ = model.layers
    hidden = first(x).numpy()
    asked: list[Any] = []

    def sizes_of(layer: Any) -> list[list[int]]:
        asked.append(layer)
        return [[2, 2], [2, 2]]

    one_device(model, loss_fn, keras.optimizers.SGD(0.1)).train_divided(batch, sizes_of)
    means = [np.zeros(8), np.zeros(8)]
    for replica in (0, 1):
        for begin in (2 * replica, 2 * replica + 4):
            means[replica] = 0.5 * means[replica] + 0.5 * hidden[begin : begin + 2].mean(axis=0)
    assert_close(norm.moving_mean.numpy(), (means[0] + means[1]) / 2)
    assert asked == [norm]


def test_tf_functions_of_the_user_keep_their_traces() -> None:
    """A trace in which batch norm takes parts must not be found by a later call."""
    batch = numbers(6)
    model, loss_fn = normalised()
    forward = tf.function(lambda x: model(x, training=True))
    outer = tf.function(lambda x, y: tf.reduce_mean(tf.square(forward(x) - y)))
    one = one_device(model, outer, keras.optimizers.SGD(0.1))
    before = [variable.numpy() for variable in one.variables.values()]

    def restored(work: Callable[[], Any]) -> Any:
        for variable, value in zip(one.variables.values(), before, strict=True):
            variable.assign(value)
        return work()

    plain = restored(lambda: float(loss_fn(*batch)))
    restored(lambda: one.train_divided(batch, lambda layer: [[3], [3]]))
    assert restored(lambda: float(outer(*batch))) == pytest.approx(plain, rel=1e-12)
    assert restored(lambda: float(tf.reduce_mean(tf.square(forward(batch[0]) - batch[1])))) == pytest.approx(plain)
    assert outer.experimental_get_tracing_count() == forward.experimental_get_tracing_count() == 1
