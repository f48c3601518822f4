"""Train as a rank whose AllReduce overlaps the last backward; print, as JSON, what was reduced during it."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import dapple_tf as dapple

dapple.init()

import horovod.tensorflow as hvd  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from dapple_tf.distributed.membership import current  # noqa: E402
from tests.dapple_tf.distributed.programs.cases import WIDE, gradient_that_is_a_constant, momentum, overlapped  # noqa: E402
from tests.dapple_tf.distributed.programs.cases import batches as make_batches  # noqa: E402

LAYERS, MICRO_BATCHES, PATIENCE_SECONDS = 5, 2, 20.0


def wait_in_backward() -> list[str]:
    """Train one step whose last backward waits before the first layer until a gradient has been reduced.

    Returns the exchange completed by then, which is no allreduce if none was completed in ``PATIENCE_SECONDS``.
    """
    job = current()
    assert job is not None, "start it with mpirun"
    random = np.random.default_rng(0)
    matrices = [tf.Variable(random.normal(size=(WIDE, WIDE)) / WIDE**0.5, name=f"w{i}") for i in range(LAYERS)]
    calls, seen, done = [0], list[str](), set[str]()

    def look() -> None:
        """Note the completed exchanges: the progress has only the last, and the next may follow soon."""
        while not seen:
            done.add(job.progress.status().exchange)
            time.sleep(0.0002)

    def wait(gradient: Any) -> Any:
        calls[0] += 1
        if calls[0] % MICRO_BATCHES == 0:
            end = time.monotonic() + PATIENCE_SECONDS
            while not any("allreduce" in name for name in done) and time.monotonic() < end:
                time.sleep(0.001)
            seen.append(max(done, key=lambda name: "allreduce" in name))
        return gradient

    def wait_for_reduction(value: Any) -> Any:
        def grad(upstream: Any) -> Any:
            # Not stateful: otherwise the outputs of every function would wait for it.
            waited = tf.numpy_function(wait, [upstream], upstream.dtype, stateful=False)
            return tf.ensure_shape(waited, upstream.shape)

        return tf.identity(value), grad

    def loss_fn(x: Any, y: Any) -> Any:
        h = x
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                h = tf.tanh(h @ matrix)
                h = tf.custom_gradient(wait_for_reduction)(h) if i == 0 else h
        return tf.reduce_mean(tf.square(h - y))

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    run(loss_fn, make_batches((4,), width=WIDE)(), MICRO_BATCHES)
    return seen


def run(loss_fn: Any, batches: Any, micro_batches: int) -> None:
    """Train on the batches with data parallelism, AllReduce overlapped."""
    size = int(batches[0][0].shape[0])
    whole = dapple.pipeline(loss_fn, optimizer=momentum(), stages=1, replicas=[2], micro_batches=micro_batches)
    whole.build(*batches[0])
    plan = overlapped(2, micro_batches=micro_batches, ends=[whole.plan.stages[-1].last_layer], samples=size)
    step = dapple.pipeline(loss_fn, optimizer=momentum(), **plan)
    for batch in batches:
        step(*batch)


if __name__ == "__main__":
    found = wait_in_backward()
    run(gradient_that_is_a_constant().loss_fn, make_batches()(), 1)
    print(json.dumps({"seen": found}), flush=True)
    hvd.allreduce(tf.zeros([1]), name="end")  # a rank that leaves early ends Horovod on all ranks
