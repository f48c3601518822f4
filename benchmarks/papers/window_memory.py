"""Memory of asynchronous windows over depth (PipeDream, Fig. 18): four ranks, predicted against measured.

Each depth is a job of its own. What a rank holds between windows (its stored versions of the weights) is measured as
the difference of the live heap from that of depth 1, and what a window adds (stashes of the minibatches in flight) as
its peak above its start. TensorFlow runs without oneDNN, whose allocator returns blocks of up to twice the requested
size.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before TensorFlow is imported
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import Row, print_on_rank_0, run_ranks
from benchmarks.needs import find_missing_for_ranks

STAGES, MINIBATCHES, SAMPLES = 4, 16, 1024  # samples of a minibatch
LAYERS, WIDTH = 16, 512
DEPTHS = range(1, 8)
RECORDED = 3  # recorded windows; the last counts


def run() -> Iterator[Row]:
    """Yield a row for each depth: the predicted bytes of all stages over the measured ones, the worst stage."""
    if lack := find_missing_for_ranks():
        yield Row("four ranks, depths 1 to 7", "-", f"left out: {lack}", True)
        return
    options = ("--mca", "mpi_yield_when_idle", "1")
    found = {
        depth: run_ranks("benchmarks.papers.window_memory", STAGES, str(depth), timeout=600, options=options)
        for depth in DEPTHS
    }
    for depth, stages in found.items():
        yield compare(depth, stages, found[DEPTHS[0]])


def compare(depth: int, stages: Sequence[Mapping[str, int]], first: Sequence[Mapping[str, int]]) -> Row:
    """Return the row of one depth. ``stages``, ``first``: the bytes of each stage, and those at depth 1."""
    errors, texts = [], []
    for now, then in zip(stages, first, strict=True):
        predicted = now["predicted_fixed"] - then["predicted_fixed"] + now["predicted_in_step"]
        measured = now["measured_start"] - then["measured_start"] + now["measured_in_step"]
        errors.append(predicted / measured - 1)
        texts.append(f"{predicted / 1e6:.0f} of {measured / 1e6:.0f}")
    worst = max(errors, key=abs)
    figure = f"dense, {STAGES} ranks, depth {depth}: predicted memory over measured"
    text = f"{worst:+.1%} at worst; stages {', '.join(texts)} MB"
    return Row(figure, "within 10%", text, abs(worst) <= 0.1)


def measure(depth: int) -> list[dict[str, int]]:
    """Return the predicted and measured bytes of each stage of this job: between windows, and in one."""
    from benchmarks.workloads import dense

    timed = dense(layers=LAYERS, width=WIDTH, batch_size=SAMPLES * MINIBATCHES)
    step: Any = timed.pipeline(stages=STAGES, mode="async", minibatches=MINIBATCHES, depth=depth)
    for _ in range(RECORDED):
        step.record(*timed.batch)
    return [
        {
            "predicted_fixed": stage.predicted.fixed,
            "predicted_in_step": stage.predicted.in_step,
            "measured_start": stage.measured.start_bytes,
            "measured_in_step": stage.measured.above_start,
        }
        for stage in step.report.stages
        if stage.measured is not None
    ]


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    print_on_rank_0(measure(int(sys.argv[1])))
