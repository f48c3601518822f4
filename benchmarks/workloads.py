"""The models that are timed: a stack of dense layers, and the gpt that ``make train`` trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf import Workload
from dapple_tf.examples.gpt import gpt


@dataclass(frozen=True)
class Timed:
    """A workload and one batch of it."""

    workload: Workload
    batch: tuple[Any, ...]

    def pipeline(self, **options: Any) -> Any:
        """Return a pipelined step of the workload, with these options of ``dapple.pipeline``."""
        return dapple.pipeline(self.workload.loss_fn, optimizer=self.workload.optimizer, **options)


def dense(layers: int = 8, width: int = 1024, batch_size: int = 2048) -> Timed:
    """Return ``layers`` dense layers of ``width``: large matrix products, beside which other ops take no time."""
    generator = np.random.default_rng(0)
    stack = [keras.layers.Dense(width, activation="relu", name=f"dense_{i}") for i in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *stack])

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x) - y))

    x, y = (tf.constant(generator.normal(size=(batch_size, width)), tf.float32) for _ in range(2))
    return Timed(Workload(loss_fn, keras.optimizers.SGD(0.01), [(x, y)]), (x, y))


def small_gpt(batch_size: int = 64) -> Timed:
    """Return the model of ``make train`` and one batch."""
    workload = gpt(batch_size=batch_size)
    return Timed(workload, next(iter(workload.dataset)))


MODELS = {"dense": dense, "gpt": small_gpt}
