"""Every schedule: closed forms, ``zb-auto`` against its bound, the gpt as two ranks, steps of layers that sleep."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores, time_interleaved
from benchmarks.needs import find_missing_for_ranks
from benchmarks.order_search import compare_with_bound
from benchmarks.schedule_forms import compare_with_papers
from benchmarks.schedule_ranks import rows_of_ranks
from benchmarks.waits import stage_names, start_waiting, waits

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
        step = dapple.pipeline(
            timed.workload.loss_fn,
            optimizer=timed.workload.optimizer,
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
