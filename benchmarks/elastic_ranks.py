"""A rank of the benchmark of snapshots: what a step takes, and what a snapshot takes."""

from __future__ import annotations

import sys
import time
from typing import Any

import keras

import dapple_tf as dapple
from benchmarks.common import median, print_on_rank_0
from benchmarks.workloads import MODELS
from dapple_tf.distributed import membership

EVERY, STEPS, SNAPSHOTS = 10, 5, 3


def measure(model: str, folder: str) -> dict[str, float]:
    """Return wall seconds and processor seconds (of both ranks) of a step and of a snapshot, and its bytes.

    They are timed one after the other, since other work on the machine would hide the difference of two runs. A
    snapshot is timed from when it is due until its file is written, sent, and kept by the other rank.
    """
    timed = MODELS[model]()
    step = dapple.pipeline(
        timed.workload.loss_fn,
        optimizer=keras.optimizers.Adam(1e-3),
        stages=2,
        micro_batches=8,
        snapshot_every=EVERY,
        example_batch=timed.batch,
    )
    job = membership.current()
    assert not job.is_alone, "two ranks"
    with dapple.Checkpoints(folder, step) as checkpoints:
        checkpoints.restore()
        hook, costs = step.before_training, checkpoints.snapshot_costs
        assert hook is not None
        assert costs is not None
        step.before_training = None
        step(*timed.batch)
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            step(*timed.batch)
        wall, processor = time.perf_counter() - begin, sum(job.gather(time.process_time() - used))
        spent = []
        for number in range(SNAPSHOTS):
            used = time.process_time()
            for _ in range(EVERY):
                hook()
            while len(costs.beside) <= number:
                time.sleep(0.05)  # a thread is at work, which counts as processor time
            job.gather("sent")
            time.sleep(0.5)  # until the last bytes are kept
            spent.append(sum(job.gather(time.process_time() - used)))
        begin = time.perf_counter()
        values = [v.numpy() for v in step.variables.values() if job.variable_locations.source(v) == job.rank]
        copy = time.perf_counter() - begin
        del values
        return {
            "step": wall / STEPS,
            "step_processor": processor / STEPS,
            "snapshot_processor": min(spent),
            "waited": median(costs.waited),
            "beside": median(costs.beside),
            "bytes": float(costs.part_bytes),
            "copy": copy,
        }


def main(arguments: list[str]) -> Any:
    """Print the measurement on rank 0."""
    dapple.init()
    print_on_rank_0(measure(*arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
