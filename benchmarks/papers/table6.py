"""Table VI of the paper: throughput and peak memory of GPipe and DAPPLE, with and without re-computation, by M.

The gpt at two stages on two cores of one process, with two samples per micro-batch as in the paper. The memory cap is
where the paper's is: GPipe fits at M = 2 and not at M = 3. Steps with the same M are timed in turn in one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.common import Row, available_cores, median, run_on_cores, time_interleaved

STAGES, SAMPLES, MICRO_BATCHES = 2, 2, (2, 3, 5, 8, 16)
WAYS = {
    "GPipe": ("gpipe", False),
    "GPipe + RC": ("gpipe", True),
    "DAPPLE": ("dapple-a", False),
    "DAPPLE + RC": ("dapple-a", True),
}
ROUNDS = 5


def run() -> Iterator[Row]:
    """Yield a row for each configuration and M, and then the targets."""
    table = {m: run_on_cores("benchmarks.papers.table6", available_cores()[:STAGES], str(m)) for m in MICRO_BATCHES}
    cap = (table[2]["GPipe"]["bytes"] + table[3]["GPipe"]["bytes"]) / 2
    for way in WAYS:
        for m in MICRO_BATCHES:
            found = table[m][way]
            fits = "" if found["bytes"] <= cap else f", OOM (over the cap of {cap / 1e6:.0f} MB)"
            yield Row(
                f"{way}, M = {m}", "-", f"{found['speed']:.1f} samples/s, {found['bytes'] / 1e6:.0f} MB{fits}", True
            )
    fitting = [m for m in MICRO_BATCHES if table[m]["GPipe"]["bytes"] <= cap]
    best, ours = table[max(fitting)]["GPipe"], table[16]["DAPPLE"]
    ratio = ours["speed"] / best["speed"]
    figure = f"DAPPLE at M = 16 over GPipe at M = {max(fitting)}, the largest that fits {cap / 1e6:.0f} MB"
    yield Row(figure, "at least 1.5x", f"{ratio:.2f}x", ratio >= 1.5)
    share = ours["bytes"] / best["bytes"]
    yield Row("their peak memory", "no more", f"{share:.0%}", share <= 1)
    ratios = {m: table[m]["DAPPLE"]["speed"] / table[m]["GPipe"]["speed"] for m in MICRO_BATCHES}
    worst = max(abs(ratio - 1) for ratio in ratios.values())
    measured = ", ".join(f"{ratio - 1:+.1%} (M = {m})" for m, ratio in ratios.items())
    yield Row("throughput of DAPPLE over GPipe at equal M", "within 2%", measured, worst <= 0.02)


def measure(micro_batches: int) -> dict[str, Any]:
    """Return for each configuration the samples per second of the median step, and the peak in bytes.

    The peak is what a recorded step allocates above its start, by TensorFlow's allocator, plus what is always there.
    """
    from benchmarks.workloads import small_gpt

    steps: dict[str, Any] = {}
    batch: tuple[Any, ...] = ()
    for way, (schedule, recompute) in WAYS.items():
        timed = small_gpt(SAMPLES * micro_batches)
        batch = timed.batch
        steps[way] = timed.pipeline(stages=STAGES, micro_batches=micro_batches, schedule=schedule, recompute=recompute)
    calls = {way: lambda step=step: float(step(*batch)) for way, step in steps.items()}
    time_interleaved(calls, 2)
    taken = time_interleaved(calls, ROUNDS)
    found = {}
    for way, step in steps.items():
        for _ in range(3):
            step.record(*batch)
        report = step.report
        assert report.measured is not None, "the memory of this machine's devices cannot be measured"
        fixed = sum(stage.predicted.fixed for stage in report.stages)
        speed = SAMPLES * micro_batches / median(taken[way])
        found[way] = {"speed": speed, "bytes": fixed + report.measured.above_start}
    return found


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init(STAGES)
    print(json.dumps(measure(int(sys.argv[1]))))
