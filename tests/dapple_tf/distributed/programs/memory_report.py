"""Record steps of a model with large activations: the report of the memory of all ranks, and bytes in flight."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from dapple_tf.memory.meter import MemoryMeter

ROWS, WIDTH, MICRO_BATCHES = 1024, 256, 10


@contextlib.contextmanager
def late_meter(seconds: float) -> Iterator[None]:
    """Delay the start of each measurement of memory in this context: another rank could send tensors before it."""
    start = MemoryMeter.__enter__

    def start_late(meter: MemoryMeter) -> MemoryMeter:
        time.sleep(seconds)
        return start(meter)

    with mock.patch.object(MemoryMeter, "__enter__", start_late):
        yield


def run() -> dict[str, Any]:
    """Return this rank's report, as text and as JSON; ``in_flight``: bytes of native messages, None without them."""
    job = current()
    assert not job.is_alone
    stack = [keras.layers.Dense(WIDTH, activation="relu", name=f"d{i}") for i in range(8)]
    model = keras.Sequential([keras.Input((WIDTH,)), *stack])
    batch = tf.constant(np.ones((MICRO_BATCHES * ROWS, WIDTH), np.float32))
    step = dapple.pipeline(
        lambda x: tf.reduce_mean(tf.square(model(x))),
        optimizer=keras.optimizers.SGD(0.01),
        stages=["d4"],
        micro_batches=MICRO_BATCHES,
        schedule="K=9,8",
    )
    with late_meter(0.5 * job.rank):
        for _ in range(3):
            step.record(batch)
    network = job.exchange_network
    in_flight = None if network is None else network.library.take_peak_bytes()
    return {"in_flight": in_flight, "report": {"text": str(step.report), **step.report.to_json()}}
