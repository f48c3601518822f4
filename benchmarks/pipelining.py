"""One stage against the plain step, and two stages on two cores against the bubble-limited bound.

The plain step and that of one stage are timed in turn in one process on one core. A pipeline of S stages with M
micro-batches is at best M S / (M + S - 1) times as fast as one device (GPipe's and DAPPLE's bubble); its process
alternates with one of one device on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores, time_interleaved

STAGES, MICRO_BATCHES = 2, 8


def run() -> Iterator[Row]:
    """Yield the dense stack and the gpt: one stage on one core; then two stages, the median ratio of three turns."""
    available = available_cores()
    for model in ("dense", "gpt"):
        yield from (Row(**row) for row in run_on_cores("benchmarks.pipelining", available[:1], model))
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


def compare_one_stage(model: str) -> list[Row]:
    """Time the plain and the one-stage step of the same model, in turn."""
    from benchmarks.workloads import MODELS
    from dapple_tf.commands.training_loop import plain_step

    plain, ours = MODELS[model](), MODELS[model]()
    step = ours.pipeline(stages=1, micro_batches=1)
    reference = plain_step(plain.workload)
    steps = {"plain": lambda: float(reference(*plain.batch)), "one stage": lambda: float(step(*ours.batch))}
    time_interleaved(steps, 3)
    taken = time_interleaved(steps, 40)
    ratio = median([b / a for a, b in zip(taken["plain"], taken["one stage"], strict=True)])
    measured = f"{ratio - 1:+.1%} ({median(taken['plain']) * 1e3:.0f} ms, {median(taken['one stage']) * 1e3:.0f} ms)"
    return [Row(f"{model}: S = 1, M = 1 over the plain step, one core", "at most +2%", measured, ratio <= 1.02)]


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
    if sys.argv[2:]:
        print(measure(sys.argv[1], int(sys.argv[2])))
    else:
        print_rows(compare_one_stage(sys.argv[1]))
