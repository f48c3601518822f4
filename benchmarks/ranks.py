"""Two ranks under mpirun, each on one core, against the bubble-limited bound measured with one rank on one core.

The single rank runs the same micro-batches as one stage. The two ranks exchange tensors natively, and by Horovod's
alltoall, in turn. The un-pipelined step is measured for comparison.
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
WAYS = ("native", "horovod")


def run() -> Iterator[Row]:
    """Yield the dense stack and the gpt, exchanging each way: the median ratio of three turns."""
    if len(available_cores()) < STAGES:
        yield Row("two ranks on two cores", "at least 95%", "this machine has one core", False)
        return
    from dapple_tf.distributed.native.library import find_obstacle

    bound = STAGES * MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)
    for model in ("dense", "gpt"):
        ways = WAYS if not find_obstacle() else ("horovod",)
        turns: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
        for _ in range(3):
            one = run_on_cores("benchmarks.ranks", available_cores()[:1], model, "1")
            plain = run_on_cores("benchmarks.pipelining", available_cores()[:1], model, "1")
            for way in ways:
                two = run_ranks("benchmarks.ranks", STAGES, model, str(STAGES), variables={"DAPPLE_EXCHANGE": way})
                turns[way].append((one, float(two), plain))
        for way in ways:
            yield from _rows(f"{model}, {way} exchanges", bound, turns[way])


def _rows(name: str, bound: float, turns: list[tuple[float, float, float]]) -> Iterator[Row]:
    """Yield the rows of the median turn; ``turns``: seconds of a step of one rank, of two, and un-pipelined."""
    one, two, plain = sorted(turns, key=lambda turn: turn[0] / turn[1])[len(turns) // 2]
    times = f"({one * 1e3:.0f} ms, {two * 1e3:.0f} ms)"
    share = one / two / bound
    figure = f"{name}: two ranks, M = {MICRO_BATCHES}, a core each, of the bubble-limited bound by one rank"
    yield Row(figure, "at least 95%", f"{share:.0%}: {one / two:.2f}x of {bound:.2f}x {times}", share >= 0.95)
    of_plain = plain / two / bound
    figure = f"{name}: the same, by the un-pipelined step ({plain * 1e3:.0f} ms)"
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
