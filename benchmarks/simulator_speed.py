"""Seconds of simulating and drawing a long pipeline with many micro-batches, or minibatches of a window."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.common import Row, median, time_interleaved
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.profile import LayerCost, Profile
from dapple_tf.simulator.simulate import simulate
from dapple_tf.window_plan import WindowPlan

STAGES, MICRO_BATCHES, RUNS = 64, 1024, 7


def run() -> Iterator[Row]:
    """Yield the median seconds for 64 stages and 1024 micro-batches or minibatches, without compilation."""
    layers = tuple(LayerCost(f"layer{i}", 0.010, 0.020, 1e6, 4e6, 1e7) for i in range(STAGES))
    profile, cluster = Profile("uniform", 1, "none", layers), config("a", STAGES)
    stages = tuple(StagePlan(i, i, (i,)) for i in range(STAGES))
    plan = Plan("uniform", "none", MICRO_BATCHES, 1, MICRO_BATCHES, "dapple-a", False, stages)
    for schedule in ("dapple-a", "dapple-b", "gpipe"):
        changed = replace(plan, schedule=schedule)
        seconds = _measure(lambda changed=changed: simulate(changed, profile, cluster))
        figure = f"{STAGES} stages x {MICRO_BATCHES} micro-batches, {schedule}: simulate, median of {RUNS}"
        yield Row(figure, "under 2 s", f"{seconds * 1e3:.0f} ms", seconds < 2)
    window = replace(plan, window=WindowPlan(MICRO_BATCHES))
    seconds = _measure(lambda: simulate(window, profile, cluster))
    figure = f"{STAGES} stages x a window of {MICRO_BATCHES} minibatches: simulate, median of {RUNS}"
    yield Row(figure, "-", f"{seconds:.2f} s", True)
    timeline = simulate(plan, profile, cluster)
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("html", "png"):
            path = Path(folder) / f"step.{suffix}"
            seconds = _measure(lambda path=path: timeline.save(path))
            figure = f"{STAGES} stages x {MICRO_BATCHES} micro-batches: the picture as {suffix}, median of {RUNS}"
            text = f"{seconds:.1f} s, {path.stat().st_size / 1e6:.1f} MB"
            yield Row(figure, "at most 3 s", text, seconds <= 3)


def _measure(call: Callable[[], object]) -> float:
    """Return the median seconds of a call, without a first one."""
    call()
    return median(time_interleaved({"call": call}, RUNS)["call"])
