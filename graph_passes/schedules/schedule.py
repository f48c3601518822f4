"""Schedules as data: the order in which each stage runs its forwards (F), backwards (B) and weight gradients (W).

An action prints as ``2F0`` (stage 2, forward, micro-batch 0). In a schedule without W, B is the whole backward; with W
it is the part that gives the gradients of the stage's inputs, and W, any time later, that of the weights (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023). Letters as in the DAPPLE paper: S stages, M micro-batches, K_i warm-up
forwards of stage i, D the most micro-batches that the device's memory holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graph_passes.errors import ScheduleError

Kind = Literal["F", "B", "W"]
_GRID = 32  # actions of a stage that an error shows


@dataclass(frozen=True, order=True)
class Action:
    """One run of a stage's forward, backward, or weight gradients on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """For each stage its actions, in the order in which its devices run them."""

    stages: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.stages)

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are actions of their own (W)."""
        return any(action.kind == "W" for action in self.stages[0])

    @property
    def micro_batches(self) -> int:
        """M."""
        return len(self.stages[0]) // (3 if self.splits else 2)

    @property
    def warm_up(self) -> tuple[int, ...]:
        """K_i: the forwards of each stage before its first backward."""
        return tuple([a.kind for a in actions].index("B") for actions in self.stages)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches of which each stage holds a stash: F has begun, and the last to need it has not ended.

        That is W, and B where there is no W.
        """
        change = {"F": 1, "B": 0, "W": -1} if self.splits else {"F": 1, "B": -1}
        return tuple(max(itertools.accumulate(change[a.kind] for a in actions)) for actions in self.stages)

    def first_micro_batches(self, count: int) -> Schedule:
        """The same order without the micro-batches from ``count`` on; what never deadlocked does not now."""
        return Schedule(tuple(tuple(a for a in actions if a.micro_batch < count) for actions in self.stages))


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """The actions whose results ``action`` takes.

    Of F the forward before; of B its own forward, and the backward after; of W its own backward.
    """
    stage, kind, m = action.stage, action.kind, action.micro_batch
    if kind == "F":
        return (Action(stage - 1, "F", m),) if stage else ()
    if kind == "W":
        return (Action(stage, "B", m),)
    own = (Action(stage, "F", m),)
    return own if stage == stages - 1 else (*own, Action(stage + 1, "B", m))


def check(schedule: Schedule) -> None:
    """Every stage runs each micro-batch's F and B (and W, where there is any) once, and no order deadlocks.

    Raises ScheduleError; a deadlock prints the stage x step grid with the blocked actions marked ``!``.
    """
    counts = {len(actions) for actions in schedule.stages}
    if len(counts) != 1 or not schedule.stages or not schedule.stages[0]:
        raise ScheduleError("the stages of a schedule must have equally many actions, and some")
    split = any(action.kind == "W" for actions in schedule.stages for action in actions)
    kinds: tuple[Kind, ...] = ("F", "B", "W") if split else ("F", "B")
    micro_batches = counts.pop() // len(kinds)
    for stage, actions in enumerate(schedule.stages):
        wanted = {Action(stage, kind, m) for kind in kinds for m in range(micro_batches)}
        if set(actions) != wanted or len(actions) != len(wanted):
            missing = sorted(wanted ^ set(actions))
            raise ScheduleError(
                f"stage {stage} must run {'F, B and W' if split else 'F and B'} of each micro-batch once; missing or "
                f"odd: {' '.join(map(str, missing)) or 'repeated actions'}"
            )
    heads = _run(schedule, micro_batches)
    if min(heads) < len(kinds) * micro_batches:
        raise ScheduleError("the schedule deadlocks; blocked actions are marked:\n" + _grid(schedule, heads))


def _run(schedule: Schedule, micro_batches: int) -> list[int]:
    """The stages run as far as they can; how many actions each has run then."""
    last = len(schedule.stages) - 1
    ran = {kind: [[False] * micro_batches for _ in schedule.stages] for kind in ("F", "B", "W")}
    heads = [0] * len(schedule.stages)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.stages):
            while heads[stage] < len(actions):
                kind, m = actions[heads[stage]].kind, actions[heads[stage]].micro_batch
                if kind == "F":
                    ready = stage == 0 or ran["F"][stage - 1][m]
                elif kind == "B":
                    ready = ran["F"][stage][m] and (stage == last or ran["B"][stage + 1][m])
                else:
                    ready = ran["B"][stage][m]
                if not ready:
                    break
                ran[kind][stage][m] = True
                heads[stage] += 1
                moved = True
    return heads


def _grid(schedule: Schedule, heads: Sequence[int]) -> str:
    """A row a stage, the action it is stuck at marked; of long rows only what stands around that."""
    rows = []
    for stage, actions in enumerate(schedule.stages):
        cells = [f"{a}{'!' if i == heads[stage] else ''}" for i, a in enumerate(actions)]
        if len(cells) > _GRID:
            first = max(0, min(heads[stage] - _GRID // 2, len(cells) - _GRID))
            before, after = first, len(cells) - first - _GRID
            cells = cells[first : first + _GRID]
            cells = [f"({before} before)"] * (before > 0) + cells + [f"({after} more)"] * (after > 0)
        rows.append(f"stage {stage}: " + " ".join(f"{cell:5}" for cell in cells).rstrip())
    return "\n".join(rows)
