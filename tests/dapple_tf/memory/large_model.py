"""A program: two dense layers of more weights than its process may hold, made in ``dapple.scope()``."""

from __future__ import annotations

import resource

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple

WIDTH = 20_000  # a layer has 1.6 GB of weights
MOST = 3 * 10**9  # bytes that the process may allocate


def main() -> None:
    """Build a step, and print so where that is possible."""
    dapple.init(2)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST, MOST))
    with dapple.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, name=f"d{i}") for i in range(2))])
    step = dapple.pipeline(
        lambda x: tf.reduce_mean(model(x)),
        optimizer=keras.optimizers.SGD(momentum=0.9),
        stages=["d1"],
        micro_batches=2,
        schedule="dapple-a",
    )
    step.build(np.zeros((4, WIDTH), "float32"))
    print("built")


if __name__ == "__main__":
    main()
