"""ZB-H1 against 1F1B (dapple-a): the bubble that weight gradients fill, in the simulator, in waits and in products.

Stages of waits (see ``benchmarks.waits``) show schedules of more stages than there are cores. Both schedules run in one
process, in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import dapple_tf as dapple
from benchmarks.common import Row, cores, median, pinned, report, seconds_in_turn
from benchmarks.needs import lack_of_ranks
from benchmarks.waits import stage_names, start_waiting, waits
from benchmarks.zero_bubble_ranks import rows_of_ranks

STAGES, MICRO_BATCHES, SECONDS = 4, 8, 0.02  # of F, of B (gradients of inputs) and of W
SCHEDULES = ("dapple-a", "zb-h1")


def run() -> Iterator[Row]:
    """The simulator against the paper's closed forms, then what was measured against the simulator."""
    yield from compare_with_paper()
    yield from (Row(**row) for row in pinned("benchmarks.zero_bubble", cores()))
    lack = lack_of_ranks()
    if lack is None:
        predicted = [simulated(name, 2, MICRO_BATCHES, 1, 1, 1) for name in SCHEDULES]
        yield from rows_of_ranks(predicted[1] / predicted[0])
    else:
        yield Row("dense layers, two ranks", "below 1", f"left out: {lack}", True)


def compare_with_paper() -> list[Row]:
    """Bubbles of (S - 1) (T_F + T_B - T_W), and + T_W for 1F1B (Qi et al., 2023); the most micro-batches in flight."""
    from graph_passes.schedules.policies import build_schedule

    right = total = 0
    least_room = STAGES
    for stages, f, b in itertools.product(range(1, 9), (1, 2, 3), (1, 2, 3)):
        for w, m in itertools.product(range(1, min(f, b) + 1), (stages, 2 * stages, 4 * stages)):
            wanted = (stages - 1) * (f + b + w), (stages - 1) * (f + b - w)
            found = [simulated(name, stages, m, f, b, w) - m * (f + b + w) for name in SCHEDULES]
            right += sum(a == c for a, c in zip(found, wanted, strict=True))
            total += 2
            held = [max(build_schedule(name, stages, m).in_flight) for name in SCHEDULES]
            least_room = min(least_room, held[0] - held[1])
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
    """Seconds of a step of equal stages without transfers."""
    import numpy as np

    from dapple_tf.simulator.engine import has_weights, step_seconds
    from dapple_tf.simulator.named_orders import named_order

    order = named_order(schedule, stages, micro_batches).order
    splits = has_weights(order)
    forward, backward, weights, nothing = (np.full(stages, float(x)) for x in (f, b if splits else b + w, w, 0))
    return float(step_seconds(order, forward, backward, weights[: splits * stages], nothing, nothing, nothing))


def measure() -> dict[str, Any]:
    """Median seconds of a step under each schedule, the median of their ratios, and the most in flight."""
    steps, batches = {}, {}
    for name in SCHEDULES:
        timed = waits(STAGES, forward=SECONDS, inputs=SECONDS, weights=SECONDS)
        loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
        steps[name] = dapple.pipeline(
            loss_fn, optimizer=optimizer, stages=stage_names(STAGES), micro_batches=MICRO_BATCHES, schedule=name
        )
        batches[name] = timed.batch
    held = []
    for name, step in steps.items():
        for _ in range(2):  # the first one builds
            step.record(*batches[name])
        held.append(most_in_flight(step.timeline))
    calls = {name: lambda step=step, name=name: float(step(*batches[name])) for name, step in steps.items()}
    seconds_in_turn(calls, 2)
    taken = seconds_in_turn(calls, 15)
    pairs = zip(*(taken[name] for name in SCHEDULES), strict=True)
    return {
        "seconds": [median(taken[name]) for name in SCHEDULES],
        "ratio": median([after / before for before, after in pairs]),
        "held": held,
    }


def most_in_flight(timeline: Any) -> int:
    """Over all stages, the most micro-batches whose F had begun, and whose W (or whole backward) had not ended."""
    frees = "W" if any(event.action.kind == "W" for event in timeline.events) else "B"
    most = 0
    for stage in range(STAGES):
        events = [event for event in timeline.events if event.action.stage == stage]
        changes = [(event.start, 1) for event in events if event.action.kind == "F"]
        changes += [(event.end, -1) for event in events if event.action.kind == frees]
        most = max([most, *itertools.accumulate(change for _, change in sorted(changes))])
    return most


def rows_of_waits() -> list[Row]:
    """S = 4, M = 8, F = B = W."""
    start_waiting(STAGES)
    found = measure()
    before, after = found["seconds"]
    predicted = [simulated(name, STAGES, MICRO_BATCHES, SECONDS, SECONDS, SECONDS) for name in SCHEDULES]
    figure = f"S = {STAGES}, M = {MICRO_BATCHES}, F = B = W = {SECONDS * 1e3:.0f} ms of waiting: ZB-H1 over 1F1B"
    told = f"{found['ratio']:.3f} ({before * 1e3:.0f} ms, {after * 1e3:.0f} ms)"
    wanted = predicted[1] / predicted[0]
    return [
        Row(figure, f"below 1; simulated {wanted:.3f}", told, found["ratio"] < 1),
        *(
            Row(f"{name}, the same: measured over simulated", "within 10%", f"{ratio:.3f}", ratio <= 1.1)
            for name, ratio in zip(SCHEDULES, (before / predicted[0], after / predicted[1]), strict=True)
        ),
        Row(
            "the same: most micro-batches in flight on a stage, from time stamps",
            "no more than 1F1B's",
            f"{found['held'][1]}, and {found['held'][0]}",
            found["held"][1] <= found["held"][0],
        ),
    ]


if __name__ == "__main__":
    report(rows_of_waits())
