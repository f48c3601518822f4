"""Two stages on two cores against the bubble-limited bound, with one device on one core in the same run.

A pipeline of S stages with M micro-batches is at best M S / (M + S - 1) times as fast as one device (GPipe's and
DAPPLE's bubble). The processes alternate: first one on one core, then one on two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, run_on_cores, time_interleaved

STAGES, MICRO_BATCHES = 2, 8


def run() -> Iterator[Row]:
    """Yield the dense stack and the gpt: the median ratio of three turns each."""
    available = available_cores()
    if len(available) < STAGES:
        yield Row("two stages on two cores", "at least 95%", "this machine has one core", False)
        return
    bound = STAGES * MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)
    for model in ("dense", "gpt"):
        pairs = []
        for _ in range(3):
            one = run_on_cores("benchmarks.pipelining", available[:1], model, "1")
            two = run_on_cores("benchmarks.pipelining", available[:STAGES], model, str(STAGES))
            pairs.append((one, two))
        speedups = [one / two for one, two in pairs]
        one, two = sorted(pairs, key=lambda pair: pair[0] / pair[1])[1]
        share = median(speedups) / bound
        measured = f"{share:.0%}: {median(speedups):.2f}x of {bound:.2f}x ({one * 1e3:.0f} ms, {two * 1e3:.0f} ms)"
        figure = f"{model}: S = {STAGES}, M = {MICRO_BATCHES} on two cores, of the bubble-limited speed-up"
        yield Row(figure, "at least 95%", measured, share >= 0.95)


def measure(model: str, stages: int) -> float:
    """Return the median seconds of a step: the plain one for one stage, else the pipeline's."""
    from benchmarks.workloads import MODELS
    from dapple_tf.commands.training_loop import plain_step

    timed = MODELS[model]()
    optimizer = timed.workload.optimizer
    step = (
        plain_step(timed.workload)
        if stages == 1
        else dapple.pipeline(timed.workload.loss_fn, optimizer=optimizer, stages=stages, micro_batches=MICRO_BATCHES)
    )
    steps = {"step": lambda: float(step(*timed.batch))}
    time_interleaved(steps, 3)
    return median(time_interleaved(steps, 15)["step"])


if __name__ == "__main__":
    dapple.init(STAGES)
    print(measure(sys.argv[1], int(sys.argv[2])))
