"""Execute a schedule whose micro-batches have different sizes, each with its own seconds and bytes.

Planners make micro-batches of equal sizes only, so this need not be as fast as ``engine``: ``run_schedule`` gives the
ends of all actions, from which all other times follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.simulator.compiled import Floats
from dapple_tf.simulator.engine import encode
from dapple_tf.simulator.execution import Execution
from dapple_tf.timeline.stage_costs import StageCosts
from graph_passes.schedules.schedule import Action, Schedule, dependencies, run_schedule


def execute_sizes(
    schedule: Schedule, costs: Sequence[StageCosts], of_micro_batches: Sequence[Sequence[StageCosts]]
) -> Execution:
    """Run ``schedule`` where each micro-batch has costs of its own; the result is as that of ``execute``.

    ``costs``: of each stage, for what is no micro-batch's own (AllReduce, weights, the largest working set).
    ``of_micro_batches``: for each micro-batch those of each stage, of which the seconds and the stash count. Raises
    ScheduleError for another number of stages or micro-batches, and for a schedule that deadlocks.
    """
    stages, micro_batches = len(schedule.stages), schedule.micro_batches
    shape = len(of_micro_batches), {len(costs), *map(len, of_micro_batches)}
    if shape != (micro_batches, {stages}):
        raise ScheduleError(
            f"the schedule has {stages} stages x {micro_batches} micro-batches, but there are costs of "
            f"{len(costs)} stages and {len(of_micro_batches)} micro-batches"
        )

    def seconds(action: Action) -> float:
        cost = of_micro_batches[action.micro_batch][action.stage]
        return {
            "F": cost.forward_seconds,
            "B": cost.backward_seconds,
            "I": cost.backward_seconds - cost.weights_seconds,
            "W": cost.weights_seconds,
        }[action.kind]

    def send_seconds(action: Action) -> float:
        own = of_micro_batches[action.micro_batch]
        if action.kind == "F":
            return own[action.stage].send_forward_seconds
        return own[action.stage - 1].send_backward_seconds if action.stage else 0.0

    ends = run_schedule(schedule, seconds, send_seconds)
    if any(len(done) < len(actions) for done, actions in zip(ends, schedule.workers, strict=True)):
        raise ScheduleError("the schedule deadlocks: call graph_passes.schedules.schedule.check(schedule) to see where")
    times = _Times(schedule, bool(schedule.split))
    for actions, of_worker in zip(schedule.workers, ends, strict=True):
        for action, end in zip(actions, of_worker, strict=True):
            times.add(action, end, send_seconds(action))
    times.add_starts()
    return Execution(
        encode(schedule), tuple(costs), *times.arrays, of_micro_batches=tuple(map(tuple, of_micro_batches))
    )


class _Times:
    """The arrays of an ``Execution``, filled from the ends of actions."""

    def __init__(self, schedule: Schedule, splits: bool) -> None:
        self._schedule = schedule
        self._stages, micro_batches = len(schedule.stages), schedule.micro_batches
        rows = [self._stages] * 4 + [self._stages * splits] * 2 + [self._stages] * 4
        self.arrays: list[Floats] = [np.full((count, micro_batches), np.nan) for count in rows]
        self._channel_free: dict[tuple[int, int], float] = {}  # by boundary and direction
        self._ends: dict[Action, float] = {}

    def add(self, action: Action, end: float, send_seconds: float) -> None:
        """Note the end of an action, and what it sends; the actions of a worker come in order."""
        self._ends[action] = end
        _, ends = self._of_kind(action)
        ends[action.stage, action.micro_batch] = end
        direction = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        if not direction or action.stage + direction not in range(self._stages):
            return
        boundary = min(action.stage, action.stage + direction)
        begin = end
        if self._crosses(boundary):
            begin = max(end, self._channel_free.get((boundary, direction), 0.0))
            end = self._channel_free[boundary, direction] = begin + send_seconds
        starts, ends = self._sends(direction)
        starts[boundary, action.micro_batch], ends[boundary, action.micro_batch] = begin, end

    def add_starts(self) -> None:
        """Note the start of every action: the worker is free, and what the action takes has arrived."""
        for actions in self._schedule.workers:
            free = 0.0
            for action in actions:
                taken = [a for a in dependencies(action, self._stages) if a in self._ends]
                starts, _ = self._of_kind(action)
                starts[action.stage, action.micro_batch] = max([free, *(self._arrival(a, action) for a in taken)])
                free = self._ends[action]

    def _arrival(self, source: Action, action: Action) -> float:
        if source.stage == action.stage:
            return self._ends[source]
        _, ends = self._sends(action.stage - source.stage)
        return float(ends[min(source.stage, action.stage), action.micro_batch])

    def _crosses(self, boundary: int) -> bool:
        worker_of = self._schedule.worker_map.worker_of
        return worker_of[boundary] != worker_of[boundary + 1]

    def _of_kind(self, action: Action) -> list[Floats]:
        first = {"F": 0, "B": 2, "I": 2, "W": 4}[action.kind]
        return self.arrays[first : first + 2]

    def _sends(self, direction: int) -> list[Floats]:
        return self.arrays[6:8] if direction == 1 else self.arrays[8:10]
