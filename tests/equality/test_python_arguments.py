"""Arguments that are no tensors of samples: models, optimizers, flags, and numbers without axes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import BatchError
from tests.equality.test_training_steps import assert_equal
from tests.equality.training_steps import mlp, regression, values_of

pytestmark = pytest.mark.usefixtures("float64")


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call that follow the optimizer: by position, and by name."""

IN_JOBS: Sequence[Call] = [((0.5,), {}), ((tf.constant(2.0), False), {}), ((tf.constant(3.0), False), {})]


def train_step(model: Any, x: Any, y: Any, optimizer: Any, weight: Any = 1.0, training: bool = True) -> Any:
    """A step as tutorials write it: it takes the model and the optimizer."""
    with tf.GradientTape() as tape:
        predictions = model(x, training=training)
        loss = tf.cast(weight, x.dtype) * tf.reduce_mean(tf.square(predictions - y))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss, predictions if training else None


def made() -> tuple[keras.Model, Any]:
    model = mlp()
    model.build([None, 4])
    return model, keras.optimizers.Adam(0.01)


def assert_trains_as_the_function(calls: Sequence[Call], **options: Any) -> None:
    step, whole = dapple.train_step(tf.function(train_step), **options), tf.function(train_step)
    (model, optimizer), (wanted_model, wanted_optimizer) = made(), made()
    for (x, y), (more, named) in zip(regression(len(calls)), calls, strict=True):
        found = step(model, x, y, optimizer, *more, **named)
        assert_equal(found, whole(wanted_model, x, y, wanted_optimizer, *more, **named))
    step.gather()
    for ours, theirs in zip(values_of([model, optimizer]), values_of([wanted_model, wanted_optimizer]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"stages": 2, "micro_batches": 3}, {"stages": 1, "micro_batches": 1}], ids=str)
def test_a_step_takes_the_model_and_the_optimizer(options: Any) -> None:
    assert_trains_as_the_function([((), {})] * 3, **options)


@pytest.mark.filterwarnings("ignore:the step has been built for 3 sets of Python values")
def test_other_python_values_are_traced_anew() -> None:
    calls: list[Call] = [
        ((0.5,), {}),
        ((0.5, False), {}),
        ((), {"training": True}),
        ((), {"weight": 2}),
        ((0.5,), {}),
    ]
    assert_trains_as_the_function(calls, stages=2, micro_batches=2, replicas=[2, 1])


@pytest.mark.parametrize("numbers", [[tf.constant(0.5), tf.constant(-2.0)], [np.int64(3), np.int64(0)], [True, False]])
def test_a_number_without_axes_may_change_from_step_to_step(numbers: list[Any]) -> None:
    calls: list[Call] = [((tf.constant(number),), {}) for number in numbers]
    assert_trains_as_the_function(calls, stages=2, micro_batches=4)


def test_other_numbers_without_axes_are_not_traced_anew() -> None:
    model, traces = mlp(), list[None]()

    def loss(x: Any, y: Any, weight: Any) -> Any:
        traces.append(None)
        return weight * tf.reduce_mean(tf.square(model(x) - y))

    step = dapple.pipeline(loss, optimizer="sgd", stages=2, micro_batches=2)
    counts = []
    for (x, y), weight in zip(regression(3), (0.5, 2.0, -1.0), strict=True):
        step(x, y, tf.constant(weight, "float64"))
        counts.append(len(traces))
    assert counts == counts[:1] * 3


def loss_of(model: Any, words: Any, y: Any, scale: Any, variable: Any) -> Any:
    embedded = tf.reduce_sum(tf.cast(words, "float64")[..., tf.newaxis] * variable, 1)
    return scale * tf.reduce_mean(tf.square(model(embedded) - y))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("stages", [2, "auto"])
def test_a_loss_takes_a_model_a_number_and_a_variable(ragged: bool, stages: Any) -> None:
    model, variable = mlp(), tf.Variable(np.linspace(0.1, 0.4, 4), name="variable")
    words: Any = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6]]) if ragged else tf.constant([[1, 2], [3, 4]] * 2)
    batch = (model, words, tf.ones([4, 1], "float64"), tf.constant(2.0, "float64"), variable)
    optimizer = keras.optimizers.SGD(0.1)
    report = dapple.verify(loss_of, optimizer=optimizer, batch=batch, stages=stages, micro_batches=2)
    assert report.ok, report


def test_a_forward_takes_python_values() -> None:
    model, optimizer = made()
    step = dapple.train_step(train_step, stages=2, micro_batches=2)
    x, y = regression(1)[0]
    step(model, x, y, optimizer)
    forward = step.forward_of(lambda model, x, factor: factor * tf.reduce_mean(model(x)))
    np.testing.assert_allclose(forward(model, x, 3), 3 * tf.reduce_mean(model(x)), rtol=1e-12)


def test_defaults_that_a_function_takes_by_name_only_are_left_to_it() -> None:
    """``functools.partial`` makes such of what it is given by name."""
    model = mlp()

    def loss(x: Any, y: Any, scale: float, *others: Any, power: int = 2) -> Any:
        return scale * tf.reduce_mean((model(x) - y) ** power)

    (x, y), *_ = regression(1)
    wanted = loss(x, y, 3.0)
    step = dapple.pipeline(functools.partial(loss, scale=3.0), optimizer="sgd", stages=2, micro_batches=2)
    np.testing.assert_allclose(step(x, y=y), wanted, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        (
            (1, 2, 3, 4),
            {"weigth": 2},
            "the step cannot be called with these arguments: got an unexpected keyword argument",
        ),
        ((), {"x": 1}, "cannot be called with these arguments: missing a required argument: 'model'"),
        ((1, 2), {"x": 1}, "multiple values for argument 'x'"),
    ],
)
def test_arguments_that_the_function_does_not_take_are_refused(arguments: Any, named: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        dapple.train_step(train_step, stages=1)(*arguments, **named)


def test_arguments_that_a_function_takes_by_name_only_are_refused() -> None:
    def step(x: Any, *, y: Any, scale: float = 2.0) -> Any:
        return scale * tf.reduce_mean(x - y)

    with pytest.raises(BatchError, match="the function takes y by name only"):
        dapple.train_step(step, stages=1)(tf.ones([4]), y=tf.ones([4]))
