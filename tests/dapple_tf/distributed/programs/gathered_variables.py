"""Train, gather and checkpoint on three ranks; try folders and files that cannot be used."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.distributed.membership import current
from dapple_tf.errors import CheckpointError
from tests.dapple_tf.distributed.programs.captured import captured_names
from tests.dapple_tf.distributed.programs.tied_model import X, make_model


def run(path: str) -> dict[str, Any]:
    """Return the values that this rank can read after each action, and its errors; ``path``: a folder for files."""
    folder, job = Path(path), current()
    assert not job.is_alone
    loss, optimizer, made = make_model()
    sums = tf.function(lambda: tf.add_n([tf.reduce_sum(made[f"w{i}"]) for i in range(3)]))
    sums()  # traced before there is any plan
    step = dapple.pipeline(
        loss, optimizer=optimizer, stages=["layer2"], replicas=[1, 2], micro_batches=2, example_batch=(X,)
    )
    seen: dict[str, Any] = {"built": sorted(readable_values(step)), "captured": captured_names(step, step.variables)}
    for _ in range(3):
        step(X)
    seen["trained"] = readable_values(step)
    seen["read errors"] = [error_of(made["w0" if job.rank else "w2"].numpy), error_of(sums)]

    seen["errors"] = [error_of(lambda: Checkpoints("/proc/none", step))]
    saving = Checkpoints(folder, step)
    saving.save(1)
    if job.rank == 0:
        os.mkdir(folder / "checkpoint-9.safetensors")
    seen["errors"].append(error_of(lambda: saving.save(4)))  # rank 0 fails; the others have sent their values
    seen["saved"] = sorted(readable_values(step))  # rank 0 does not keep the other ranks' values
    step.gather()
    seen["gathered"] = readable_values(step)
    seen["sum"] = float(sums())

    seen["errors"].append(error_of(saving.restore))
    if job.rank == 0:
        os.rmdir(folder / "checkpoint-9.safetensors")
    checkpoint = Path(saving.save(3))
    if job.rank == 0:
        checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    for variable in step.variables.values():
        variable.assign(variable * 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen["position"] = saving.restore().steps
    seen["warnings"] = [str(warning.message) for warning in caught]
    seen["restored"] = readable_values(step)

    step(X)
    seen["trained again"] = sorted(readable_values(step))
    step.gather()
    seen["one more step"] = readable_values(step)
    step(X)
    saving.restore()  # into the variables that each rank holds
    seen["restored on their ranks"] = sorted(readable_values(step))
    step.gather()
    seen["restored and gathered"] = readable_values(step)
    return seen


def readable_values(step: Any) -> dict[str, Any]:
    """Return the value of every variable that this rank can read."""
    found = {}
    for name, variable in step.variables.items():
        try:
            found[name] = np.asarray(variable.numpy(), np.float64).tolist()
        except tf.errors.FailedPreconditionError:
            continue
    return found


def error_of(call: Any) -> str:
    """Return the message of the error that ``call`` raises."""
    try:
        call()
    except (CheckpointError, tf.errors.FailedPreconditionError) as error:
        return str(error)
    return "nothing was raised"
