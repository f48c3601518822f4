"""PipeDream's claim: with weight stashing a pipeline converges as synchronous training does, and without it worse.

A noisy regression with a falling learning rate; the loss is that of samples that are not trained on.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple

STAGES, MINIBATCHES, SAMPLES, WINDOWS, WIDTH = 4, 32, 8, 12, 12


def train(kind: str) -> float:
    """Return the loss of held-out samples after all windows; ``kind``: "sync", or the weights of windows."""
    random = np.random.default_rng(3)
    matrices = [tf.Variable(random.normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5, name=f"w{i}") for i in range(STAGES)]
    teacher = [random.normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5 for _ in range(2)]

    def sample(count: int) -> tuple[Any, Any]:
        x = random.normal(size=(count, WIDTH))
        return x, np.tanh(x @ teacher[0]) @ teacher[1] + 0.3 * random.normal(size=(count, WIDTH))

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = x @ matrix
                x = tf.tanh(x) if i + 1 < STAGES else x
        return tf.reduce_mean(tf.square(x - y))

    rate = keras.optimizers.schedules.CosineDecay(0.4, WINDOWS * MINIBATCHES)
    options: dict[str, Any] = (
        {"micro_batches": 2} if kind == "sync" else {"mode": "async", "minibatches": MINIBATCHES, "weights": kind}
    )
    step = dapple.pipeline(
        loss_fn,
        optimizer=keras.optimizers.SGD(rate, momentum=0.9),
        stages=[f"layer{i}" for i in range(1, STAGES)],
        **options,
    )
    held_out = sample(2000)
    for _ in range(WINDOWS):
        x, y = sample(MINIBATCHES * SAMPLES)
        if kind == "sync":
            for m in range(0, len(x), SAMPLES):
                step(x[m : m + SAMPLES], y[m : m + SAMPLES])
        else:
            step(x, y)
    return float(loss_fn(*held_out))


def test_stashing_converges_as_synchronous_training_and_no_stashing_does_not() -> None:
    losses = {kind: train(kind) for kind in ("sync", "stash", "latest")}
    assert losses["stash"] == pytest.approx(losses["sync"], rel=0.02)
    assert losses["latest"] > 1.02 * losses["stash"]
