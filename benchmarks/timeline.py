"""What it costs to record a step: steps with and without time stamps in turn, and what reading them takes."""

from __future__ import annotations

import os
import sys

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__" and sys.argv[1] == "ranks":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common import Row, available_cores, median, run_on_cores, time_interleaved
from benchmarks.needs import find_missing_for_ranks

STAGES, MICRO_BATCHES, ROUNDS = 2, 8, 25
MOST = 0.01


def run() -> Iterator[Row]:
    """The dense stack and the gpt in one process, the dense stack as two ranks; then reading and writing."""
    if len(available_cores()) < STAGES:
        yield Row("recording two stages on two cores", "at most +1%", "this machine has one core", False)
        return
    available = available_cores()[:STAGES]
    found = {model: run_on_cores("benchmarks.timeline", available, "process", model) for model in ("dense", "gpt")}
    for model, seconds in found.items():
        yield _compare(f"{model}: step.record over step, S = {STAGES}, M = {MICRO_BATCHES}, two cores", seconds)
    if find_missing_for_ranks() is None:
        yield _compare(f"dense: the same as two ranks, M = {MICRO_BATCHES}, a core each", launch("dense"))
    taken = found["gpt"]
    parts = f"{taken['read'] * 1e3:.1f} ms, {taken['write'] * 1e3:.1f} ms"
    share = (taken["read"] + taken["write"]) / median(taken["step"])
    figure = "gpt: timeline and critical path of a recorded step; its curves written for TensorBoard"
    yield Row(figure, "at most 1% of a step", f"{share:.1%} ({parts})", share <= MOST)


def _compare(figure: str, seconds: dict[str, Any]) -> Row:
    """The median of the turns' ratios."""
    more = median([b / a for a, b in zip(seconds["step"], seconds["record"], strict=True)]) - 1
    told = ", ".join(f"{median(seconds[way]) * 1e3:.1f} ms" for way in ("step", "record"))
    return Row(figure, "at most +1%", f"{more:+.1%} ({told})", more <= MOST)


def launch(model: str) -> Any:
    """What two ranks measured."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(STAGES)]
    command += [sys.executable, "-m", "benchmarks.timeline", "ranks", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(model: str) -> dict[str, Any]:
    """Seconds of steps, plain and recorded, in turn; the median seconds of reading one and of writing its curves."""
    import dapple_tf as dapple
    from benchmarks.workloads import MODELS
    from dapple_tf.commands.tensorboard import Scalars, recorded_scalars

    timed = MODELS[model]()
    step = dapple.pipeline(
        timed.workload.loss_fn, optimizer=timed.workload.optimizer, stages=STAGES, micro_batches=MICRO_BATCHES
    )
    steps = {"step": lambda: float(step(*timed.batch)), "record": lambda: float(step.record(*timed.batch))}
    time_interleaved(steps, 2)
    taken: dict[str, Any] = dict(time_interleaved(steps, ROUNDS))
    reads, writes = [], []
    with tempfile.TemporaryDirectory() as folder:
        scalars = Scalars(folder)
        for number in range(5):
            step.record(*timed.batch)
            begin = time.perf_counter()
            values = recorded_scalars(step.timeline)
            read = time.perf_counter()
            scalars.write(number, values)
            reads.append(read - begin)
            writes.append(time.perf_counter() - read)
        scalars.close()
    return {**taken, "read": median(reads), "write": median(writes)}


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init(STAGES if sys.argv[1] == "process" else None)
    found = measure(sys.argv[2])
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(json.dumps(found))
