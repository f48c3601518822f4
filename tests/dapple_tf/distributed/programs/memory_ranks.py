"""Run as two ranks by test_memory: record steps, and say what the report has of each."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple

dapple.init()

from dapple_tf.distributed.membership import current  # noqa: E402

ROWS, WIDTH, MICRO_BATCHES = 1024, 256, 10


def main() -> None:
    """Print this rank's report as one JSON object."""
    job = current()
    assert job is not None
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
    for _ in range(3):
        step.record(batch)
    print(json.dumps({"text": str(step.report), **step.report.to_json()}))
    job.gather(None)  # all have finished


if __name__ == "__main__":
    main()
