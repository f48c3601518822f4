"""Train with AllReduce overlapped with the last backward; observe what is reduced during it."""

from __future__ import annotations

import threading
import time
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from tests.dapple_tf.distributed.programs.cases import WIDE, gradient_that_is_a_constant, momentum, overlapped
from tests.dapple_tf.distributed.programs.cases import batches as make_batches

LAYERS, MICRO_BATCHES, PATIENCE_SECONDS = 5, 2, 20.0


def run(record: str = "") -> list[str]:
    """Return the exchange completed during the last backward; Horovod records a second run in the file ``record``."""
    reduced = wait_in_backward()
    if not record:
        return reduced
    hvd.start_timeline(record)
    train(gradient_that_is_a_constant().loss_fn, make_batches()(), 1)
    hvd.stop_timeline()
    return reduced


def wait_in_backward() -> list[str]:
    """Train one step whose last backward waits before the first layer until a gradient has been reduced.

    Returns the exchange completed by then, which is no allreduce if none was completed in ``PATIENCE_SECONDS``.
    """
    job = current()
    assert not job.is_alone, "start it with mpirun"
    random = np.random.default_rng(0)
    matrices = [tf.Variable(random.normal(size=(WIDE, WIDE)) / WIDE**0.5, name=f"w{i}") for i in range(LAYERS)]
    calls, seen, done = [0], list[str](), set[str]()

    def observe() -> None:
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

    observing = threading.Thread(target=observe, daemon=True)
    observing.start()
    train(loss_fn, make_batches((4,), width=WIDE)(), MICRO_BATCHES)
    return seen


def train(loss_fn: Any, batches: Any, micro_batches: int) -> None:
    """Train on the batches with data parallelism, AllReduce overlapped."""
    size = int(batches[0][0].shape[0])
    options = {"inexact": "allow"}  # a custom gradient runs Python code
    whole = dapple.pipeline(
        loss_fn, optimizer=momentum(), stages=1, replicas=[2], micro_batches=micro_batches, **options
    )
    whole.build(*batches[0])
    plan = overlapped(2, micro_batches=micro_batches, ends=[whole.plan.stages[-1].last_layer], samples=size)
    step = dapple.pipeline(loss_fn, optimizer=momentum(), **plan, **options)
    for batch in batches:
        step(*batch)
