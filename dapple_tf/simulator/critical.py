"""The critical path: the chain of events without a gap that ends with the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dapple_tf.simulator.engine import decode
from dapple_tf.simulator.execution import Execution
from graph_passes.schedules import schedule

Kind = Literal["forward", "backward", "weights", "send-forward", "send-backward", "allreduce"]
COMPUTE: Mapping[schedule.Kind, Kind] = {"F": "forward", "B": "backward", "W": "weights"}


@dataclass(frozen=True)
class Event:
    """Something that took from ``start`` to ``end`` (seconds); a transfer's ``stage`` is the one before its boundary.

    ``micro_batch`` is None for AllReduce.
    """

    kind: Kind
    stage: int
    micro_batch: int | None
    start: float
    end: float

    def __str__(self) -> str:
        match self.kind:
            case "forward":
                return f"{self.stage}F{self.micro_batch}"
            case "backward":
                return f"{self.stage}B{self.micro_batch}"
            case "weights":
                return f"{self.stage}W{self.micro_batch}"
            case "send-forward":
                return f"{self.stage}>{self.stage + 1} F{self.micro_batch}"
            case "send-backward":
                return f"{self.stage + 1}>{self.stage} B{self.micro_batch}"
        return f"{self.stage} AllReduce"


def critical_path(execution: Execution) -> tuple[Event, ...]:
    """From the step's start to its last event, each event starting when the one before it ends.

    Where several ended then, the one on the same device is followed. Durations add up to the step's seconds.
    """
    stage = int(np.argmax(execution.allreduce_end))
    event = Event(
        "allreduce",
        stage,
        None,
        float(execution.last_gradients[stage]),
        float(execution.allreduce_end[stage]),
    )
    path = [event]
    while True:
        before = [found for found in _predecessors(execution, event) if found.end == event.start]
        if not before:
            break
        event = before[0]
        path.append(event)
    return tuple(event for event in reversed(path) if event.kind != "allreduce" or event.end > event.start)


def critical_stage(path: Sequence[Event]) -> int:
    """The stage whose compute fills most of ``path``; the first of several."""
    busy: dict[int, float] = {}
    for event in path:
        if event.kind in COMPUTE.values():
            busy[event.stage] = busy.get(event.stage, 0.0) + event.end - event.start
    return max(sorted(busy), key=lambda stage: busy[stage])


def event_at(execution: Execution, kind: Kind, stage: int, micro_batch: int) -> Event:
    """The event of that kind (not AllReduce)."""
    starts, ends = {
        "forward": (execution.start_forward, execution.end_forward),
        "backward": (execution.start_backward, execution.end_backward),
        "weights": (execution.start_weights, execution.end_weights),
        "send-forward": (execution.start_send_forward, execution.end_send_forward),
        "send-backward": (execution.start_send_backward, execution.end_send_backward),
    }[kind]
    return Event(kind, stage, micro_batch, float(starts[stage, micro_batch]), float(ends[stage, micro_batch]))


def _predecessors(execution: Execution, event: Event) -> list[Event]:
    """What ``event`` waited for: first what ran on its own device, then the rest."""
    stage, m = event.stage, event.micro_batch
    if m is None:
        return [_action(execution, stage, execution.order.shape[1] - 1)]
    match event.kind:
        case "forward":
            sent = [event_at(execution, "send-forward", stage - 1, m)] if stage else []
            return [*_previous(execution, stage, m), *sent]
        case "backward":
            sent = [event_at(execution, "send-backward", stage, m)] if stage + 1 < execution.stages else []
            return [*_previous(execution, stage, execution.micro_batches + m), *sent]
        case "weights":
            return _previous(execution, stage, 2 * execution.micro_batches + m)
        case "send-forward":
            producer = event_at(execution, "forward", stage, m)
            return [producer, *_channel(execution, "send-forward", stage, stage, m)]
    producer = event_at(execution, "backward", stage + 1, m)
    return [producer, *_channel(execution, "send-backward", stage, stage + 1, execution.micro_batches + m)]


def _action(execution: Execution, stage: int, place: int) -> Event:
    action = decode(int(execution.order[stage, place]), stage, execution.micro_batches)
    return event_at(execution, COMPUTE[action.kind], stage, action.micro_batch)


def _previous(execution: Execution, stage: int, column: int) -> list[Event]:
    """The action before the one in ``column`` of `places`, on the same stage."""
    place = int(execution.places[stage, column])
    return [_action(execution, stage, place - 1)] if place else []


def _channel(execution: Execution, kind: Kind, stage: int, producer: int, column: int) -> list[Event]:
    """The transfer before, in the same channel: that of the producer's action of the same kind before this one."""
    place = int(execution.places[producer, column])
    earlier = execution.order[producer, :place]
    backwards = -1 - earlier[(earlier < 0) & (earlier >= -execution.micro_batches)]
    same = earlier[earlier >= 0] if kind == "send-forward" else backwards
    return [event_at(execution, kind, stage, int(same[-1]))] if len(same) else []
