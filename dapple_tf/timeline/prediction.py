"""What a recorded step was to look like: a simulated step as a timeline of the same kind, to stand beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dapple_tf.simulator.costs import StageCosts
from dapple_tf.simulator.critical import COMPUTE, event_at
from dapple_tf.simulator.engine import encode
from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.timeline.timeline import Event, StageEvent, Timeline, Transfer
from graph_passes.schedules.schedule import Action, Schedule

BY_PROFILE = "simulated with the plan's profile"
BY_TIMES = "simulated with the measured times of each action"

Place = tuple[int, int, str]
"""Stage, replica and device."""


@dataclass(frozen=True)
class Prediction:
    """A step as it was simulated, and ``source``: with what."""

    timeline: Timeline
    source: str


def predict_from_times(measured: Timeline, schedule: Schedule) -> Prediction:
    """The ``schedule`` under the measured median seconds of each stage's actions and transfers, and of AllReduce.

    It has no waiting but the schedule's own, no contention and no jitter: these are what a measured step has on top.
    Weights are updated after the last event in the seconds measured.
    """
    stages = range(len(schedule.stages))
    execution = execute(encode(schedule), [_measured_costs(measured, stage) for stage in stages])
    return Prediction(unroll(execution, measured.places, measured.stage_events), BY_TIMES)


def unroll(execution: Execution, places: Sequence[Place], updates: Sequence[StageEvent] = ()) -> Timeline:
    """The events of a simulated step, each on all its stage's ``places``, and behind them what of ``updates`` are some.

    Transfers and AllReduces that take no time are left out.
    """
    events, transfers, more = [], [], []
    for stage, replica, device in places:
        for m in range(execution.micro_batches):
            for kind in COMPUTE if execution.splits else ("F", "B"):
                found = event_at(execution, COMPUTE[kind], stage, m)
                events.append(Event(Action(stage, kind, m), replica, device, found.start, found.end))
        start, end = float(execution.last_gradients[stage]), float(execution.allreduce_end[stage])
        if end > start:
            more.append(StageEvent("allreduce", stage, replica, device, start, end))
    for stage, cost in enumerate(execution.costs[:-1]):
        for m in range(execution.micro_batches):
            if cost.send_forward_seconds:
                sent = event_at(execution, "send-forward", stage, m)
                transfers.append(Transfer(stage, stage + 1, m, sent.start, sent.end))
            if cost.send_backward_seconds:
                sent = event_at(execution, "send-backward", stage, m)
                transfers.append(Transfer(stage + 1, stage, m, sent.start, sent.end))
    later = execution.step_seconds - min((u.start for u in updates if u.kind == "update"), default=0.0)
    more += [replace(u, start=u.start + later, end=u.end + later) for u in updates if u.kind == "update"]
    events.sort(key=lambda event: (event.start, event.end))
    transfers.sort(key=lambda transfer: transfer.start)
    more.sort(key=lambda event: event.start)
    return Timeline(tuple(events), tuple(transfers), tuple(more))


def _measured_costs(measured: Timeline, stage: int) -> StageCosts:
    """The medians of one stage, and of the boundary behind it; AllReduce as far as it goes on after backward."""
    seconds = {
        kind: _median(e.end - e.start for e in measured.events if (e.action.stage, e.action.kind) == (stage, kind))
        for kind in COMPUTE
    }
    sent = {way: _median(_occupied(measured, way)) for way in ((stage, stage + 1), (stage + 1, stage))}
    summed = [e.end for e in measured.stage_events if (e.kind, e.stage) == ("allreduce", stage)]
    computed = max(event.end for event in measured.events if event.action.stage == stage)
    exposed = max(0.0, max(summed) - computed) if summed else 0.0
    return StageCosts(
        forward_seconds=seconds["F"],
        backward_seconds=seconds["B"] + seconds["W"],  # one action, where it is not split
        weights_seconds=seconds["W"],
        send_forward_seconds=sent[stage, stage + 1],
        send_backward_seconds=sent[stage + 1, stage],
        allreduce_seconds=exposed,
        exposed_seconds=exposed,
        fixed_bytes=0.0,  # only times are simulated
        stash_bytes=0.0,
        working_bytes=0.0,
    )


def _occupied(measured: Timeline, way: tuple[int, int]) -> Iterator[float]:
    """Seconds for which each transfer had its channel for itself: those that came early stood behind others."""
    free = 0.0
    for transfer in sorted(measured.transfers, key=lambda transfer: transfer.end):
        if (transfer.source, transfer.target) == way:
            yield transfer.end - max(transfer.start, free)
            free = transfer.end


def _median(seconds: Iterable[float]) -> float:
    found = list(seconds)
    return statistics.median(found) if found else 0.0
