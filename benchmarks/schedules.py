"""Every schedule: closed forms, ``zb-auto`` against its bound, the gpt as two ranks, steps of layers that sleep."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores, time_interleaved
from benchmarks.needs import find_missing_for_ranks
from benchmarks.schedule_forms import compare_with_papers
from benchmarks.schedule_ranks import rows_of_ranks
from benchmarks.waits import stage_names, start_waiting, waits
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap

WORKERS, MICRO_BATCHES, SECONDS = (2, 4), (8, 16), 0.02  # of a layer's F, and of each half of its B
LAYERS = 2  # of each worker: one stage, or a stage each
NAMES = {  # the stages of a worker, by schedule
    "dapple-a": 1,
    "dapple-b": 1,
    "gpipe": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-auto": 1,
    "interleaved-1f1b:v=2": 2,
    "looped-bfs:v=2": 2,
    "interleaved-zb:v=2": 2,
    "zb-v": 2,
    "dualpipe-v": 2,
    "hanayo:w=1": 2,
    "zb-auto:v=2": 2,
}
FASTER = (  # the first is to beat the second
    ("interleaved-1f1b:v=2", "dapple-a"),
    ("looped-bfs:v=2", "dapple-a"),
    ("zb-v", "zb-h1"),
    ("zb-auto", "zb-h1"),
    ("zb-auto:v=2", "zb-h1"),
)


def run() -> Iterator[Row]:
    """Yield the closed forms, the search, two ranks, then the measured steps."""
    yield from compare_with_papers()
    yield from compare_with_bound()
    lack = find_missing_for_ranks()
    yield from [Row("gpt as two ranks", "-", f"left out: {lack}", True)] if lack else rows_of_ranks()
    yield from (Row(**row) for row in run_on_cores("benchmarks.schedules", available_cores(), timeout=3000.0))


# --- zb-auto on random cost vectors: its distance to the lower bound, its seconds over the best named schedule's

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


# --- Layers that sleep


def build(name: str, workers: int, micro_batches: int) -> Any:
    """Return the schedule; what ``zb-auto`` finds for the seconds of the waiting layers, with memory for 2 p stashes.

    Of one stage per worker these are 2 p micro-batches, as under zb-h2; of two stages p micro-batches, as under zb-v.
    """
    from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
    from dapple_tf.simulator.order_search import search_order
    from dapple_tf.timeline.stage_costs import StageCosts

    stages = workers * NAMES[name]
    if not name.startswith("zb-auto"):
        return ScheduleSpec.parse(name).build(stages, micro_batches)
    layers = LAYERS / NAMES[name]
    cost = StageCosts(layers * SECONDS, layers * 2 * SECONDS, 0, 0, 0, 0, 0, 1.0, 0, layers * SECONDS)
    return search_order(
        ScheduleSpec.parse(name).worker_map(stages), micro_batches, [cost] * stages, 2.0 * workers
    ).schedule


def simulated(name: str, workers: int, micro_batches: int) -> float:
    """Return the simulated seconds of a step, without transfers."""
    from dapple_tf.graph_passes.schedules.schedule import run_schedule

    seconds = {"F": SECONDS, "B": 2 * SECONDS, "I": SECONDS, "W": SECONDS}
    layers = LAYERS // NAMES[name]  # of a stage
    schedule = build(name, workers, micro_batches)
    return max(ends[-1] for ends in run_schedule(schedule, lambda action: layers * seconds[action.kind]))


def measure(workers: int, micro_batches: int) -> dict[str, float]:
    """Return the median seconds of a step under each schedule, timed in turn."""
    count, calls = workers * LAYERS, {}
    starts = [0, *stage_names(count)]
    for name, chunks in NAMES.items():
        schedule = build(name, workers, micro_batches)
        layers = LAYERS // chunks
        devices = [schedule.worker_map.worker_of[layer // layers] for layer in range(count)]
        timed = waits(count, forward=SECONDS, inputs=SECONDS, weights=SECONDS, devices=devices)
        step = timed.pipeline(
            stages=starts[layers::layers],
            micro_batches=micro_batches,
            schedule=str(schedule),
            inexact="allow",  # that Python code treats samples one by one is not known
        )
        calls[name] = lambda step=step, batch=timed.batch: float(step(*batch))
    time_interleaved(calls, 2)
    taken = time_interleaved(calls, 5)
    return {name: median(taken[name]) for name in calls}


def rows_of_waits() -> list[Row]:
    """Return the rows of the measured steps."""
    start_waiting(max(WORKERS) * LAYERS)
    rows: list[Row] = []
    for workers, micro_batches in itertools.product(WORKERS, MICRO_BATCHES):
        found = measure(workers, micro_batches)
        predicted = {name: simulated(name, workers, micro_batches) for name in found}
        where = f"{workers} workers, M = {micro_batches}"
        for name, seconds in found.items():
            ratio = seconds / predicted[name]
            text = f"{ratio:.3f} ({seconds * 1e3:.0f} ms, simulated {predicted[name] * 1e3:.0f} ms)"
            rows.append(Row(f"{where}, {name}: measured over simulated", "within 10%", text, abs(ratio - 1) <= 0.1))
        for name, other in FASTER:
            gain, wanted = found[name] / found[other], predicted[name] / predicted[other]
            rows.append(
                Row(f"{where}: {name} over {other}", f"below 1; simulated {wanted:.3f}", f"{gain:.3f}", gain < 1)
            )
    return rows


if __name__ == "__main__":
    print_rows(rows_of_waits())
