"""A recorded step is rehearsed before its first real run: this must change nothing but the times."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.compiler import StepVariant
from dapple_tf.errors import StepError
from dapple_tf.frontend.batch import Batch
from tests.dapple_tf.builders import X, chain, step_of


def train(recorded: bool, steps: int = 3) -> tuple[list[float], dict[str, Any]]:
    """Losses, and all variables after training with dropout, batch norm and Adam; only the first step is recorded."""
    keras.utils.set_random_seed(5)
    layers = [
        keras.layers.Dense(16, activation="relu", name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.4, seed=3, name="drop"),
        keras.layers.Dense(16, activation="tanh", name="second"),
        keras.layers.Dropout(0.2, seed=4, name="drop_again"),
        keras.layers.Dense(1, name="last"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    step = dapple.pipeline(
        lambda x: tf.reduce_mean(tf.square(model(x, training=True))),
        optimizer=keras.optimizers.Adam(0.01),
        stages=["second"],
        micro_batches=2,
    )
    losses = [float(step.record(X) if recorded and number == 0 else step(X)) for number in range(steps)]
    return losses, {name: variable.numpy() for name, variable in step.variables.items()}


@pytest.mark.filterwarnings("ignore::dapple_tf.errors.DappleWarning")  # batch norm sees micro-batches
def test_a_recorded_first_step_leaves_what_a_plain_one_leaves_to_the_bit() -> None:
    (plain_losses, plain), (losses, recorded) = train(recorded=False), train(recorded=True)
    assert losses == plain_losses
    # Keras numbers the seed generators of a process: the names agree without the numbers.
    assert [re.sub(r"_\d+", "", name) for name in recorded] == [re.sub(r"_\d+", "", name) for name in plain]
    for (name, value), found in zip(plain.items(), recorded.values(), strict=True):
        np.testing.assert_array_equal(found, value, err_msg=name, strict=True)
    assert [name for name in plain if "seed" in name], "the states of dropout's seeds are compared"
    assert [name for name in plain if "moving_mean" in name], "batch norm's statistics are compared"
    assert int(recorded["optimizer/iteration"]) == 3


def count_runs(step: Any) -> list[str]:
    """Record into the returned list each run of the step's recorded program."""
    program = step._compile(Batch.of((X,)), StepVariant.TIMED)[0].program
    runs: list[str] = []
    function = program.function

    def run(*batch: Any) -> Any:
        runs.append("run")
        return function(*batch)

    object.__setattr__(program, "function", run)
    return runs


def test_only_the_first_recorded_step_of_a_batch_size_is_rehearsed() -> None:
    _, loss = chain(2)
    step = step_of(loss)
    runs = count_runs(step)
    counts = []
    for batch in (X, X, X[:6], X):
        step.record(batch)
        counts.append(len(runs))
        assert step.timeline.note == ""
        assert step.report.measured is not None
    assert counts == [3, 4, 7, 8]


def test_building_what_records_rehearses_it() -> None:
    _, loss = chain(2)
    step = step_of(loss)
    runs = count_runs(step)
    before = [weights.numpy() for weights in tf.nest.flatten(list(step.variables.values()))]
    step.build(X, record=True)
    assert len(runs) == 2
    for weights, value in zip(step.variables.values(), before, strict=True):
        np.testing.assert_array_equal(weights.numpy(), value)
    assert step.report.measured is None, "no step was recorded yet"
    step.record(X)
    assert len(runs) == 3
    assert step.report.measured is not None


def test_a_rehearsal_never_trains_on_updated_weights() -> None:
    model, _ = chain(2)
    limit = float(tf.reduce_max(tf.abs(model.weights[0]))) + 1e-3

    def loss(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(tf.reduce_max(tf.abs(model.weights[0])), limit, message="a second step was run")
        return tf.reduce_mean(tf.square(model(x)))

    step = step_of(loss, optimizer=keras.optimizers.SGD(100.0))
    step.record(X)  # the step itself starts below the limit and ends above it
    assert step.timeline.note == ""
    with pytest.raises(StepError, match="a second step was run"):
        step(X)


def test_a_step_that_prints_is_not_rehearsed() -> None:
    model, _ = chain(2)
    seen: list[float] = []

    def loss(x: tf.Tensor) -> tf.Tensor:
        tf.py_function(lambda total: seen.append(float(total)), [tf.reduce_sum(x)], [])
        return tf.reduce_mean(tf.square(model(x)))

    step = step_of(loss)
    for number in range(3):
        step.record(X)
        assert len(seen) == number + 1, "once a step"
        assert step.report.measured is not None
        assert bool(step.timeline.note) == (number < 2)
        if number == 0:
            assert "this was the first run of the step" in str(step.timeline)
            assert str(step.timeline) in str(step.recording)


def test_a_step_that_draws_random_numbers_from_a_hidden_state_is_not_rehearsed() -> None:
    model, _ = chain(2)
    step = step_of(lambda x: tf.reduce_mean(tf.square(model(x + 0.1 * tf.random.normal([4])))))
    step.record(X)
    assert "this was the first run of the step" in step.timeline.note


@pytest.mark.parametrize("prints", [False, True])
def test_a_branch_that_writes_variables_is_rehearsed_unless_it_prints_too(prints: bool) -> None:
    model, _ = chain(2)
    counter = tf.Variable(0, trainable=False)

    def count() -> tf.Tensor:
        if prints:
            tf.print("counted", output_stream="file:///dev/null")
        return counter.assign_add(1)

    def loss(x: tf.Tensor) -> tf.Tensor:
        tf.cond(tf.reduce_sum(x) > -1e9, count, lambda: counter)
        return tf.reduce_mean(tf.square(model(x)))

    step = step_of(loss)
    step.record(X)
    assert bool(step.timeline.note) == prints
    assert int(counter) == 1, "once a step"


def test_an_assertion_does_not_prevent_a_rehearsal_and_its_failure_changes_nothing() -> None:
    model, _ = chain(2)

    def loss(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(tf.reduce_max(x), tf.constant(100.0))
        return tf.reduce_mean(tf.square(model(x)))

    step = step_of(loss)
    before = [weights.numpy() for weights in model.weights]
    with pytest.raises(StepError, match="All variables are as they were before the step"):
        step.record(1000 * X)
    for weights, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weights.numpy(), value)
    step.record(X)
    assert step.timeline.note == ""
