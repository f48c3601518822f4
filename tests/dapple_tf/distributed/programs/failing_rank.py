"""Train until one rank fails: ``python -m tests.dapple_tf.distributed.programs.failing_rank FAILURE RANK STAGES``.

With the failure "in a sum" the ranks are replicas of one stage, and STAGES is their number.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import Job, current
from tests.equality.small_models import chain, data, sgd, weights


def main(failure: str, failing_rank: int, stages: int) -> None:
    """Train; after five steps ``failure`` happens to ``failing_rank``."""
    dapple.init()
    job = current()
    assert not job.is_alone, "start it with mpirun or horovodrun"
    loss_fn = chain(weights(4))

    def checked(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.debugging.check_numerics(loss_fn(x, y), "bad loss")

    in_windows, in_a_loop = failure == "bad minibatch", failure == "bad micro-batch"
    how = {"mode": "async", "minibatches": 8} if in_windows else {"micro_batches": 20 if in_a_loop else 4}
    loss = checked if in_windows or in_a_loop or failure == "bad data" else loss_fn
    if failure == "in a sum":
        loss = slow_on_rank_0(loss_fn, job)
        how |= {"replicas": [stages], "inexact": "allow"}  # that Python code treats samples one by one is not known
        stages = 1
    step = dapple.pipeline(loss, optimizer=sgd(), stages=stages, **how)
    step.check_numerics = failure == "not finite"
    x, y = data(20 if in_a_loop else 16)
    bad = x.numpy()
    if in_windows:
        bad[10] = np.nan  # in minibatch 5
    elif in_a_loop:
        bad[13] = np.nan  # micro-batch 13
    elif failure in ("bad data", "not finite"):
        bad *= np.nan
    for number in range(1, 100_000):
        step(bad if number == 6 else x, y)
        if number == 5 and job.rank == failing_rank:
            fail(failure)
        if number == 5 and failure == "none":
            break
    print("done")


def slow_on_rank_0(loss_fn: Any, job: Job) -> Any:
    """Return the loss function; on rank 0 each step after the fifth takes two seconds longer than on other ranks."""

    def wait(value: Any) -> Any:
        if job.rank == 0 and job.progress.step > 5:
            time.sleep(0.5)  # in each micro-batch
        return value

    def slow(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        waited = tf.numpy_function(wait, [x], x.dtype, stateful=False)
        return loss_fn(tf.ensure_shape(waited, x.shape), y)

    return slow


def die_in_a_sum() -> None:
    """Kill this process when it waits for another rank in a ring: the others are in it, or will be."""
    network = current().exchange_network
    while not any("allreduce, round" in name for names in network.library.find_waits(0.1).values() for name in names):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(failure: str) -> None:
    """Print the time, and fail: by a signal in half a second, when a step runs, or now."""
    print(time.time(), flush=True)
    if failure == "in a sum":
        threading.Thread(target=die_in_a_sum, daemon=True).start()
    elif failure.startswith("SIG"):
        threading.Timer(0.5, os.kill, (os.getpid(), getattr(signal, failure))).start()
    elif failure == "Ctrl-C":  # at the terminal: mpirun gets it
        threading.Timer(0.5, os.kill, (os.getppid(), signal.SIGINT)).start()
    elif failure == "raise":
        raise KeyError("no such sample")
    elif failure == "exit":
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
