"""On two ranks: the memory that a rank's variables take, and two steps of different plans that train one model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from tests.dapple_tf.distributed.programs.held_variable_models import (
    LARGE,
    X,
    loss_of,
    make_dense,
    make_large,
    optimizers,
)


def run(folder: str) -> dict[str, Any]:
    """Return what this rank observed; the model is saved in ``folder``."""
    job = current()
    assert not job.is_alone
    return {"resident": train_large_model(), **train_by_two_steps(Path(folder), job.rank)}


def train_large_model() -> dict[str, int]:
    """Return by how many bytes the resident set has grown since before the model was made."""
    x = tf.ones((2, LARGE))
    before = resident_bytes()
    loss, optimizer = make_large()
    # The schedule is given: to choose one, rank 0 compiles code, which takes memory of its own.
    options = {"stages": ["layer3"], "micro_batches": 1, "schedule": "dapple-a"}
    step = dapple.pipeline(loss, optimizer=optimizer, **options, example_batch=(x,))
    found = {"built": resident_bytes() - before}
    step(x)
    step(x)
    found["trained"] = resident_bytes() - before
    step.gather()
    found["gathered"] = resident_bytes() - before
    step(x)
    found["trained again"] = resident_bytes() - before
    return found


def resident_bytes() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train_by_two_steps(folder: Path, rank: int) -> dict[str, Any]:
    """Return the losses of two steps called alternately, and the layers that this rank can read after each."""
    model = make_dense()
    if rank == 0:
        model.save(folder / "initial.keras")  # the values that all ranks start from
    first, second = optimizers()
    one = dapple.pipeline(loss_of(model), optimizer=first, stages=["dense_1"], micro_batches=2)
    losses = [float(one(X)), float(one(X))]
    readable = [readable_layers(model)]
    other = dapple.pipeline(loss_of(model), optimizer=second, stages=["dense_3"], micro_batches=2, example_batch=(X,))
    readable.append(readable_layers(model))
    for step in (other, other, one, other, one):
        losses.append(float(step(X)))
        readable.append(readable_layers(model))
    for layer in model.layers:  # assign to all, as load_weights does: on other ranks the values must be dropped again
        if not layer.kernel.value.is_initialized():
            layer.kernel.assign(tf.zeros(layer.kernel.shape, layer.kernel.dtype))
    losses.append(float(one(X)))
    readable.append(readable_layers(model))
    try:
        model.save(folder / "early.keras")
        error_text = "nothing was raised"
    except tf.errors.FailedPreconditionError as error:
        error_text = str(error)
    one.gather()
    model.save(folder / f"{rank}.keras")
    readable.append(readable_layers(model))
    return {"losses": losses, "readable": readable, "save error": error_text}


def readable_layers(model: keras.Model) -> list[int]:
    """Return the numbers of the layers whose weights this rank can read."""
    return [i for i, layer in enumerate(model.layers) if layer.kernel.value.is_initialized()]
