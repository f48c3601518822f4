"""Save a checkpoint under one plan, and go on from it under another one.

Run it with ``python examples/resume_under_another_plan.py``.

A checkpoint holds the variables of the model and of the optimizer by name. It does not know of stages, so a run of two
stages can be resumed with three stages, with replicas, or as another number of ranks. It prints how far each run went
and compares the trained weights with those of a run that was not interrupted.
"""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple

STEPS = 12


def train(folder: str, steps: int, **plan: Any) -> list[np.ndarray]:
    """Train until step ``steps``, from the checkpoint in ``folder`` where there is one; return the weights."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, "tanh", name=f"dense_{i}") for i in range(4)]
    # The names of the variables must be the same in both runs: give the model a name, or Keras numbers its models.
    model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1, name="output")], name="model")

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    numbers = np.random.default_rng(0).normal(size=(STEPS, 12, 5)).astype("float32")
    batches = [(rows[:, :4], rows[:, 4:]) for rows in numbers]
    step = dapple.pipeline(
        loss_fn, optimizer=keras.optimizers.Adam(0.01), micro_batches=4, example_batch=batches[0], **plan
    )
    checkpoints = dapple.Checkpoints(folder, step)
    done = checkpoints.restore()
    for batch in batches[done.batches : steps]:
        loss = step(*batch)
    checkpoints.save(steps)
    print(f"replicas {step.plan.replicas}: steps {done.steps + 1} to {steps}, loss {float(loss):.6f}")
    return [variable.numpy() for variable in model.trainable_variables]


def main() -> None:
    """Interrupt a run at half of its steps."""
    dapple.init()
    with tempfile.TemporaryDirectory() as folder:
        whole = train(f"{folder}/whole", STEPS, stages=2)
        train(f"{folder}/run", STEPS // 2, stages=2)
        resumed = train(f"{folder}/run", STEPS, stages=["dense_1", "output"], replicas=[2, 1, 1])
    error = max(float(np.abs(a - b).max()) for a, b in zip(whole, resumed, strict=True))
    print(f"largest difference of a weight from the uninterrupted run: {error:.1e}")


if __name__ == "__main__":
    main()
