"""A simulated step: the figures that follow from the times of all its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.execution import Execution
from dapple_tf.simulator.memory import memory_over_time, peak_bytes
from dapple_tf.timeline.events import Event, Place, StageEvent, StepEvents, Transfer
from dapple_tf.timeline.simulation import Simulation
from dapple_tf.timeline.stage_costs import StageCosts


@dataclass(frozen=True, eq=False)
class SimulatedStep(Simulation):
    """A synchronous step; see ``Simulation``."""

    execution: Execution

    @property
    def costs(self) -> tuple[StageCosts, ...]:
        """The costs of each stage, for the largest micro-batch."""
        return self.execution.costs

    @property
    def step_seconds(self) -> float:
        """Seconds until the last event ends."""
        return self.execution.step_seconds

    @cached_property
    def stage_utilisation(self) -> tuple[float, ...]:
        """The fraction of the step in which each stage computes; transfers and AllReduce do not count."""
        if not self.step_seconds:
            return (1.0,) * len(self.costs)
        # At most 1: adding up the same seconds in another order may exceed the step by a rounding error.
        return tuple(min(1.0, busy / self.step_seconds) for busy in self.execution.busy_seconds)

    @cached_property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """The most bytes that one device of each stage holds."""
        return peak_bytes(self.execution)

    def memory(self, stage: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return times (seconds), and the bytes that one device of ``stage`` holds from each on."""
        times, held = memory_over_time(self.execution, stage)
        return tuple(times.tolist()), tuple(held.tolist())

    def order(self, stage: int, replica: int = 0) -> tuple[Action, ...]:
        """Return the actions of ``stage`` in the order in which they run on each of its replicas."""
        return self.execution.stage_actions(stage)

    def events_at(self, places: Sequence[Place]) -> StepEvents:
        """Return all events; those of a stage once at each of its ``places``."""
        return execution_events(self.execution, places)


def execution_events(execution: Execution, places: Sequence[Place], updates: Sequence[StageEvent] = ()) -> StepEvents:
    """Return the events of an executed schedule: those of a stage once at each of its ``places``.

    ``updates``: recorded weight updates, which are moved to the end of the step. Transfers and AllReduces that take no
    time are left out.
    """
    position = {action: i for actions in execution.actions for i, action in enumerate(actions)}
    events = [event for place in places for event in _events_of_place(execution, place)]
    transfers = [transfer for stage in range(execution.stages - 1) for transfer in _transfers(execution, stage)]
    stage_events = []
    for stage, replica, device in places:
        start, end = float(execution.last_gradients[stage]), float(execution.allreduce_end[stage])
        if end > start:
            stage_events.append(StageEvent("allreduce", stage, replica, device, start, end))
    later = execution.step_seconds - min((update.start for update in updates), default=0.0)
    stage_events += [replace(update, start=update.start + later, end=update.end + later) for update in updates]
    return StepEvents(
        # Events that take no time stay in the order in which the worker runs them.
        tuple(sorted(events, key=lambda event: (event.start, event.end, position[event.action]))),
        tuple(sorted(transfers, key=lambda transfer: transfer.start)),
        tuple(sorted(stage_events, key=lambda event: event.start)),
        execution.together,
    )


def _events_of_place(execution: Execution, place: Place) -> list[Event]:
    """Return the actions of one replica in the order in which it runs them."""
    stage, replica, device = place
    backward = execution.times.start_backward[stage].tolist(), execution.times.end_backward[stage].tolist()
    times = {
        "F": (execution.times.start_forward[stage].tolist(), execution.times.end_forward[stage].tolist()),
        "B": backward,
        "I": backward,
        "W": (execution.times.start_weights[stage].tolist(), execution.times.end_weights[stage].tolist()),
    }
    events = []
    for action in execution.stage_actions(stage):
        starts, ends = times[action.kind]
        events.append(Event(action, replica, device, starts[action.micro_batch], ends[action.micro_batch]))
    return events


def _transfers(execution: Execution, stage: int) -> list[Transfer]:
    """Return the transfers between ``stage`` and the next one, in both directions; none on one worker."""
    if execution.order.worker_of[stage] == execution.order.worker_of[stage + 1]:
        return []
    cost, times, transfers = execution.costs[stage], execution.times, list[Transfer]()
    if cost.send_forward_seconds:
        starts, ends = times.start_send_forward[stage], times.end_send_forward[stage]
        transfers += _of_channel(execution, stage, stage + 1, starts, ends)
    if cost.send_backward_seconds:
        starts, ends = times.start_send_backward[stage], times.end_send_backward[stage]
        transfers += _of_channel(execution, stage + 1, stage, starts, ends)
    return transfers


def _of_channel(execution: Execution, source: int, target: int, starts: Floats, ends: Floats) -> Iterator[Transfer]:
    """Yield the transfers of one channel; some carry the results of several micro-batches."""
    count = 0
    for m, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        count += 1
        last = Transfer(source, target, m, start, end)
        if execution.together.isdisjoint(last.producers):  # nothing later goes with it
            yield replace(last, count=count)
            count = 0
