"""Several stages per device: bubbles against the papers' formulas, steps of waiting stages against the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores, time_interleaved
from benchmarks.waits import stage_names, start_waiting, waits

WORKERS, MICRO_BATCHES, CHUNKS, SECONDS = (2, 4), (8, 16), 2, 0.02  # of a layer's F, and of each half of its B
CHUNKED = ("interleaved-1f1b:v=2", "looped-bfs:v=2")
STRAIGHT = "dapple-a"


def run() -> Iterator[Row]:
    """Yield the closed forms, then the measured steps."""
    yield from compare_with_papers()
    yield from (Row(**row) for row in run_on_cores("benchmarks.chunked", available_cores(), timeout=1200.0))


def compare_with_papers() -> list[Row]:
    """Compare the largest idle time of a worker with (p - 1) (f + b), and stashes with p v + p - 1 and M v."""
    from graph_passes.schedules.grid import Units, time_workers
    from graph_passes.schedules.policies import build_schedule

    rows = []
    for name, stashes in (
        ("interleaved-1f1b", lambda p, v, m: min(p * v + p - 1, m * v)),
        ("looped-bfs", lambda p, v, m: m * v),
    ):
        right = total = 0
        for p, v, times in itertools.product(range(2, 17), (1, 2, 4), (1, 2, 4)):
            m = p * times
            if m <= 64:
                workers = time_workers(build_schedule(f"{name}:v={v}", p * v, m), Units(1, 2))
                idle, held = max(w.idle for w in workers), max(w.stashes for w in workers)
                right += (idle, held) == ((p - 1) * 3, stashes(p, v, m))
                total += 1
        figure = f"{name}: idle time and stashes, 2 to 16 workers, v = 1, 2, 4, M to 64"
        rows.append(Row(figure, "the paper's", f"{right} of {total}", right == total))
    return rows


def simulated(name: str, workers: int, micro_batches: int) -> float:
    """Return the simulated seconds of a step of ``CHUNKS`` layers a worker, without transfers."""
    from graph_passes.schedules.policies import build_schedule
    from graph_passes.schedules.schedule import run_schedule

    layers = 1 if name in CHUNKED else CHUNKS  # of a stage
    schedule = build_schedule(name, workers * CHUNKS // layers, micro_batches)
    seconds = {"F": layers * SECONDS, "B": 2 * layers * SECONDS}
    return max(ends[-1] for ends in run_schedule(schedule, lambda action: seconds[action.kind]))


def measure(workers: int, micro_batches: int) -> dict[str, float]:
    """Return the median seconds of a step under each schedule, timed in turn."""
    count, calls = workers * CHUNKS, {}
    for name in (STRAIGHT, *CHUNKED):
        devices = [layer % workers if name in CHUNKED else layer // CHUNKS for layer in range(count)]
        timed = waits(count, forward=SECONDS, inputs=SECONDS, weights=SECONDS, devices=devices)
        starts = stage_names(count)
        step = dapple.pipeline(
            timed.workload.loss_fn,
            optimizer=timed.workload.optimizer,
            stages=starts if name in CHUNKED else starts[CHUNKS - 1 :: CHUNKS],
            micro_batches=micro_batches,
            schedule=name,
            inexact="allow",  # that Python code treats samples one by one is not known
        )
        calls[name] = lambda step=step, batch=timed.batch: float(step(*batch))
    time_interleaved(calls, 2)
    taken = time_interleaved(calls, 7)
    return {name: median(taken[name]) for name in calls}


def rows_of_waits() -> list[Row]:
    """Return the rows of the measured steps."""
    start_waiting(max(WORKERS) * CHUNKS)
    rows: list[Row] = []
    for workers, micro_batches in itertools.product(WORKERS, MICRO_BATCHES):
        found: dict[str, Any] = measure(workers, micro_batches)
        predicted = {name: simulated(name, workers, micro_batches) for name in found}
        where = f"{workers} workers, M = {micro_batches}"
        for name, seconds in found.items():
            ratio = seconds / predicted[name]
            text = f"{ratio:.3f} ({seconds * 1e3:.0f} ms, simulated {predicted[name] * 1e3:.0f} ms)"
            rows.append(Row(f"{where}, {name}: measured over simulated", "within 10%", text, abs(ratio - 1) <= 0.1))
        for name in CHUNKED:
            gain, wanted = found[name] / found[STRAIGHT], predicted[name] / predicted[STRAIGHT]
            rows.append(Row(f"{where}: {name} over 1F1B", f"below 1; simulated {wanted:.3f}", f"{gain:.3f}", gain < 1))
    return rows


if __name__ == "__main__":
    print_rows(rows_of_waits())
