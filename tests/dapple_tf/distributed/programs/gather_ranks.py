"""Run as ranks by test_job_checkpoint: train, gather, and try the folders and files that cannot be used."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import dapple_tf as dapple

dapple.init()

import numpy as np  # after the job is joined  # noqa: E402
import tensorflow as tf  # noqa: E402

from dapple_tf.checkpoint.checkpoints import Checkpoints  # noqa: E402
from dapple_tf.distributed.membership import current  # noqa: E402
from dapple_tf.errors import CheckpointError  # noqa: E402
from tests.dapple_tf.distributed.programs.gather_model import X, make_model  # noqa: E402


def main() -> None:
    """Print, as one JSON object, what this rank saw."""
    folder, job = Path(sys.argv[1]), current()
    assert job is not None
    loss, optimizer, made = make_model()
    sums = tf.function(lambda: tf.add_n([tf.reduce_sum(made[f"w{i}"]) for i in range(3)]))
    sums()  # traced before there is any plan
    step = dapple.pipeline(
        loss, optimizer=optimizer, stages=["layer2"], replicas=[1, 2], micro_batches=2, example_batch=(X,)
    )
    seen: dict[str, Any] = {"built": sorted(values(step)), "captured": captured(step)}
    for _ in range(3):
        step(X)
    seen["before"] = values(step)
    seen["why"] = [error_of(made["w0" if job.rank else "w2"].numpy), error_of(sums)]

    seen["errors"] = [error_of(lambda: Checkpoints("/proc/none", step))]
    saving = Checkpoints(folder, step)
    saving.save(1)
    if job.rank == 0:
        os.mkdir(folder / "checkpoint-9.safetensors")
    seen["errors"].append(error_of(lambda: saving.save(4)))  # rank 0 fails; the others have sent their values
    seen["saved"] = sorted(values(step))  # other ranks' values have come, and are not kept
    step.gather()
    seen["after"] = values(step)
    seen["sum"] = float(sums())

    seen["errors"].append(error_of(saving.restore))
    if job.rank == 0:
        os.rmdir(folder / "checkpoint-9.safetensors")
    path = Path(saving.save(3))
    if job.rank == 0:
        path.write_bytes(path.read_bytes()[:-1])
    for variable in step.variables.values():
        variable.assign(variable * 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen["position"] = saving.restore().steps
    seen["warnings"] = [str(warning.message) for warning in caught]
    seen["restored"] = values(step)

    step(X)
    seen["again"] = sorted(values(step))
    step.gather()
    seen["one more"] = values(step)
    step(X)
    saving.restore()  # into what each rank holds
    seen["still"] = sorted(values(step))
    step.gather()
    seen["restored apart"] = values(step)
    print(json.dumps(seen))
    job.gather(None)  # all have finished


def values(step: Any) -> dict[str, Any]:
    """Every variable's value that is here to be read."""
    found = {}
    for name, variable in step.variables.items():
        try:
            found[name] = np.asarray(variable.numpy(), np.float64).tolist()
        except tf.errors.FailedPreconditionError:
            continue
    return found


def captured(step: Any) -> list[str]:
    """The variables that the step's function reads or writes."""
    handles = {id(handle) for handle in step._program().function.captured_inputs}
    return sorted(name for name, variable in step.variables.items() if id(variable.handle) in handles)


def error_of(call: Any) -> str:
    """What ``call`` says is wrong."""
    try:
        call()
    except (CheckpointError, tf.errors.FailedPreconditionError) as error:
        return str(error)
    return "nothing"


main()
