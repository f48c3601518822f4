"""Seconds of simulating a long pipeline with many micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.common import Row, median
from dapple_tf.plan import Plan, StagePlan
from dapple_tf.simulator.simulate import simulate
from profiler.presets import config
from profiler.profile import LayerCost, Profile

STAGES, MICRO_BATCHES, RUNS = 64, 1024, 7


def run() -> Iterator[Row]:
    """Yield the median seconds for 64 stages and 1024 micro-batches under each policy, without compilation."""
    layers = tuple(LayerCost(f"layer{i}", 0.010, 0.020, 1e6, 4e6, 1e7) for i in range(STAGES))
    profile, cluster = Profile("uniform", 1, "none", layers), config("a", STAGES)
    stages = tuple(StagePlan(i, i, (i,)) for i in range(STAGES))
    for schedule in ("dapple-a", "dapple-b", "gpipe"):
        plan = Plan("uniform", "none", MICRO_BATCHES, 1, MICRO_BATCHES, schedule, False, stages)
        simulate(plan, profile, cluster)
        taken = []
        for _ in range(RUNS):
            begin = time.perf_counter()
            simulate(plan, profile, cluster)
            taken.append(time.perf_counter() - begin)
        seconds = median(taken)
        figure = f"{STAGES} stages x {MICRO_BATCHES} micro-batches, {schedule}: simulate, median of {RUNS}"
        yield Row(figure, "under 2 s", f"{seconds * 1e3:.0f} ms", seconds < 2)
