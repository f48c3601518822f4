"""ZB-H1 against 1F1B with real products: two ranks under mpirun, each on one core, both schedules in turn in one job.

In one process with two devices ZB-H1 gains nothing: the two products of a backward run in parallel on both cores, and
so fill the other stage's bubble already.
"""

from __future__ import annotations

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import json
from typing import Any

from benchmarks.common import Row, median, run_ranks, time_interleaved

STAGES, MICRO_BATCHES, SCHEDULES = 2, 8, ("dapple-a", "zb-h1")


def rows_of_ranks(predicted: float) -> list[Row]:
    """Return the row of the dense stack. ``predicted``: the simulator's ratio for equal F, B and W."""
    found = run_ranks("benchmarks.zero_bubble_ranks", STAGES, timeout=120)
    before, after = found["seconds"]
    text = f"{found['ratio']:.3f} ({before * 1e3:.0f} ms, {after * 1e3:.0f} ms)"
    figure = f"dense layers, two ranks, a core each, M = {MICRO_BATCHES}: ZB-H1 over 1F1B"
    return [Row(figure, f"below 1; simulated {predicted:.3f} for F = B = W", text, found["ratio"] < 1)]


def measure() -> dict[str, Any]:
    """Return the median seconds of a step under each schedule, and the median of their ratios."""
    import dapple_tf as dapple
    from benchmarks.workloads import dense

    calls = {}
    for name in SCHEDULES:
        timed = dense()
        loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
        step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=STAGES, micro_batches=MICRO_BATCHES, schedule=name)
        calls[name] = lambda step=step, batch=timed.batch: float(step(*batch))
    time_interleaved(calls, 3)
    taken = time_interleaved(calls, 15)
    pairs = zip(*(taken[name] for name in SCHEDULES), strict=True)
    return {
        "seconds": [median(taken[name]) for name in SCHEDULES],
        "ratio": median([after / before for before, after in pairs]),
    }


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    found = measure()
    if dapple.rank() == 0:
        print(json.dumps(found))
