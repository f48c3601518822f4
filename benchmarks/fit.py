"""Compare Keras's ``fit`` with a bare loop of steps, and ``fit`` on a slow data set with ``fit`` on data in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores, time_interleaved

LAYERS, WIDTH, BATCH, STEPS, ROUNDS = 4, 512, 1024, 10, 9
LONG_STEPS, LONG_ROUNDS = 100, 5  # epochs so long that what fit does at their begin and end hardly counts
STEP_SECONDS = 0.04  # about the time of a step: a trial chooses the batch, a multiple of BATCH, for it
PIPELINE: Any = {"stages": 2, "micro_batches": 4}


def run() -> Iterator[Row]:
    """Yield the rows, measured in one process on two cores."""
    yield from (Row(**row) for row in run_on_cores("benchmarks.fit", available_cores()[:2]))


def measure() -> list[Row]:
    """Time in turn epochs of ``fit`` and loops of as many steps, on equal models."""
    fitted, bare = make_model(), make_model()
    dapple.keras.pipeline(fitted, **PIPELINE)
    mean_squared_error = keras.losses.MeanSquaredError()  # the loss that compile uses, so that both have the same ops

    def loss_fn(x: Any, y: Any) -> Any:
        return mean_squared_error(y, bare(x, training=True))

    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.01), **PIPELINE)

    def loop(data: Any) -> None:
        for x, y in data:
            float(step(x, y))

    small = make_data(BATCH, STEPS)
    trial = median(time_interleaved({"loop": lambda: loop(small)}, 3)["loop"][1:]) / STEPS
    samples = BATCH * max(1, round(STEP_SECONDS / trial))
    rows = []
    for steps, rounds in ((LONG_STEPS, LONG_ROUNDS), (STEPS, ROUNDS)):
        repeated = make_data(samples, steps)
        taken = time_interleaved({"fit": partial(fit, fitted, repeated), "loop": partial(loop, repeated)}, rounds + 1)
        ratio = median([a / b for a, b in zip(taken["fit"][1:], taken["loop"][1:], strict=True)])
        seconds = median(taken["loop"][1:]) / steps
        measured = f"{ratio - 1:+.1%} ({median(taken['fit'][1:]) / steps * 1e3:.1f} ms, {seconds * 1e3:.1f} ms a step)"
        figure = f"fit over a bare loop of steps, batches of {samples}, epochs of {steps} steps"
        rows.append(Row(figure, "at most +2%", measured, ratio <= 1.02))

    slow = repeated.map(lambda x, y: (wait(x, seconds), y))
    ways = {"memory": partial(fit, fitted, repeated), "slow": partial(fit, fitted, slow)}
    time_interleaved(ways, 1)
    taken = time_interleaved(ways, ROUNDS)
    # No step runs while the first batch of an epoch is read, so its time is left out.
    ratio = median([(b - seconds) / a for a, b in zip(taken["memory"], taken["slow"], strict=True)])
    per_step = ", ".join(f"{median(taken[name]) / STEPS * 1e3:.1f} ms" for name in ("slow", "memory"))
    figure = "fit on data that take as long as the step, but for the first batch, over fit on data in memory"
    return [*rows, Row(figure, "hidden: at most +5%", f"{ratio - 1:+.1%} ({per_step} a step)", ratio <= 1.05)]


def fit(model: Any, data: tf.data.Dataset) -> None:
    """Train for an epoch, without printed progress."""
    model.fit(data, verbose=0)


def make_data(samples: int, steps: int) -> tf.data.Dataset:
    """Return a data set of ``steps`` equal batches of random rows.

    Autotuning is off, because a loop waits at its end for the thread that tunes its data set.
    """
    x, y = (np.random.default_rng(0).normal(size=(samples, WIDTH)).astype(np.float32) for _ in range(2))
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors((tf.constant(x), tf.constant(y))).repeat(steps).with_options(options)


def make_model() -> Any:
    """Return a compiled stack of dense layers."""
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(WIDTH, activation="relu", name=f"dense_{i}") for i in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *stack])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def wait(value: Any, seconds: float) -> Any:
    """Return the tensor after ``seconds``, as if it were read from a slow disk."""

    def after(array: Any) -> Any:
        time.sleep(seconds)
        return array

    return tf.ensure_shape(tf.numpy_function(after, [value], value.dtype), value.shape)


if __name__ == "__main__":
    dapple.init(2)
    print_rows(measure())
