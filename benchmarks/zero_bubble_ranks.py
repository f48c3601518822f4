"""ZB-H1 against 1F1B with real products: two ranks under mpirun, each on one core, both schedules in turn in one job.

A process of two devices would not do: its backwards run their two products side by side on both cores, and so fill the
bubble of the other stage.
"""

from __future__ import annotations

import os

from benchmarks.own_core import keep_to_own_core

if __name__ == "__main__":  # before any library counts the cores
    keep_to_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import json
import subprocess
import sys
from typing import Any

from benchmarks.common import Row, median, seconds_in_turn

STAGES, MICRO_BATCHES, SCHEDULES = 2, 8, ("dapple-a", "zb-h1")


def rows_of_ranks(predicted: float) -> list[Row]:
    """The dense stack; ``predicted``: the ratio that the simulator gives for equal F, B and W."""
    found = launch()
    before, after = found["seconds"]
    told = f"{found['ratio']:.3f} ({before * 1e3:.0f} ms, {after * 1e3:.0f} ms)"
    figure = f"dense layers, two ranks, a core each, M = {MICRO_BATCHES}: ZB-H1 over 1F1B"
    return [Row(figure, f"below 1; simulated {predicted:.3f} for F = B = W", told, found["ratio"] < 1)]


def launch() -> dict[str, Any]:
    """What ``measure`` finds in a job of two ranks."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(STAGES)]
    command += [sys.executable, "-m", "benchmarks.zero_bubble_ranks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure() -> dict[str, Any]:
    """Median seconds of a step under each schedule, and the median of their ratios."""
    import dapple_tf as dapple
    from benchmarks.workloads import dense

    calls = {}
    for name in SCHEDULES:
        timed = dense()
        loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
        step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=STAGES, micro_batches=MICRO_BATCHES, schedule=name)
        calls[name] = lambda step=step, batch=timed.batch: float(step(*batch))
    seconds_in_turn(calls, 3)
    taken = seconds_in_turn(calls, 15)
    pairs = zip(*(taken[name] for name in SCHEDULES), strict=True)
    return {
        "seconds": [median(taken[name]) for name in SCHEDULES],
        "ratio": median([after / before for before, after in pairs]),
    }


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    found = measure()
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(json.dumps(found))
