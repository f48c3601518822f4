"""ZB-H1 against 1F1B (dapple-a): weight gradients fill the bubble; simulated, with sleeps and with real products.

With stages that sleep (see ``benchmarks.waits``) there can be more stages than cores. Both schedules are timed in turn
in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import dapple_tf as dapple
from benchmarks.common import Row, available_cores, median, print_rows, run_on_cores, time_interleaved
from benchmarks.needs import find_missing_for_ranks
from benchmarks.waits import stage_names, start_waiting, waits
from benchmarks.zero_bubble_ranks import rows_of_ranks
from dapple_tf.graph_passes.schedules.schedule import FREEING

STAGES, MICRO_BATCHES, SECONDS = 4, 8, 0.02  # of F, of B (gradients of inputs) and of W
SCHEDULES = ("dapple-a", "zb-h1")


def run() -> Iterator[Row]:
    """Yield the simulator against the paper's formulas, then the measurements against the simulator."""
    yield from compare_with_paper()
    yield from (Row(**row) for row in run_on_cores("benchmarks.zero_bubble", available_cores()))
    lack = find_missing_for_ranks()
    if lack is None:
        predicted = [simulated(name, 2, MICRO_BATCHES, 1, 1, 1) for name in SCHEDULES]
        yield from rows_of_ranks(predicted[1] / predicted[0])
    else:
        yield Row("dense layers, two ranks", "below 1", f"left out: {lack}", True)


def compare_with_paper() -> list[Row]:
    """Compare bubbles with (S - 1) (T_F + T_B - T_W), and + T_W for 1F1B (Qi et al., 2023), and K with 1F1B's."""
    from dapple_tf.graph_passes.schedules.spec import ScheduleSpec

    right = total = 0
    least_room = STAGES
    for stages, f, b in itertools.product(range(1, 9), (1, 2, 3), (1, 2, 3)):
        for w, m in itertools.product(range(1, min(f, b) + 1), (stages, 2 * stages, 4 * stages)):
            wanted = (stages - 1) * (f + b + w), (stages - 1) * (f + b - w)
            found = [simulated(name, stages, m, f, b, w) - m * (f + b + w) for name in SCHEDULES]
            right += sum(a == c for a, c in zip(found, wanted, strict=True))
            total += 2
            in_flight = [max(ScheduleSpec.parse(name).build(stages, m).in_flight) for name in SCHEDULES]
            least_room = min(least_room, in_flight[0] - in_flight[1])
    return [
        Row(
            "simulated bubbles of 1F1B and ZB-H1, S to 8, M to 4 S",
            "the paper's",
            f"{right} of {total}",
            right == total,
        ),
        Row(
            "ZB-H1's most micro-batches in flight, on the same",
            "1F1B's",
            "equal" if least_room == 0 else f"up to {-least_room} more",
            least_room >= 0,
        ),
    ]


def simulated(schedule: str, stages: int, micro_batches: int, f: float, b: float, w: float) -> float:
    """Return the simulated seconds of a step of equal stages without transfers."""
    import numpy as np

    from dapple_tf.simulator.engine import run as run_order
    from dapple_tf.simulator.engine import uniform_seconds, whole_rings
    from dapple_tf.simulator.order import named_order

    order = named_order(schedule, stages, micro_batches).order
    forward, backward, weights, nothing = (np.full(stages, float(x)) for x in (f, b + w, w, 0))
    seconds = uniform_seconds(forward, backward, weights, nothing, nothing)
    return run_order(order, seconds, whole_rings(nothing)).seconds


def measure() -> dict[str, Any]:
    """Return the median seconds of a step under each schedule, their median ratio, and the most in flight."""
    steps, batches = {}, {}
    for name in SCHEDULES:
        timed = waits(STAGES, forward=SECONDS, inputs=SECONDS, weights=SECONDS)
        loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
        steps[name] = dapple.pipeline(
            loss_fn,
            optimizer=optimizer,
            stages=stage_names(STAGES),
            micro_batches=MICRO_BATCHES,
            schedule=name,
            inexact="allow",  # that Python code treats samples one by one is not known
        )
        batches[name] = timed.batch
    in_flight = []
    for name, step in steps.items():
        for _ in range(2):  # the first one builds
            step.record(*batches[name])
        in_flight.append(count_in_flight(step.timeline))
    calls = {name: lambda step=step, name=name: float(step(*batches[name])) for name, step in steps.items()}
    time_interleaved(calls, 2)
    taken = time_interleaved(calls, 15)
    pairs = zip(*(taken[name] for name in SCHEDULES), strict=True)
    return {
        "seconds": [median(taken[name]) for name in SCHEDULES],
        "ratio": median([after / before for before, after in pairs]),
        "in_flight": in_flight,
    }


def count_in_flight(timeline: Any) -> int:
    """Return the largest number of micro-batches in flight on a stage: F has started, B or W has not ended."""
    most = 0
    for stage in range(STAGES):
        events = [event for event in timeline.events if event.action.stage == stage]
        changes = [(event.start, 1) for event in events if event.action.kind == "F"]
        changes += [(event.end, -1) for event in events if event.action.kind in FREEING]
        most = max([most, *itertools.accumulate(change for _, change in sorted(changes))])
    return most


def rows_of_waits() -> list[Row]:
    """Return the rows of S = 4, M = 8, F = B = W."""
    start_waiting(STAGES)
    found = measure()
    before, after = found["seconds"]
    predicted = [simulated(name, STAGES, MICRO_BATCHES, SECONDS, SECONDS, SECONDS) for name in SCHEDULES]
    figure = f"S = {STAGES}, M = {MICRO_BATCHES}, F = B = W = {SECONDS * 1e3:.0f} ms of waiting: ZB-H1 over 1F1B"
    text = f"{found['ratio']:.3f} ({before * 1e3:.0f} ms, {after * 1e3:.0f} ms)"
    wanted = predicted[1] / predicted[0]
    return [
        Row(figure, f"below 1; simulated {wanted:.3f}", text, found["ratio"] < 1),
        *(
            Row(f"{name}, the same: measured over simulated", "within 10%", f"{ratio:.3f}", ratio <= 1.1)
            for name, ratio in zip(SCHEDULES, (before / predicted[0], after / predicted[1]), strict=True)
        ),
        Row(
            "the same: most micro-batches in flight on a stage, from time stamps",
            "no more than 1F1B's",
            f"{found['in_flight'][1]}, and {found['in_flight'][0]}",
            found["in_flight"][1] <= found["in_flight"][0],
        ),
    ]


if __name__ == "__main__":
    print_rows(rows_of_waits())
