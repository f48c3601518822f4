"""The hang detector: a failed step that cannot return, because one of its ops ignores cancellation, is detected."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.program import find_cause
from dapple_tf.distributed.progress import HangDetector


def make_step(detector: HangDetector, wait: Callable[[], Any]) -> Callable[..., Any]:
    """A step with an op that waits and cannot be cancelled, as Horovod's, and one that fails for a negative number."""

    def work(x: Any) -> Any:
        return tf.debugging.check_numerics(tf.sqrt(x), "negative")

    def step(x: Any) -> Any:
        waited = tf.numpy_function(lambda: [wait(), np.float32(0)][1], [], tf.float32)
        with tf.device("CPU:0"):
            return detector.guard(tf.function(work)(x) + waited)

    # As steps are built: with automatic control dependencies the release of the queue would wait for the dequeue.
    attributes = {internals.NO_AUTOMATIC_CONTROL: True}
    traced = tf.function(step, autograph=False, experimental_attributes=attributes)
    return traced.get_concrete_function(tf.TensorSpec([]))


def wait_for_op(detector: HangDetector) -> None:
    """Wait until the op that the detector watches has started: then it takes the element that is in the queue."""
    end = time.monotonic() + 30
    while int(detector._queue.size()) > 0:
        assert time.monotonic() < end
        time.sleep(0.01)  # TensorFlow starts the op in a thread of its own; no event says so


@pytest.mark.parametrize(("x", "failed"), [(1.0, False), (-1.0, True)])
def test_a_failed_step_is_distinguished_from_a_long_one(x: float, failed: bool) -> None:
    detector, begun, ended, outcome = HangDetector(), threading.Event(), threading.Event(), []
    step = make_step(detector, lambda: (begun.set(), ended.wait()))

    def run() -> None:
        try:
            with detector.step_running():
                outcome.append(float(step(tf.constant(x))))
        except tf.errors.OpError as error:
            outcome.append(find_cause(error.message))

    running = threading.Thread(target=run, daemon=True)
    running.start()
    try:
        assert begun.wait(30)
        now = time.monotonic()
        answers = (detector.has_failed(now + 1000.0 * n) for n in itertools.count(1))
        if failed:
            # The first answers depend on whether the op that the detector watches starts before the step fails.
            last = [next(answers)]
            while last[-5:] != [True] * 5:
                assert time.monotonic() < now + 30
                time.sleep(0.1)  # each call uses one of 95 probes: they last for 9 s
                last.append(next(answers))
        else:
            wait_for_op(detector)
        assert list(itertools.islice(answers, 6)) == [failed] * 6
    finally:
        ended.set()  # or the op would wait forever, on one of the threads that the next tests need
        running.join(30)
    assert not detector.has_failed(now + 9000)
    assert len(outcome) == 1
    assert "negative : Tensor had NaN" in outcome[0] if failed else outcome == [1.0]


def test_probes_of_one_step_do_not_affect_the_next() -> None:
    detector = HangDetector()
    answers = []

    def ask() -> None:
        wait_for_op(detector)
        answers.extend(detector.has_failed(time.monotonic() + 1000 * n) for n in range(3))

    step = make_step(detector, ask)
    for _ in range(3):
        with detector.step_running():
            assert float(step(tf.constant(4.0))) == 2
    assert answers == [False] * 9


def test_a_step_that_updates_weights_for_long_after_its_last_exchange_has_not_failed() -> None:
    detector, answers = HangDetector(), []

    def ask() -> np.float32:
        answers.extend(detector.has_failed(time.monotonic() + 1000 * n) for n in range(1, 4))
        return np.float32(0)

    def during() -> None:
        wait_for_op(detector)
        answers.append(detector.has_failed(time.monotonic() + 500))

    def step() -> Any:
        with tf.device("CPU:0"):
            done = detector.guard(tf.numpy_function(lambda: [during(), np.float32(1)][1], [], tf.float32))
            with tf.control_dependencies([done]):
                return tf.numpy_function(ask, [], tf.float32)

    attributes = {internals.NO_AUTOMATIC_CONTROL: True}
    traced = tf.function(step, autograph=False, experimental_attributes=attributes).get_concrete_function()
    for _ in range(2):
        with detector.step_running():
            traced()
    assert answers == [False] * 8


@pytest.mark.parametrize(("first", "patience"), [(False, 20), (True, 1800)])
def test_a_step_that_does_not_start_has_failed_unless_tensorflow_optimizes_it(first: bool, patience: int) -> None:
    """The first run of a long window took TensorFlow 30 s to optimize, was taken for a failure, and ended the job."""
    detector = HangDetector()
    make_step(detector, lambda: None)
    with detector.step_running(first=first):  # nothing starts the op
        now = time.monotonic()
        assert not detector.has_failed(now + patience - 10)
        assert detector.has_failed(now + patience + 10)
