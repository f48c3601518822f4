"""One rank of a small job that trains until something happens to one of its ranks: ``fail.py WHAT RANK STAGES``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed import membership
from tests.equality.small_models import chain, data, sgd, weights


def main(what: str, victim: int, stages: int) -> None:
    """Train; after some steps ``what`` happens to ``victim``."""
    dapple.init()
    matrices = weights(4)
    loss_fn = chain(matrices)
    job = membership.current()
    assert job is not None, "start it with mpirun or horovodrun"

    def checked(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.debugging.check_numerics(loss_fn(x, y), "bad loss")

    bad = what in ("bad-data", "not-finite")

    step = dapple.pipeline(checked if what == "bad-data" else loss_fn, optimizer=sgd(), stages=stages, micro_batches=4)
    step.check_numerics = what == "not-finite"
    hit = job.rank == victim
    x, y = data(16)
    for number in range(1, 100_000):
        step(x * np.nan if bad and number == 6 else x, y)
        if number == 5 and hit:
            happen(what)
        if number == 5 and what == "nothing":
            break
    print("done")


def happen(what: str) -> None:
    """Do it to this process: a signal in half a second, when a step runs, else now; the time is printed."""
    print(time.time(), flush=True)
    if what.startswith("SIG"):
        threading.Timer(0.5, os.kill, (os.getpid(), getattr(signal, what))).start()
    elif what == "ctrl-c":  # at the terminal: mpirun gets it
        threading.Timer(0.5, os.kill, (os.getppid(), signal.SIGINT)).start()
    elif what == "raise":
        raise KeyError("no such sample")
    elif what == "exit":
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
