"""Equal batches on all ranks of a job: random shuffles begin from the same seeds, and batches are compared."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.distributed.digest import digest_tensors
from dapple_tf.distributed.membership import Job


def align_randomness(job: Job) -> None:
    """Give every rank rank 0's state of Python's and NumPy's random numbers, and one seed to TensorFlow.

    Data sets are shuffled with these. A seed that the user has given TensorFlow stays; every rank must call this.
    Raises JobError where the ranks were given different ones.
    """
    own = random.getstate(), np.random.get_state(), int.from_bytes(os.urandom(3), "big")
    python, numpy, seed = job.broadcast(own)
    random.setstate(python)
    np.random.set_state(numpy)
    if job.agree("seed of tf.random.set_seed", internals.global_seed()) is None:
        tf.random.set_seed(seed)


class BatchCheck:
    """Compares a batch of every epoch with the other ranks': they must all read the same data, in the same order.

    So must be the learning rates of the ``optimizer``.
    """

    def __init__(self, job: Job, optimizer: Any) -> None:
        self._job = job
        self._optimizer = optimizer
        self._expected = True

    def expect(self) -> None:
        """Compare the next batch."""
        self._expected = True

    def __call__(self, tensors: dict[str, Any]) -> None:
        """Raise JobError on every rank where a batch is to be compared and differs; every rank must call this."""
        if self._expected:
            self._expected = False
            what = "first batch of the epoch (seed the data set's shuffle alike on all ranks)"
            rates = [float(v.numpy()) for v in self._optimizer.variables if v.name == "learning_rate"]
            self._job.agree(what, digest_tensors(tensors)[:16])
            self._job.agree("learning rate (set it on every rank)", rates)
