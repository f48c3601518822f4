"""A schedule as a grid of text: a row for each worker, a column for each unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.schedules.schedule import Action, Schedule, of_kind, run_schedule


@dataclass(frozen=True)
class Units:
    """Whole units of time of a forward, of a backward, and of the part of that which is gradients of weights (W)."""

    forward: int = 1
    backward: int = 2
    weights: int = 1

    def of(self, action: Action) -> int:
        """Return the units of ``action``."""
        return of_kind(action.kind, self.forward, self.backward, self.weights)


@dataclass(frozen=True)
class WorkerTime:
    """The work of one worker in a step without transfers, in units of time: ``idle`` between its first and last action.

    ``stashes``: the most that it holds at once, one for each stage and micro-batch in flight.
    """

    stages: tuple[int, ...]
    work: int
    idle: int
    stashes: int


def time_workers(schedule: Schedule, units: Units) -> tuple[WorkerTime, ...]:
    """Return the times of each worker."""
    ends = run_schedule(schedule, units.of)
    return tuple(
        WorkerTime(
            stages,
            work := sum(map(units.of, actions)),
            int(own[-1] - own[0]) + units.of(actions[0]) - work,
            stashes,
        )
        for stages, actions, own, stashes in zip(
            schedule.worker_map.stages_of, schedule.workers, ends, schedule.stashes, strict=True
        )
    )


def format_grid(schedule: Schedule, units: Units) -> str:
    """Return a line for each worker: its actions at their time, each as wide as it is long, and dots where it idles.

    Actions are printed as in the schedule's text: ``2F0+`` where its result travels with the next one's.
    """
    rows = zip(schedule.workers, run_schedule(schedule, units.of), strict=True)
    width = 1 + max(len(schedule.print_action(action)) for actions in schedule.workers for action in actions)
    names = [_name(stages) for stages in schedule.worker_map.stages_of]
    margin = max(map(len, names))
    lines = []
    for name, (actions, ends) in zip(names, rows, strict=True):
        cells, now = [], 0
        for action, end in zip(actions, ends, strict=True):
            start = int(end) - units.of(action)
            cells += [".".ljust(width)] * (start - now)
            cells.append(schedule.print_action(action).ljust(units.of(action) * width - 1, "-") + " ")
            now = int(end)
        lines.append(f"{name:{margin}}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def _name(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {','.join(map(str, stages))}"
