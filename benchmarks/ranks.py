"""Two ranks under mpirun, each on one core, against the bubble-limited bound measured with one rank on one core.

The single rank runs the same micro-batches as one stage. The un-pipelined step is measured for comparison.
"""

from __future__ import annotations

import os
import sys

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import json
from collections.abc import Iterator

from benchmarks.common import Row, available_cores, median, run_on_cores, run_ranks, time_interleaved

STAGES, MICRO_BATCHES = 2, 8


def run() -> Iterator[Row]:
    """Yield the dense stack and the gpt: the median ratio of three turns each."""
    if len(available_cores()) < STAGES:
        yield Row("two ranks on two cores", "at least 95%", "this machine has one core", False)
        return
    bound = STAGES * MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)
    for model in ("dense", "gpt"):
        turns = []
        for _ in range(3):
            one = run_on_cores("benchmarks.ranks", available_cores()[:1], model, "1")
            plain = run_on_cores("benchmarks.pipelining", available_cores()[:1], model, "1")
            turns.append((one, float(run_ranks("benchmarks.ranks", STAGES, model, str(STAGES))), plain))
        one, two, plain = sorted(turns, key=lambda turn: turn[0] / turn[1])[1]
        times = f"({one * 1e3:.0f} ms, {two * 1e3:.0f} ms)"
        share = one / two / bound
        figure = f"{model}: two ranks, M = {MICRO_BATCHES}, a core each, of the bubble-limited bound by one rank"
        yield Row(figure, "at least 95%", f"{share:.0%}: {one / two:.2f}x of {bound:.2f}x {times}", share >= 0.95)
        of_plain = plain / two / bound
        figure = f"{model}: the same, by the un-pipelined step ({plain * 1e3:.0f} ms)"
        yield Row(figure, "-", f"{of_plain:.0%}: {plain / two:.2f}x", True)


def measure(model: str, stages: int) -> float:
    """Return the median seconds of a step of this job, or of one process with one stage."""
    import dapple_tf as dapple
    from benchmarks.workloads import MODELS

    timed = MODELS[model]()
    step = dapple.pipeline(
        timed.workload.loss_fn, optimizer=timed.workload.optimizer, stages=stages, micro_batches=MICRO_BATCHES
    )
    steps = {"step": lambda: float(step(*timed.batch))}
    time_interleaved(steps, 3)
    return median(time_interleaved(steps, 15)["step"])


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    seconds = measure(sys.argv[1], int(sys.argv[2]))
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(json.dumps(seconds))
