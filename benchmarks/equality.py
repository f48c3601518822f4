"""Errors against one device: loss, gradients and variables of whole models after one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from benchmarks.common import Row
from dapple_tf.examples.gpt import gpt
from dapple_tf.verification import TOLERANCE

APPLICATIONS = ("MobileNetV2", "ResNet50", "DenseNet121", "VGG16")


def run() -> Iterator[Row]:
    """Yield keras.applications at 32x32 (batch norm in inference mode) and the gpt, in both precisions."""
    for dtype in ("float64", "float32"):
        for name in APPLICATIONS:
            yield _row(f"{name}, {dtype}", dtype, *_application(name, dtype))
        for tied in (False, True):
            workload = gpt(layers=4, batch_size=12, tied=tied, dtype=dtype)
            batch = next(iter(workload.dataset))
            yield _row(f"gpt{' tied' if tied else ''}, {dtype}", dtype, workload.loss_fn, batch)


def _application(name: str, dtype: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(input_shape=(32, 32, 3), weights=None, classes=10)
    keras.config.set_dtype_policy("float32")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(12, 32, 32, 3)).astype(dtype)
    y = generator.integers(0, 10, size=12)

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x, training=False)))

    return loss_fn, (x, y)


def _row(figure: str, dtype: str, loss_fn: Callable[..., Any], batch: tuple[Any, ...]) -> Row:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    report = dapple.verify(loss_fn, optimizer=optimizer, batch=batch, stages=3, replicas=[1, 2, 1], micro_batches=4)
    worst = max(report.max_loss_error, report.max_gradient_error, report.max_variable_error)
    measured = (
        f"loss {report.max_loss_error:.0e}, gradients {report.max_gradient_error:.0e}, "
        f"variables {report.max_variable_error:.0e}"
    )
    return Row(
        f"{figure}: S = 3, replicas 1, 2, 1, M = 4",
        f"at most {TOLERANCE[dtype]:.0e}",
        measured,
        worst <= TOLERANCE[dtype],
    )


if __name__ == "__main__":
    dapple.init(8)
    for row in run():
        print(row)
