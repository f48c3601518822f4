"""One rank of a small job whose last rank acts on its own: ``differ.py HOW STAGES REPLICAS [FOLDER]``.

Every rank prints the time of what differs.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.checkpoint.checkpoints import Checkpoints
from tests.equality.small_models import chain, data, sgd, weights


def main(how: str, stages: int, replicas: int) -> None:
    """Equal steps, then what differs, then more equal ones."""
    dapple.init()
    matrices = weights(4)
    plain = chain(matrices)
    options: Any = {"stages": stages, "replicas": [replicas] * stages, "micro_batches": 2}

    def loss_fn(x: Any, y: Any) -> Any:
        return plain(tf.cast(x, tf.float64), tf.cast(y, tf.float64))

    step = dapple.pipeline(loss_fn, optimizer=sgd(), **options)
    other = dapple.pipeline(loss_fn, optimizer=sgd(), **options) if how == "step" else step
    size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    last = int(os.environ["OMPI_COMM_WORLD_RANK"]) == size - 1
    x, y = data(16)
    for _ in range(5):
        step(x, y)
        other(x, y)
    ways = {
        "samples": lambda: step(x[:8], y[:8]),
        "dtype": lambda: step(tf.cast(x, tf.float32), tf.cast(y, tf.float32)),
        "step": lambda: other(x, y),
        "gather": lambda: step.gather(),
        "checks": lambda: check(step, x, y),
    }
    saving = Checkpoints(sys.argv[4], step) if how == "save" else None
    print(time.time(), flush=True)
    if saving is not None:  # at once after other batches
        step(x, y) if last else step(x[:8], y[:8])
        saving.save(11)
    ways[how]() if last else step(x, y)
    for _ in range(100_000):
        step(x, y)


def check(step: Any, x: Any, y: Any) -> None:
    """A step that checks numerics, here only."""
    step.check_numerics = True
    step(x, y)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
