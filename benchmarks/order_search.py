"""``zb-auto`` on random cost vectors: its distance to the lower bound, its seconds over the best named schedule's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common import Row
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap

VECTORS, SEED = 200, 0


def draw_problem(generator: np.random.Generator) -> tuple[WorkerMap, int, list[Any], float]:
    """Return a worker map of 2 to 8 workers, M, costs of each stage, and a device's bytes; a stash is one byte.

    F, I and W of each stage are uniform between 1 and 1.01, 1.5 or 3 seconds, transfers up to 0, 0.2 or 0.5. Memory is
    for as many stashes as 1F1B has on its first worker, 1.5 or 2 times as many, or without a limit.
    """
    workers, chunks = int(generator.integers(2, 9)), int(generator.choice([1, 1, 2]))
    micro_batches = int(generator.integers(workers, 4 * workers + 1))
    make_map = WorkerMap.looped if generator.random() < 0.5 else WorkerMap.waves
    spread, sends = float(generator.choice([1.01, 1.5, 3.0])), float(generator.choice([0.0, 0.2, 0.5]))
    costs = [make_cost(*generator.uniform(1, spread, 3), generator.uniform(0, sends)) for _ in range(workers * chunks)]
    memory = workers * chunks * float(generator.choice([1.0, 1.5, 2.0, 1000.0]))
    return make_map(workers, chunks), micro_batches, costs, memory


def make_cost(forward: float, inputs: float, weights: float, send: float) -> Any:
    """Return the costs of a stage whose stash is one byte."""
    from dapple_tf.timeline.stage_costs import StageCosts

    return StageCosts(forward, inputs + weights, send, send, 0.0, 0.0, 0.0, 1.0, 0.0, weights)


def compare_with_bound() -> Iterator[Row]:
    """Yield the distances to the lower bound and to the named schedules, and the seconds of a large search."""
    from dapple_tf.simulator.order_search import search_order

    generator = np.random.default_rng(SEED)
    distances, over_named = [], []
    for _ in range(VECTORS):
        found = search_order(*draw_problem(generator))
        distances.append(found.distance)
        if found.named is not None:
            over_named.append(found.seconds / found.named[1])
    figure = f"zb-auto, {VECTORS} random cost vectors"
    yield Row(f"{figure}: above the lower bound, median", "-", f"{np.median(distances):.2%}", True)
    yield Row(f"{figure}: above the lower bound, worst", "-", f"{max(distances):.2%}", True)
    text = f"median {np.median(over_named):.3f}, largest {max(over_named):.3f}, of {len(over_named)}"
    yield Row(f"{figure}: over the best named schedule", "at most 1", text, max(over_named) <= 1 + 1e-12)
    costs = [make_cost(*generator.uniform(1, 1.5, 3), 0.1) for _ in range(16)]
    start = time.perf_counter()
    found = search_order(WorkerMap.one_per_stage(16), 64, costs, 24.0)
    seconds = time.perf_counter() - start
    text = f"{seconds:.2f} s, {found.distance:.2%} above the bound"
    yield Row("zb-auto of 16 workers x 64 micro-batches", "at most 2 s", text, seconds <= 2)
