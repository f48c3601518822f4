"""A step in a forked child is an error at once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import tensorflow as tf

from dapple_tf.errors import UsageError
from tests.dapple_tf.builders import X, step_of

SECONDS = 30
"""A child that waits is killed after these."""


@pytest.mark.always  # the only test of its kind
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_step_in_a_forked_child_is_an_error_at_once() -> None:
    """It once waited for threads that the child does not have."""
    weight = tf.Variable(tf.ones((4, 1)))
    step = step_of(lambda x: tf.reduce_mean(x @ weight), stages=1, micro_batches=1)
    step(X)

    def call(to_parent: Connection) -> None:
        try:
            step(X)
        except UsageError as error:
            to_parent.send(str(error))

    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=call, args=(there,))
    child.start()
    child.join(SECONDS)
    child.kill()
    assert child.exitcode == 0
    said = here.recv()
    assert "was forked from process" in said
    assert "Start processes anew (multiprocessing's 'spawn' or 'forkserver')" in said
    step(X)  # here it still runs
