"""Verify steps as the ranks of a job: some equal one device, and some do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from tests.dapple_tf.verification.models import dense_layers, embeddings, numbers, repeated_ids, values

TWO_STAGES = {"stages": ["net/last"], "replicas": [1, 1], "micro_batches": 2}
TWO_REPLICAS = {"stages": 1, "replicas": [2], "micro_batches": 2}
FOUR_STAGES = {"stages": 4, "micro_batches": 2, "schedule": "interleaved-1f1b:v=2"}
SHARED_REPLICAS = {**TWO_STAGES, "replicas": [2], "schedule": "looped-bfs:v=2"}


def run(*names: str) -> dict[str, Any]:
    """Return by name what this rank was told in the cases, and whether its variables changed."""
    return {name: CASES[name]() for name in names}


def check(make: Callable[[], Any], batch: Any, jit_compile: bool = False, **options: Any) -> dict[str, Any]:
    model, loss_fn = make()
    job = current()
    assert not job.is_alone, "start it with mpirun"
    wanted = values(model)
    for variable in model.variables:
        # Other ranks have other values, as if they had drawn their own: rank 0's values must reach all.
        variable.assign(variable + tf.cast(job.rank, variable.dtype))
    loss_fn = tf.function(loss_fn, jit_compile=True) if jit_compile else loss_fn
    report = dapple.verify(loss_fn, optimizer=keras.optimizers.Adam(0.1), batch=batch, **options)
    same = all(np.array_equal(found, value) for found, value in zip(values(model), wanted, strict=True))
    return {"text": str(report), "json": report.to_json(), "rank 0's values": same}


def normalised() -> Any:
    return dense_layers(keras.layers.BatchNormalization(name="norm", dtype="float64"))


def noisy() -> Any:
    """A loss that draws numbers which no other run draws."""
    model, loss_fn = dense_layers()
    return model, lambda x, y: loss_fn(x + tf.raw_ops.RandomStandardNormal(shape=tf.shape(x), dtype=x.dtype), y)


def train_between() -> dict[str, Any]:
    """Losses of a step before and after its model is verified, and those of a step that is not."""
    losses = []
    for verifies in (True, False):
        _, loss_fn = dense_layers()
        adam = keras.optimizers.Adam(0.1)
        step = dapple.pipeline(loss_fn, optimizer=adam, **TWO_STAGES)
        step(*numbers())
        if verifies:
            report = dapple.verify(loss_fn, optimizer=adam, batch=numbers(), **TWO_REPLICAS)
            assert report.ok, str(report)
        losses.append([float(step(*numbers())) for _ in range(2)])
    return {"losses": losses}


CASES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "two stages": lambda: check(dense_layers, numbers(9), **TWO_STAGES),
    "two replicas": lambda: check(dense_layers, numbers(9), **TWO_REPLICAS),
    "four stages": lambda: check(dense_layers, numbers(9), **FOUR_STAGES),
    "two stages on each of two replicas": lambda: check(dense_layers, numbers(9), **SHARED_REPLICAS),
    "a compiled loss": lambda: check(dense_layers, numbers(), jit_compile=True, **TWO_STAGES),
    "an embedding": lambda: check(embeddings, repeated_ids(), **TWO_STAGES),
    "batch norm": lambda: check(normalised, numbers(), **TWO_STAGES),
    "batch norm, two replicas": lambda: check(normalised, numbers(), **TWO_REPLICAS),
    "deferred batch norm": lambda: check(normalised, numbers(), batch_norm="deferred", **TWO_STAGES),
    "deferred batch norm, two replicas": lambda: check(normalised, numbers(), batch_norm="deferred", **TWO_REPLICAS),
    "batch norm over two replicas": lambda: check(normalised, numbers(), batch_norm="sync", **TWO_REPLICAS),
    "noise": lambda: check(noisy, numbers(), **TWO_STAGES),
    "NaN": lambda: check(dense_layers, [tensor * float("nan") for tensor in numbers()], **TWO_STAGES),
    "training": train_between,
}
