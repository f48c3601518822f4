"""A rank of the benchmark of snapshots: steps in blocks of ten, in turn with and without a snapshot."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras

import dapple_tf as dapple
from benchmarks.common import median
from benchmarks.workloads import MODELS
from dapple_tf.distributed import membership

EVERY, BLOCKS = 10, 5


def measure(model: str, folder: str) -> dict[str, float]:
    """Return seconds: of a step, of blocks with and without snapshots (wall, processor), of a snapshot's parts."""
    timed = MODELS[model]()
    optimizer = keras.optimizers.Adam(1e-3)
    step = dapple.pipeline(
        timed.workload.loss_fn,
        optimizer=optimizer,
        stages=2,
        micro_batches=8,
        snapshot_every=EVERY,
        example_batch=timed.batch,
    )
    checkpoints = dapple.Checkpoints(folder, step)
    checkpoints.restore()
    hook = step.after_training
    for _ in range(3):
        step(*timed.batch)
    checkpoints.save(2 * EVERY - 1)  # the next call takes a snapshot, which is written while its block runs
    job = membership.current()
    assert job is not None, "two ranks"
    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    for block in range(2 * BLOCKS):
        on = block % 2 == 0
        step.after_training = hook if on else None
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(EVERY):
            step(*timed.batch)
        wall[on].append(time.perf_counter() - begin)
        cpu[on].append(sum(job.gather(time.process_time() - used)))
    costs = checkpoints.snapshot_costs
    assert costs is not None
    begin = time.perf_counter()
    values = [v.numpy() for v in step.variables.values() if job.variable_locations.source(v) == job.rank]
    copy = time.perf_counter() - begin
    del values
    found = {
        "step": median(wall[False]) / EVERY,
        "with": median(wall[True]),
        "without": median(wall[False]),
        "with_cpu": median(cpu[True]),
        "without_cpu": median(cpu[False]),
        "waited": median(costs.waited),
        "beside": median(costs.beside),
        "bytes": float(costs.part_bytes),
        "copy": copy,
    }
    step.after_training = hook
    checkpoints.close()
    return found


def main(arguments: list[str]) -> Any:
    """Print the measurement on rank 0."""
    dapple.init()
    found = measure(*arguments)
    if dapple.rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
