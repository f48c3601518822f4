"""Two ranks under mpirun, each on one core, against the bubble-limited bound measured with one rank on one core.

The rank alone runs the same micro-batches as one stage; the un-pipelined step stands beside it.
"""

from __future__ import annotations

import os
import sys

from benchmarks.own_core import keep_to_own_core

if __name__ == "__main__":  # before any library counts the cores
    keep_to_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import json
import subprocess
from collections.abc import Iterator

from benchmarks.common import Row, cores, median, pinned, seconds_in_turn

STAGES, MICRO_BATCHES = 2, 8


def run() -> Iterator[Row]:
    """The dense stack and the gpt; three turns each, the median ratio."""
    if len(cores()) < STAGES:
        yield Row("two ranks on two cores", "at least 95%", "this machine has one core", False)
        return
    bound = STAGES * MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)
    for model in ("dense", "gpt"):
        turns = []
        for _ in range(3):
            one = pinned("benchmarks.ranks", cores()[:1], model, "1")
            plain = pinned("benchmarks.pipelining", cores()[:1], model, "1")
            turns.append((one, launch(model), plain))
        one, two, plain = sorted(turns, key=lambda turn: turn[0] / turn[1])[1]
        times = f"({one * 1e3:.0f} ms, {two * 1e3:.0f} ms)"
        share = one / two / bound
        figure = f"{model}: two ranks, M = {MICRO_BATCHES}, a core each, of the bubble-limited bound by one rank"
        yield Row(figure, "at least 95%", f"{share:.0%}: {one / two:.2f}x of {bound:.2f}x {times}", share >= 0.95)
        of_plain = plain / two / bound
        figure = f"{model}: the same, by the un-pipelined step ({plain * 1e3:.0f} ms)"
        yield Row(figure, "-", f"{of_plain:.0%}: {plain / two:.2f}x", True)


def launch(model: str) -> float:
    """Median seconds of a step of two ranks."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(STAGES)]
    command += [sys.executable, "-m", "benchmarks.ranks", model, str(STAGES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def measure(model: str, stages: int) -> float:
    """Median seconds of a step of this job, or of one process with one stage."""
    import dapple_tf as dapple
    from benchmarks.workloads import MODELS

    timed = MODELS[model]()
    step = dapple.pipeline(
        timed.workload.loss_fn, optimizer=timed.workload.optimizer, stages=stages, micro_batches=MICRO_BATCHES
    )
    steps = {"step": lambda: float(step(*timed.batch))}
    seconds_in_turn(steps, 3)
    return median(seconds_in_turn(steps, 15)["step"])


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    seconds = measure(sys.argv[1], int(sys.argv[2]))
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(json.dumps(seconds))
