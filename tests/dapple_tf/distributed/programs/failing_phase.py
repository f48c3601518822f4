"""Train a step whose second phase fails on the last stage, as a rank of a job."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from tests.equality.training_steps import mlp, mse
from tests.floats import in_float64


def main() -> None:
    """Run one step, which fails."""
    dapple.init()
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, model(x))
        optimizer.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            other = mse(y, tf.debugging.check_numerics(tf.math.log(model(x) - 1e6), "a logarithm"))
        optimizer.apply(tape.gradient(other, variables), variables)
        return loss

    rng = np.random.default_rng(0)
    step = dapple.train_step(train_step, stages=2, micro_batches=3)
    step(tf.constant(rng.normal(size=(12, 4))), tf.constant(rng.normal(size=(12, 1))))


if __name__ == "__main__":
    with in_float64():
        main()
