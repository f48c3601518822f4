"""Gradients by name on the ranks of a job: those of all stages, on every rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from dapple_tf.distributed.variable_transfer import gather_arrays
from tests.dapple_tf.distributed.programs.tied_model import X, make_model


def run() -> dict[str, Any]:
    """Return the loss and gradients of two stages, the second on two ranks, and those of a tape over the batch."""
    loss_fn, _, made = make_model()
    weights = [made[f"w{i}"] for i in range(3)]
    with tf.GradientTape() as tape:
        expected = loss_fn(X)
    wanted = tape.gradient(expected, weights)
    step = dapple.pipeline(
        loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=["layer2"], replicas=[1, 2], micro_batches=2
    )
    loss, gradients = step.run_exposed(X)
    return {
        "loss": [float(loss), float(expected)],
        "found": {name: gradient.tolist() for name, gradient in gradients.items()},
        "wanted": {f"w{i}": gradient.numpy().tolist() for i, gradient in enumerate(wanted)},
        "arrays": describe(gather_arrays_of_all_kinds()),
    }


def gather_arrays_of_all_kinds() -> dict[str, Any]:
    """Every rank has an array of its own, and one whose name rank 1 and rank 2 share; rank 0 has the most kinds."""
    job = current()
    assert not job.is_alone, "start it with horovodrun"
    own: dict[str, Any] = {f"rank {job.rank}": np.full(job.rank, job.rank)}
    if job.rank:
        own["shared"] = np.array([job.rank])
    else:
        own |= {"scalar": np.array(0.5), "bool": np.array([True, False]), "empty": np.zeros((0, 3), np.float32)}
        own["bfloat16"] = tf.constant([1.5, -2.0], tf.bfloat16).numpy()
        own["large"] = np.arange(2**17, dtype=np.float64).reshape(-1, 4)
    return gather_arrays(job, own)


def describe(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return dtype, shape and sum of each array, in the order in which they came."""
    return {name: [a.dtype.name, list(a.shape), float(a.astype("float64").sum())] for name, a in arrays.items()}
