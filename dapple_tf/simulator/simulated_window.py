"""A simulated asynchronous window: the figures that follow from the times of all its events."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.simulator.window_execution import WindowExecution
from dapple_tf.timeline.events import Event, Place, StageEvent, StepEvents, Transfer
from dapple_tf.timeline.simulation import Simulation
from dapple_tf.timeline.stage_costs import StageCosts


@dataclass(frozen=True, eq=False)
class SimulatedWindow(Simulation):
    """An asynchronous window; see ``Simulation``. The ``acr`` is that of the actions of one replica of each stage."""

    execution: WindowExecution

    @property
    def window(self) -> Window:
        """The window that was executed."""
        return self.execution.window

    @property
    def costs(self) -> tuple[StageCosts, ...]:
        """The costs of each stage: of an action on one replica, and of one update."""
        return self.execution.costs.stages

    @property
    def step_seconds(self) -> float:
        """Seconds until the last event ends."""
        return self.execution.seconds

    @cached_property
    def stage_utilisation(self) -> tuple[float, ...]:
        """The fraction of the window in which a replica of each stage computes, on average."""
        if not self.step_seconds:
            return (1.0,) * len(self.costs)
        found = []
        for stage, (cost, replicas) in enumerate(zip(self.costs, self.plan.replicas, strict=True)):
            runs = sum(len(row) for (of, _), row in self.window.rows.items() if of == stage) / 2
            busy = runs * (cost.forward_seconds + cost.backward_seconds) / replicas
            found.append(min(1.0, busy / self.step_seconds))
        return tuple(found)

    @cached_property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """The most bytes that one device of each stage holds."""
        places = [[p for p in self.window.rows if p[0] == stage] for stage in range(len(self.costs))]
        return tuple(max(max(self.memory(*place)[1]) for place in of_stage) for of_stage in places)

    def memory(self, stage: int, replica: int = 0) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return times (seconds), and the bytes that a replica of ``stage`` holds from each on.

        Weights, gradients, slots and versions count all the time, and the largest working set. A forward adds a stash
        when it starts, and the backward of the micro-batch frees it when it ends.
        """
        cost = self.costs[stage]
        times, changes = [0.0], [0]
        for action in self.window.rows[stage, replica]:
            timed = self.execution.actions[action, replica]
            times.append(timed.start if action.kind == "F" else timed.end)
            changes.append(1 if action.kind == "F" else -1)
        base = cost.fixed_bytes + cost.working_bytes
        return tuple(times), tuple(base + held * cost.stash_bytes for held in itertools.accumulate(changes))

    def order(self, stage: int, replica: int = 0) -> tuple[Action, ...]:
        """Return the actions of a replica of ``stage`` in the order in which they run."""
        return self.window.rows[stage, replica]

    def events_at(self, places: Sequence[Place]) -> StepEvents:
        """Return all events; ``places``: stage, replica and device of every replica."""
        return window_events(self.execution, places)


def window_events(execution: WindowExecution, places: Sequence[Place]) -> StepEvents:
    """Return the events of an executed window. Transfers, AllReduces and updates that take no time are left out.

    An AllReduce is there once for each replica, an update at replica 0.
    """
    devices = {(stage, replica): device for stage, replica, device in places}
    versions, window = execution.versions, execution.window
    events = [
        Event(action, replica, devices[action.stage, replica], timed.start, timed.end, versions.used[action])
        for (action, replica), timed in execution.actions.items()
    ]
    transfers = [
        Transfer(action.stage, action.stage + (1 if action.kind == "F" else -1), action.micro_batch, t.start, t.end)
        for action, t in execution.transfers.items()
        if t.end > t.start
    ]
    stage_events = _stage_events(execution, devices)
    return StepEvents(
        tuple(sorted(events, key=lambda event: (event.start, event.end))),
        tuple(sorted(transfers, key=lambda transfer: transfer.start)),
        tuple(sorted(stage_events, key=lambda event: event.start)),
        window=window,
    )


def _stage_events(execution: WindowExecution, devices: Mapping[tuple[int, int], str]) -> list[StageEvent]:
    found, groups = [], execution.window.updates
    for (stage, number), t in execution.reductions.items():
        for replica in range(execution.window.replicas[stage]) if t.end > t.start else ():
            last = groups[stage][number][-1]
            found.append(StageEvent("allreduce", stage, replica, devices[stage, replica], t.start, t.end, last))
    for (stage, number), t in execution.updates.items():
        if t.end > t.start:
            last = groups[stage][number][-1]
            found.append(StageEvent("update", stage, 0, devices[stage, 0], t.start, t.end, last))
    return found
