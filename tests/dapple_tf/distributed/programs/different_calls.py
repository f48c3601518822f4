"""Train equally on all ranks until the last rank makes another call; print the time at which it does.

``python -m tests.dapple_tf.distributed.programs.different_calls CALL STAGES REPLICAS [FOLDER]``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.distributed.membership import current
from tests.equality.small_models import chain, data, sgd, weights


def main(call: str, stages: int, replicas: int, folder: str) -> None:
    """Run equal steps, the call that differs, and more equal steps."""
    dapple.init()
    job = current()
    assert not job.is_alone, "start it with mpirun"
    matrices = weights(4)
    plain = chain(matrices)
    options: Any = {"stages": stages, "replicas": [replicas] * stages, "micro_batches": 2}

    def loss_fn(x: Any, y: Any) -> Any:
        return plain(tf.cast(x, tf.float64), tf.cast(y, tf.float64))

    step = dapple.pipeline(loss_fn, optimizer=sgd(), **options)
    other = dapple.pipeline(loss_fn, optimizer=sgd(), **options) if call == "other step" else step
    differs = job.rank == job.size - 1
    x, y = data(16)
    for _ in range(5):
        step(x, y)
        other(x, y)

    if call == "forward":
        step.forward(x, y)  # traces it, and is no step

    def step_with_checks() -> None:
        step.check_numerics = True
        step(x, y)

    calls: Mapping[str, Callable[[], Any]] = {
        "fewer samples": lambda: step(x[:8], y[:8]),
        "other dtype": lambda: step(tf.cast(x, tf.float32), tf.cast(y, tf.float32)),
        "other step": lambda: other(x, y),
        "gather": lambda: step.gather(),
        "forward": lambda: step.forward(x, y),
        "check numerics": step_with_checks,
        "fewer samples, then save": lambda: step(x, y),
    }
    saving = Checkpoints(folder, step) if call == "fewer samples, then save" else None
    print(time.time(), flush=True)
    if saving is not None:  # right after a step with another batch
        step(x, y) if differs else step(x[:8], y[:8])
        saving.save(11)
    calls[call]() if differs else step(x, y)
    for _ in range(100_000):
        step(x, y)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if sys.argv[4:] else "")
