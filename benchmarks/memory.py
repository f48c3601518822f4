"""Activation memory against M for each schedule, and predicted against measured memory.

Every run is a process of its own with a fixed micro-batch. The measured value is what a recorded step allocates above
what was there before it (weights, accumulated gradients, the batch), by the heap: TensorFlow runs without oneDNN, whose
allocator returns blocks of up to twice the requested size. The models have more activations than weights, since
gradients of weights may be in memory until they are accumulated.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before TensorFlow is imported
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.common import Row, available_cores, print_on_rank_0, run_on_cores, run_ranks
from benchmarks.needs import find_missing_for_ranks

STAGES, MICRO_BATCHES = 2, (4, 32)
SAMPLES = {"dense": 512, "gpt": 4}  # of a micro-batch
RANKS: Mapping[str, Mapping[str, Any]] = {
    "GPipe": {"stages": STAGES, "schedule": "gpipe"},
    "dapple-a": {"stages": STAGES, "schedule": "dapple-a"},
    "re-computation": {"stages": STAGES, "schedule": "dapple-a", "recompute": True},
    "replicas with a sharded optimizer": {"stages": 1, "replicas": [STAGES], "shard_optimizer": True},
}
RECORDED = 3  # recorded steps; the last counts
JOBS = {"replicas with a sharded optimizer": 5}
"""Jobs whose highest peak counts: whether gradients arrive while a rank is at work depends on which one ends first."""


def run() -> Iterator[Row]:
    """Yield the slopes of both models, then the prediction's error in one process and on two ranks."""
    for model in ("dense", "gpt"):
        found = {
            (schedule, m): run_on_cores("benchmarks.memory", available_cores()[:STAGES], model, schedule, str(m))
            for schedule in ("gpipe", "dapple-a", "dapple-b")
            for m in MICRO_BATCHES
        }
        yield from compare_slopes(model, found)
        yield compare_seen(model, found)
        yield compare_predicted(f"{model}: one process, all stages at the recorded overlap", list(found.values()))
        if find_missing_for_ranks() is None:
            yield from map(partial(compare_ranks, model), RANKS)


def compare_slopes(model: str, found: dict[tuple[str, int], Any]) -> Iterator[Row]:
    """Yield the growth of the measured peak with M, as a share of GPipe's growth."""
    few, many = MICRO_BATCHES[0], MICRO_BATCHES[-1]
    slopes = {s: (found[s, many]["measured"] - found[s, few]["measured"]) / (many - few) for s, _ in found}
    for schedule in ("dapple-a", "dapple-b"):
        share = slopes[schedule] / slopes["gpipe"]
        peaks = ", ".join(f"{found[schedule, m]['measured'] / 1e6:.0f}" for m in MICRO_BATCHES)
        gpipe = ", ".join(f"{found['gpipe', m]['measured'] / 1e6:.0f}" for m in MICRO_BATCHES)
        figure = f"{model}: growth of the measured peak with M, {schedule} over GPipe, M = {few} to {many}"
        measured = f"{share:.1%}: {peaks} MB at M = {', '.join(map(str, MICRO_BATCHES))}; GPipe {gpipe} MB"
        yield Row(figure, "under 2%", measured, share < 0.02)


def compare_seen(model: str, found: dict[tuple[str, int], Any]) -> Row:
    """Return the row of how many micro-batches each stage held, by time stamps, against K."""
    right = sum(run["seen"] == run["planned"] for run in found.values())
    figure = f"{model}: stage i holds K_i stashes, by time stamps, three schedules, M to {MICRO_BATCHES[-1]}"
    return Row(figure, "all", f"{right} of {len(found)}", right == len(found))


def compare_predicted(what: str, runs: list[Any]) -> Row:
    """Return the row of the predicted peak over the measured one, the worst of several runs."""
    errors = [run["predicted"] / run["measured"] - 1 for run in runs]
    worst = max(errors, key=abs)
    measured = f"{worst:+.1%} at worst, {sum(map(abs, errors)) / len(errors):.1%} on average of {len(errors)} runs"
    return Row(f"{what}: predicted peak over measured", "within 10%", measured, abs(worst) <= 0.1)


def compare_ranks(model: str, way: str) -> Row:
    """Return the row of a job of two ranks, which are measured separately; ``way``: one of ``RANKS``."""
    options = ("--mca", "mpi_yield_when_idle", "1")
    jobs = [
        run_ranks("benchmarks.memory", STAGES, model, way, "8", timeout=600, options=options)["ranks"]
        for _ in range(JOBS.get(way, 1))
    ]
    highest = [max(ranks, key=lambda rank: int(rank["measured"])) for ranks in zip(*jobs, strict=True)]
    of_jobs = f", highest of {len(jobs)} jobs" if len(jobs) > 1 else ""
    return compare_predicted(f"{model}: two ranks, {way}, M = 8, rank by rank{of_jobs}", highest)


def measure(model: str, way: str, micro_batches: int) -> dict[str, Any]:
    """Return what a step of this process, or of this job, holds: bytes above the start of the step.

    ``way``: a schedule, or one of ``RANKS``.
    """
    from benchmarks.workloads import dense, small_gpt

    samples = SAMPLES[model] * micro_batches
    timed = dense(layers=24, width=256, batch_size=samples) if model == "dense" else small_gpt(samples)
    step = timed.pipeline(micro_batches=micro_batches, **RANKS.get(way, {"stages": STAGES, "schedule": way}))
    for _ in range(RECORDED):
        step.record(*timed.batch)
    report = step.report
    found: dict[str, Any] = {
        "seen": [stage.seen for stage in report.stages],
        "planned": [stage.predicted.in_flight for stage in report.stages],
        "ranks": [
            {"predicted": stage.predicted.in_step, "measured": stage.measured.above_start}
            for stage in report.stages
            if stage.measured is not None
        ],
    }
    if report.measured is not None:
        found |= {"predicted": report.predicted, "measured": report.measured.above_start}
    return found


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init(STAGES)
    print_on_rank_0(measure(sys.argv[1], sys.argv[2], int(sys.argv[3])))
