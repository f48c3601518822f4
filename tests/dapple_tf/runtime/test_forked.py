"""A step in a forked child is an error at once."""

from __future__ import annotations

import pytest

from tests.processes import run_python

FORK = """
import os, sys, time
import numpy as np, tensorflow as tf, keras
import dapple_tf as dapple
dapple.init(2)
weight = tf.Variable(tf.ones((4, 1)))
optimizer = keras.optimizers.SGD()
step = dapple.pipeline(lambda x: tf.reduce_mean(x @ weight), optimizer=optimizer, stages=1, micro_batches=1)
x = np.ones((4, 4), "float32")
step(x)
if os.fork() == 0:
    begin = time.monotonic()
    try:
        {call}
    except dapple.errors.UsageError as error:
        print(error, flush=True)
    os._exit(0 if time.monotonic() - begin < 2 else 3)
_, status = os.wait()
step(x)  # here it still runs
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run(call: str) -> str:
    return run_python("-c", FORK.replace("{call}", call)).stdout


@pytest.mark.always  # the only test of its kind
def test_a_step_in_a_forked_child_is_an_error_at_once() -> None:
    """It once waited for threads that the child does not have."""
    said = run("step(x)")
    assert "was forked from process" in said
    assert "Start processes anew (multiprocessing's 'spawn' or 'forkserver')" in said
