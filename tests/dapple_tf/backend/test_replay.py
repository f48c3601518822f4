"""A failed step is run again call by call, to say where it fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.backend.program import Program, find_failure
from tests.dapple_tf.builders import step_of
from tests.equality.small_models import WIDTH, data, values, weights

LIMIT = 1e6


@pytest.fixture(scope="module")
def program() -> tuple[Program, list[tf.Variable]]:
    """Two stages, the second on two replicas, four micro-batches; stage 1 refuses an x of ``LIMIT`` or more."""
    matrices = weights(2)

    def loss(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            hidden = tf.tanh(x @ matrices[0])
        with tf.name_scope("layer1"):
            hidden = tf.tanh(hidden @ matrices[1])
            # What depends on the arguments alone would be checked once a step, on the whole batch.
            with tf.control_dependencies(
                [tf.debugging.assert_less(x + 0 * hidden, np.float64(LIMIT), "x is too large")]
            ):
                hidden = tf.identity(hidden)
        return tf.reduce_mean(tf.reduce_sum(tf.square(hidden - y), 1))

    step = step_of(loss, stages=["layer1"], replicas=[1, 2], micro_batches=4, example_batch=data(16))
    return step._compiled_last().program, matrices


def batch_with(sample: int) -> list[Any]:
    """Return 16 samples, one of which stage 1 refuses."""
    x, y = data(16)
    bad = x.numpy()
    bad[sample, WIDTH - 1] = 2 * LIMIT
    return [tf.constant(bad), y]


@pytest.mark.parametrize(("sample", "micro_batch", "replica"), [(0, 0, 0), (6, 1, 1), (9, 2, 0), (15, 3, 1)])
def test_the_failing_call_is_named(
    program: tuple[Program, list[tf.Variable]], sample: int, micro_batch: int, replica: int
) -> None:
    found = find_failure(program[0].graph, program[0].parts[0].operations, batch_with(sample))
    assert found.startswith(f"stage 1, replica {replica}, micro-batch {micro_batch}, forward: ")
    assert "x is too large" in found


def test_a_step_that_does_not_fail_again_gives_nothing(program: tuple[Program, list[tf.Variable]]) -> None:
    assert find_failure(program[0].graph, program[0].parts[0].operations, data(16)) == ""


def test_running_again_does_not_train(program: tuple[Program, list[tf.Variable]]) -> None:
    before = values(program[1])
    find_failure(program[0].graph, program[0].parts[0].operations, data(16))
    for variable, value in zip(program[1], before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
