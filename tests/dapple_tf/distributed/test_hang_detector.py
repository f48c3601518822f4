"""Whether a step has failed that cannot return, because one of its ops waits whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.failure_cause import find_cause
from dapple_tf.distributed.hang_detector import Canary


def make_step(canary: Canary, wait: Callable[[], Any]) -> Callable[..., Any]:
    """A step with an op that waits, as Horovod's do, and one that fails for a negative number."""

    def work(x: Any) -> Any:
        return tf.debugging.check_numerics(tf.sqrt(x), "negative")

    def step(x: Any) -> Any:
        waited = tf.numpy_function(lambda: [wait(), np.float32(0)][1], [], tf.float32)
        with tf.device("CPU:0"):
            return canary.watch_over(tf.function(work)(x) + waited)

    # As real steps are made: else what releases the canary would wait for it.
    attributes = {internals.NO_AUTOMATIC_CONTROL: True}
    traced = tf.function(step, autograph=False, experimental_attributes=attributes)
    return traced.get_concrete_function(tf.TensorSpec([]))


@pytest.mark.parametrize(("x", "dead"), [(1.0, False), (-1.0, True)])
def test_a_failed_step_is_told_from_one_that_takes_long(x: float, dead: bool) -> None:
    canary, ended, outcome = Canary(), threading.Event(), []
    step = make_step(canary, ended.wait)

    def run() -> None:
        try:
            with canary.singing():
                outcome.append(float(step(tf.constant(x))))
        except tf.errors.OpError as error:
            outcome.append(find_cause(error.message))

    running = threading.Thread(target=run, daemon=True)
    running.start()
    time.sleep(1)  # it has begun
    now = time.monotonic()
    assert [canary.is_dead(now + 1000.0 * n) for n in range(1, 6)] == [dead] * 5
    ended.set()
    running.join(5)
    assert not canary.is_dead(now + 9000)
    assert len(outcome) == 1
    assert "negative : Tensor had NaN" in outcome[0] if dead else outcome == [1.0]


def test_what_was_asked_of_one_step_does_not_reach_the_next() -> None:
    canary = Canary()
    answers = []

    def ask() -> None:
        time.sleep(0.5)  # for the op to start
        answers.extend(canary.is_dead(time.monotonic() + 1000 * n) for n in range(3))

    step = make_step(canary, ask)
    for _ in range(3):
        with canary.singing():
            assert float(step(tf.constant(4.0))) == 2
    assert answers == [False] * 9


def test_a_step_that_updates_weights_for_long_after_its_last_exchange_is_not_dead() -> None:
    canary, answers = Canary(), []

    def ask() -> np.float32:
        answers.extend(canary.is_dead(time.monotonic() + 1000 * n) for n in range(1, 4))
        return np.float32(0)

    def during() -> None:
        time.sleep(0.5)  # for the op to start
        answers.append(canary.is_dead(time.monotonic() + 500))

    def step() -> Any:
        with tf.device("CPU:0"):
            done = canary.watch_over(tf.numpy_function(lambda: [during(), np.float32(1)][1], [], tf.float32))
            with tf.control_dependencies([done]):
                return tf.numpy_function(ask, [], tf.float32)

    attributes = {internals.NO_AUTOMATIC_CONTROL: True}
    traced = tf.function(step, autograph=False, experimental_attributes=attributes).get_concrete_function()
    for _ in range(2):
        with canary.singing():
            traced()
    assert answers == [False] * 8
