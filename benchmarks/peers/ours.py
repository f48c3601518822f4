"""A rank of ours, timed: ``python -m benchmarks.peers.ours MODEL SCHEDULE STAGES MICRO_BATCHES STEPS`` under mpirun."""

from __future__ import annotations

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import sys
from typing import Any

from benchmarks.common import median, print_on_rank_0, time_interleaved

WARM_UP, SECONDS = 3, 0.02


def measure(model: str, schedule: str, stages: int, micro_batches: int, steps: int) -> float:
    """Return the median seconds of a step of this job."""
    import dapple_tf as dapple
    from benchmarks.waits import stage_names, waits
    from benchmarks.workloads import MODELS

    options: dict[str, Any] = {"stages": stages}
    if model == "waits":  # two layers a rank, which sleep one after the other
        layers = 2 * dapple.size()
        starts = [0, *stage_names(layers)]
        options = {"stages": starts[layers // stages :: layers // stages], "inexact": "allow"}
        devices = [0] * layers  # of a process, which is one device
        timed = waits(layers, forward=SECONDS, inputs=SECONDS, weights=SECONDS, devices=devices)
    else:
        timed = MODELS[model]()
    step = timed.pipeline(micro_batches=micro_batches, schedule=schedule, **options)
    calls = {"step": lambda: float(step(*timed.batch))}
    time_interleaved(calls, WARM_UP)
    return median(time_interleaved(calls, steps)["step"])


if __name__ == "__main__":
    import dapple_tf as dapple
    from benchmarks.waits import start_waiting

    model, schedule, *numbers = sys.argv[1:]
    if model == "waits":
        start_waiting(2 * dapple.size())
    else:
        dapple.init()
    print_on_rank_0(measure(model, schedule, *map(int, numbers)))
