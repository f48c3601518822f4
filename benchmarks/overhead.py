"""The overhead of pipelining: one stage against the plain step, and the time to compile and run the first step."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores, time_interleaved


def run() -> Iterator[Row]:
    """Yield S = 1, M = 1 against the plain step; then compilation and first step at M = 8 against the plain ones."""
    core = available_cores()[:1]
    for model in ("dense", "gpt"):
        yield from (Row(**row) for row in run_on_cores("benchmarks.overhead", core, "step", model))
        plain, ours = (run_on_cores("benchmarks.overhead", core, "first", model, way) for way in ("plain", "pipelined"))
        ratio = ours / plain
        figure = f"{model}: rewrite and first step, S = 2, M = 8, over plain trace and first step"
        yield Row(figure, "at most 3x", f"{ratio:.2f}x ({plain:.1f} s, {ours:.1f} s)", ratio <= 3)


def measure_step(model: str) -> list[Row]:
    """Time the plain and the one-stage step of the same model on one core, in turn."""
    from benchmarks.workloads import MODELS
    from dapple_tf.commands.training_loop import plain_step

    plain, ours = MODELS[model](), MODELS[model]()
    step = dapple.pipeline(ours.workload.loss_fn, optimizer=ours.workload.optimizer, stages=1, micro_batches=1)
    reference = plain_step(plain.workload)
    steps = {"plain": lambda: float(reference(*plain.batch)), "one stage": lambda: float(step(*ours.batch))}
    time_interleaved(steps, 3)
    taken = time_interleaved(steps, 40)
    ratio = median([b / a for a, b in zip(taken["plain"], taken["one stage"], strict=True)])
    measured = f"{ratio - 1:+.1%} ({median(taken['plain']) * 1e3:.0f} ms, {median(taken['one stage']) * 1e3:.0f} ms)"
    return [Row(f"{model}: S = 1, M = 1 over the plain step", "at most +2%", measured, ratio <= 1.02)]


def measure_first(model: str, way: str) -> float:
    """Return the seconds from a built model to the end of its first step."""
    from benchmarks.workloads import MODELS
    from dapple_tf.commands.training_loop import plain_step

    timed = MODELS[model]()
    begin = time.perf_counter()
    if way == "plain":
        step = plain_step(timed.workload)
    else:
        step = dapple.pipeline(timed.workload.loss_fn, optimizer=timed.workload.optimizer, stages=2, micro_batches=8)
    float(step(*timed.batch))
    return time.perf_counter() - begin


if __name__ == "__main__":
    dapple.init(2)
    if sys.argv[1] == "step":
        print_rows(measure_step(sys.argv[2]))
    else:
        print(measure_first(*sys.argv[2:]))
