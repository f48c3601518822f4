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

import numpy as np  # noqa: E402  # after the job is joined

from dapple_tf.checkpoint import Checkpoints  # noqa: E402
from dapple_tf.errors import CheckpointError  # noqa: E402
from dapple_tf.job.membership import current  # noqa: E402
from tests.job.gather_model import X, make_model  # noqa: E402


def main() -> None:
    """Print, as one JSON object, what this rank saw."""
    folder, job = Path(sys.argv[1]), current()
    assert job is not None
    loss, optimizer, _ = make_model()
    step = dapple.pipeline(
        loss, optimizer=optimizer, stages=["layer2"], replicas=[1, 2], micro_batches=2, example_batch=(X,)
    )
    for _ in range(3):
        step(X)
    seen: dict[str, Any] = {"before": values(step)}
    step.gather()
    seen["after"] = values(step)

    seen["errors"] = [error_of(lambda: Checkpoints("/proc/none", step))]
    saving = Checkpoints(folder, step)
    saving.save(1)
    path = Path(saving.save(3))
    if job.rank == 0:
        path.write_bytes(path.read_bytes()[:-1])
        os.mkdir(folder / "checkpoint-9.safetensors")
    seen["errors"].append(error_of(saving.restore))
    seen["errors"].append(error_of(lambda: saving.save(4)))
    if job.rank == 0:
        os.rmdir(folder / "checkpoint-9.safetensors")
    for variable in step.variables.values():
        variable.assign(variable * 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen["position"] = saving.restore().steps
    seen["warnings"] = [str(warning.message) for warning in caught]
    seen["restored"] = values(step)
    print(json.dumps(seen))
    job.gather(None)  # all have finished


def values(step: Any) -> dict[str, Any]:
    """Every variable's value."""
    return {name: np.asarray(variable.numpy(), np.float64).tolist() for name, variable in step.variables.items()}


def error_of(call: Any) -> str:
    """What ``call`` says is wrong."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "nothing"


main()
