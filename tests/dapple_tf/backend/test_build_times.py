"""The phases of building a step: what is measured, and what a long build prints."""

from __future__ import annotations

import io
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.backend.build_times import PHASES, BuildTimes


@pytest.fixture
def model() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)])


def batch(samples: int) -> tuple[tf.Tensor, tf.Tensor]:
    random = np.random.default_rng(samples)
    return tf.constant(random.normal(size=(samples, 4)), tf.float32), tf.zeros([samples, 1])


def make_step(model: keras.Model, **options: object) -> dapple.PipelinedStep:
    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x) - y))

    return dapple.pipeline(loss, optimizer=keras.optimizers.SGD(0.1), stages=2, micro_batches=2, **options)


def test_a_step_has_the_times_of_all_phases_once_it_has_run(model: keras.Model) -> None:
    step = make_step(model)
    assert step.build_times == {}
    step.build(*batch(4))
    assert list(step.build_times) == list(PHASES)[:-1]
    begin = time.perf_counter()
    step(*batch(4))
    assert list(step.build_times) == list(PHASES)
    assert 0 < step.build_times["first run"] < time.perf_counter() - begin


def test_cpu_seconds_are_measured_for_the_same_phases(model: keras.Model) -> None:
    step = make_step(model)
    begin = time.process_time()
    step(*batch(4))
    assert list(step.build_cpu_times) == list(PHASES)
    assert 0 < sum(step.build_cpu_times.values()) < time.process_time() - begin


def test_only_what_is_built_anew_adds_to_the_times(model: keras.Model) -> None:
    step = make_step(model)
    step(*batch(4))
    first = step.build_times
    step(*batch(4))
    assert step.build_times == first
    step(*batch(3))  # micro-batches of 2 and 1: the same programs
    assert step.build_times["differentiate"] == first["differentiate"]


def test_a_recorded_step_has_its_rehearsal_as_first_run(model: keras.Model) -> None:
    step = make_step(model)
    step.build(*batch(4), record=True)
    rehearsed = step.build_times
    assert list(rehearsed) == list(PHASES)
    step.record(*batch(4))
    assert step.build_times == rehearsed


class Lines(io.StringIO):
    """A stream that says when a line has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def test_a_phase_in_which_a_build_has_become_long_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Lines()
    monkeypatch.setattr(sys, "stderr", stream)
    with BuildTimes(quiet_seconds=0.1).phase("layers"):
        assert stream.written.wait(20)
    assert stream.getvalue() == "dapple: finds the layers ...\n"


def test_a_build_after_a_long_one_is_quiet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Lines()
    monkeypatch.setattr(sys, "stderr", stream)
    before, times = timers(), BuildTimes(quiet_seconds=3.0)
    with times.phase("trace"):
        assert stream.written.wait(20)
    with times.phase("first run"):
        pass
    for timer in timers() - before:
        timer.join()  # it may be printing the phase that has ended
    printed = stream.getvalue()
    for name in ("passes", "emit", "first run"):
        with times.phase(name):
            pass
    assert stream.getvalue() == printed


def test_forward_adds_to_the_times_of_its_step(model: keras.Model) -> None:
    step = make_step(model)
    step.forward(*batch(4))
    assert list(step.build_times) == [phase for phase in PHASES if phase != "differentiate"]


def test_a_short_build_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    times = BuildTimes(quiet_seconds=600)
    for name in PHASES:
        with times.phase(name):
            pass
    assert capsys.readouterr().err == ""
    assert list(times.seconds) == list(PHASES)


def timers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)}


def test_ranks_but_the_first_print_nothing() -> None:
    before = timers()
    with BuildTimes(quiet_seconds=600, silent=True).phase("trace"):
        assert not timers() - before
    with BuildTimes(quiet_seconds=600).phase("trace"):
        assert timers() - before
