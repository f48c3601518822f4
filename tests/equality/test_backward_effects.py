"""Custom gradients that write variables or print do what one device does, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError, ExactnessError
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import data, sgd, weights
from tests.graph_passes.builders import refused

Backward = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Returns what the gradients of the layer's input and of its weights are multiplied by."""


def counted(backward: Backward) -> Problem:
    """Return two layers, of which the second multiplies by a counter that its custom gradient may change.

    ``backward``: of the gradient of the layer's output, the counter, and the value that forward has read of it.
    """
    first, second = weights(2)
    counter = tf.Variable(2.0, dtype=tf.float64, trainable=False, name="counter")

    @tf.custom_gradient
    def layer(x: Any, w: Any) -> Any:
        read = counter.read_value()

        def differentiate(dy: Any) -> tuple[Any, Any]:
            of_input, of_weights = backward(dy, counter, read)
            return of_input * dy @ tf.transpose(w), tf.transpose(x) @ (dy * of_weights)

        return x @ w * read, differentiate

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.tanh(x @ first)
        with tf.name_scope("second"):
            h = layer(h, tf.convert_to_tensor(second))
        return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1))

    return Problem(loss_fn, {"w0": first, "w1": second, "counter": counter}, sgd)


def count(dy: Any, counter: Any, read: Any) -> tuple[Any, Any]:
    return read, read * counter.assign_add(1.0, read_value=True)


def count_for_input(dy: Any, counter: Any, read: Any) -> tuple[Any, Any]:
    return counter.assign_add(1.0, read_value=True), read


def step_of(problem: Problem, **options: Any) -> Any:
    options = {"stages": ["second"], "micro_batches": 2} | options
    return dapple.pipeline(problem.loss_fn, optimizer=keras.optimizers.SGD(0.1), **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"replicas": [2, 1]}, {"recompute": True}, {"schedule": "zb-h1"}],
    ids=str,
)
def test_one_micro_batch_writes_in_backward_as_one_device(options: dict[str, Any]) -> None:
    """Forward and the gradients use the value before the write; the loss of the next step the one after it."""
    compare(counted(count), [data(6), data(7)], stages=["second"], micro_batches=1, **options).check(1e-12)


def test_a_write_runs_though_only_the_gradient_of_the_batch_depends_on_it() -> None:
    compare(counted(count_for_input), [data(6), data(7)], stages=1, micro_batches=1).check(1e-12)


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"micro_batches": 1, "replicas": [1, 2]}], ids=str)
def test_writes_in_backward_that_would_be_repeated_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ExactnessError) as error:
        step_of(counted(count), **options)(*data(6))
    message = " ".join(str(error.value).split())
    assert "backward writes counter" in message
    assert "micro_batches=1" in message


def test_repeated_writes_in_backward_are_reported_where_they_are_allowed() -> None:
    problem = counted(count)
    step = step_of(problem, inexact="allow")
    step(*data(6))
    (reason,) = step.exactness.reasons
    assert reason.why.startswith("backward writes counter")
    assert not reason.documented
    assert problem.variables["counter"].numpy() == 4.0
    step(*data(1))  # one sample: one micro-batch
    assert step.exactness.exact


def test_a_write_in_an_unknown_order_is_refused() -> None:
    def read_too(dy: Any, counter: Any, read: Any) -> tuple[Any, Any]:
        return counter.assign_add(1.0, read_value=True), counter.read_value()

    with refused(CaptureError, "uses it in backward too, in an order that is not known"):
        step_of(counted(read_too), micro_batches=1)(*data(6))


def test_a_variable_of_another_stage_cannot_be_written_in_backward() -> None:
    problem = counted(count)

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("zero"):
            x = x * problem.variables["counter"]
        return problem.loss_fn(x, y)

    with refused(CaptureError, "other stages use that variable"):
        step_of(Problem(loss_fn, problem.variables, sgd), micro_batches=1)(*data(6))


@pytest.mark.parametrize("schedule", ["dapple-a", "zb-h1"])
def test_a_print_in_a_custom_gradient_runs_for_each_micro_batch(schedule: str, capfd: pytest.CaptureFixture) -> None:
    def note(dy: Any, counter: Any, read: Any) -> tuple[Any, Any]:
        tf.print("a gradient of", tf.shape(dy)[0], "rows")
        return read, read

    comparison = compare(counted(note), [data(6)], stages=["second"], micro_batches=2, schedule=schedule)
    comparison.check(1e-12)
    assert capfd.readouterr().err.count("a gradient of 3 rows") == 2


def test_a_draw_in_a_custom_gradient_is_named() -> None:
    def draw(dy: Any, counter: Any, read: Any) -> tuple[Any, Any]:
        return read, tf.random.uniform([], dtype=tf.float64)

    step = step_of(counted(draw))
    step(*data(6))
    (reason,) = step.exactness.reasons
    assert "draws from a generator's hidden state" in reason.why
