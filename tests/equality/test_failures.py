"""A step that fails leaves all variables as they were, or says that it does not."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.backend.program import Program
from dapple_tf.errors import StepError
from tests.equality.small_models import WIDTH, chain, data, values, weights

BAD = 1e6


def normalized() -> tuple[Any, keras.Model]:
    """Return a loss with batch norm in both halves, whose second half fails for an x of BAD; and its model."""
    layers = keras.layers
    keras.utils.set_random_seed(5)
    first = keras.Sequential(
        [
            keras.Input((WIDTH,), dtype="float64"),
            layers.Dense(WIDTH, dtype="float64"),
            layers.BatchNormalization(dtype="float64"),
        ]
    )
    second = keras.Sequential(
        [
            keras.Input((WIDTH,), dtype="float64"),
            layers.Dense(WIDTH, dtype="float64", name="second_half"),
            layers.BatchNormalization(dtype="float64"),
        ]
    )
    both = keras.Sequential([first, second])

    def loss_fn(x: Any, y: Any) -> Any:
        hidden = first(x, training=True)
        result = second(hidden, training=True)
        with tf.control_dependencies([tf.debugging.assert_less(x, np.float64(BAD), message="x is too large")]):
            result = tf.identity(result)
        return tf.reduce_mean(tf.reduce_sum(tf.square(result - y), 1))

    return loss_fn, both


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        ("dapple-a", [2, 1]),
        ("dapple-a", [1, 1]),
        ("gpipe", [1, 1]),
        ("gpipe", [2, 1]),
    ],
)
def test_a_failure_in_one_micro_batch_changes_nothing(schedule: str, replicas: list[int]) -> None:
    loss_fn, model = normalized()
    adam = keras.optimizers.Adam(0.01)
    options: dict[str, Any] = {"stages": ["second_half"], "micro_batches": 5, "replicas": replicas}
    step = dapple.pipeline(loss_fn, optimizer=adam, schedule=schedule, **options)
    x, y = data(10)
    step(x, y)
    variables = [*model.variables, *adam.variables]
    before = values(variables)
    bad = x.numpy()
    bad[7] = 2 * BAD  # micro-batch 3 holds samples 6 and 7
    with pytest.raises(StepError, match="All variables are as they were before the step"):
        step(bad, y)
    for variable, old in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old, err_msg=variable.path)
    step(x, y)  # the next step continues from there
    assert int(adam.iterations.numpy()) == 2
    assert all(np.isfinite(value).all() for value in values(variables))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_error_names_its_cause(stages: int) -> None:
    """On any device; TensorFlow may report a transfer that was cancelled because of the failure instead."""
    matrices = weights(3)

    def loss_fn(x: Any, y: Any) -> Any:
        hidden = x
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                hidden = tf.tanh(hidden @ matrix)
                if i == 1:
                    with tf.control_dependencies([tf.debugging.assert_less(x, np.float64(BAD), "x is too large")]):
                        hidden = tf.identity(hidden)
        return tf.reduce_mean(tf.reduce_sum(tf.square(hidden - y), 1))

    starts = [f"layer{i}" for i in range(1, stages)]
    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=starts, micro_batches=4)
    x, y = data(8)
    bad = x.numpy()
    bad[6] = 2 * BAD
    with pytest.raises(StepError, match="x is too large"):
        step(bad, y)


def test_the_step_after_a_failure_equals_a_step_without_it() -> None:
    ends = []
    for fails in (False, True):
        matrices = weights(3)
        loss = chain(matrices)

        def loss_fn(x: Any, y: Any, loss: Any = loss) -> Any:
            with tf.control_dependencies([tf.debugging.assert_less(x, np.float64(BAD))]):
                return loss(tf.identity(x), y)

        step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.Adam(0.01), stages=3, micro_batches=3)
        step(*data(6))
        if fails:
            x, y = data(6, seed=2)
            bad = x.numpy()
            bad[-1] = 2 * BAD
            with pytest.raises(StepError):
                step(bad, y)
        step(*data(6, seed=3))
        ends.append(values(matrices))
    for clean, failed in zip(*ends, strict=True):
        np.testing.assert_array_equal(clean, failed)


class Fragile(keras.optimizers.SGD):
    """Fails while it updates the last weight."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if variable.name.startswith("w1"):
            gradient = tf.gather(gradient, tf.range(99, 99 + gradient.shape[0]))  # out of range: fails when run
        super().update_step(gradient, variable, learning_rate)


def test_a_failure_during_the_update_says_that_variables_may_have_changed() -> None:
    matrices = weights(2)
    step = dapple.pipeline(chain(matrices), optimizer=Fragile(0.1), stages=2, micro_batches=2)
    for _ in range(2):
        with pytest.raises(StepError, match=r"SOME VARIABLES HAVE CHANGED"):
            step(*data(4))


def test_a_failed_check_after_the_update_is_named_where_tensorflow_reports_a_call_that_it_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrices = weights(2)
    loss, optimizer = chain(matrices), keras.optimizers.Adam(0.01)
    optimizer.build(matrices)

    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            mean = loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(mean, matrices), matrices, strict=True))
        tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(matrices[0])), ["the weights are not finite"])
        return mean

    emitted = vars(Program)["function"]

    def function(self: Program) -> Any:
        def run(*batch: Any) -> Any:
            try:
                return emitted.__get__(self)(*batch)
            except tf.errors.OpError as error:  # which of the two TensorFlow reports depends on the threads' times
                raise tf.errors.CancelledError(None, None, "Function was cancelled before it was started") from error

        return run

    monkeypatch.setattr(Program, "function", property(function))
    step = dapple.train_step(train, stages=2, micro_batches=2)
    x, y = data(4)
    step(x, y)
    with pytest.raises(StepError, match=r"(?s)^SOME VARIABLES HAVE CHANGED.*: stage 0, .*\[the weights are not"):
        step(x * np.nan, y)
    assert int(optimizer.iterations) == 2, "the search for the cause gives variables their values back"
    assert np.isnan(matrices[0].numpy()).all()
