"""Two ranks under mpirun, each on one core, against the bubble-limited bound measured with one rank on one core."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # each rank keeps to a core of its own, before any library counts the cores
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")) % len(_cores)]})

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
        pairs = []
        for _ in range(3):
            one = pinned("benchmarks.pipelining", cores()[:1], model, "1")
            pairs.append((one, launch(model)))
        speedups = [one / two for one, two in pairs]
        one, two = sorted(pairs, key=lambda pair: pair[0] / pair[1])[1]
        share = median(speedups) / bound
        measured = f"{share:.0%}: {median(speedups):.2f}x of {bound:.2f}x ({one * 1e3:.0f} ms, {two * 1e3:.0f} ms)"
        yield Row(f"{model}: two ranks, M = {MICRO_BATCHES}, a core each", "at least 95%", measured, share >= 0.95)


def launch(model: str) -> float:
    """Median seconds of a step of two ranks."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(STAGES)]
    command += [sys.executable, "-m", "benchmarks.ranks", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def measure(model: str) -> float:
    """Median seconds of a step of this job."""
    import dapple_tf as dapple
    from benchmarks.workloads import MODELS

    timed = MODELS[model]()
    step = dapple.pipeline(
        timed.workload.loss_fn, optimizer=timed.workload.optimizer, stages=STAGES, micro_batches=MICRO_BATCHES
    )
    steps = {"step": lambda: float(step(*timed.batch))}
    seconds_in_turn(steps, 3)
    return median(seconds_in_turn(steps, 15)["step"])


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    seconds = measure(sys.argv[1])
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
        print(json.dumps(seconds))
