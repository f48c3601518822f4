"""Schedules as data: the order in which each stage runs its forwards (F) and backwards (B).

An action prints as ``2F0`` (stage 2, forward, micro-batch 0). Letters as in the DAPPLE paper: S stages, M
micro-batches, K_i warm-up forwards of stage i, D the most micro-batches that the device's memory holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graph_passes.errors import ScheduleError

_ACTION = re.compile(r"(\d+)([FB])(\d+)")
_POLICY = re.compile(r"([a-z0-9][a-z0-9-]*)(?::D=(\d+))?")
_EXPLICIT = re.compile(r"K=(\d+(?:,\d+)*)")


@dataclass(frozen=True, order=True)
class Action:
    """One run of a stage's forward or backward on one micro-batch."""

    stage: int
    kind: Literal["F", "B"]
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
    def warm_up(self) -> tuple[int, ...]:
        """K_i: the forwards of each stage before its first backward, which is what it stashes at most."""
        return tuple([a.kind for a in actions].index("B") for actions in self.stages)


def warm_up(policy: str, stages: int, micro_batches: int, limit: int | None = None) -> tuple[int, ...]:
    """K_i of every stage (DAPPLE, section V.C; BaPipe, Table 2, whose stages count from 1).

    ``gpipe``: K_i = M. ``dapple-a``, which is BaPipe's ``1f1b-sno``: K_i = min(S - i, D). ``dapple-b``:
    K_i = min(2 (S - i) - 1, D). BaPipe's ``1f1b-so`` holds one more: K_i = min(2 (S - i), D). All are at most M.
    Raises ScheduleError for an unknown policy or a D below 1.
    """
    if limit is not None and limit < 1:
        raise ScheduleError(f"D={limit}: a stage must hold at least one micro-batch")
    bound = micro_batches if limit is None else min(limit, micro_batches)
    match policy:
        case "gpipe":
            if bound < micro_batches:
                raise ScheduleError(f"gpipe holds all M={micro_batches} micro-batches, but D={limit}: use dapple-a")
            return (micro_batches,) * stages
        case "dapple-a" | "1f1b-sno":
            return tuple(min(stages - i, bound) for i in range(stages))
        case "dapple-b":
            return tuple(min(2 * (stages - i) - 1, bound) for i in range(stages))
        case "1f1b-so":
            return tuple(min(2 * (stages - i), bound) for i in range(stages))
    raise ScheduleError(
        f"no schedule is called {policy!r}; there are gpipe, dapple-a, dapple-b, 1f1b-sno, 1f1b-so (and :D=n), and "
        "K=3,2,1"
    )


def early_backward(warm: Sequence[int], micro_batches: int) -> Schedule:
    """K_i forwards, then strictly one backward and one forward in turn, then the remaining backwards.

    DAPPLE, section III.B; with K_i = M it is GPipe's schedule. Raises ScheduleError for a K_i out of range.
    """
    stages = []
    for stage, k in enumerate(warm):
        if not 1 <= k <= micro_batches:
            raise ScheduleError(f"K_{stage} = {k} is not between 1 and M = {micro_batches}")
        actions = [Action(stage, "F", m) for m in range(k)]
        for m in range(micro_batches):
            actions.append(Action(stage, "B", m))
            if k + m < micro_batches:
                actions.append(Action(stage, "F", k + m))
        stages.append(tuple(actions))
    schedule = Schedule(tuple(stages))
    check(schedule)
    return schedule


def named_warm_up(name: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """K_i of every stage in the schedule called ``name``.

    That is a policy (see ``warm_up``), with D where memory limits it: ``dapple-a:D=3``; or each K_i: ``K=3,2,1``.
    Raises ScheduleError for a name that is none, and for K_i that are not of as many stages, out of range, or deadlock.
    """
    if explicit := _EXPLICIT.fullmatch(name):
        warm = tuple(map(int, explicit[1].split(",")))
        if len(warm) != stages:
            raise ScheduleError(f"{name} gives K of {len(warm)} stages, but there are {stages}")
        return early_backward(warm, micro_batches).warm_up
    policy, limit = read_policy(name)
    return warm_up(policy, stages, micro_batches, limit)


def check_name(name: str) -> None:
    """Raise ScheduleError unless ``name`` is a schedule's, for some number of stages and micro-batches."""
    if not _EXPLICIT.fullmatch(name):
        policy, limit = read_policy(name)
        warm_up(policy, 1, limit or 1, limit)


def count_stages(name: str) -> int | None:
    """How many stages the schedule called ``name`` is for, as it gives each K_i; None where a policy does."""
    explicit = _EXPLICIT.fullmatch(name)
    return explicit[1].count(",") + 1 if explicit else None


def for_fewer(name: str, micro_batches: int) -> str:
    """The schedule's name for a batch of fewer micro-batches: no K_i that it gives exceeds them."""
    if explicit := _EXPLICIT.fullmatch(name):
        return "K=" + ",".join(str(min(int(k), micro_batches)) for k in explicit[1].split(","))
    return name


def read_policy(name: str) -> tuple[str, int | None]:
    """Policy and D of a name such as ``dapple-b:D=4``; ScheduleError for what cannot be one."""
    match = _POLICY.fullmatch(name)
    if not match:
        raise ScheduleError(f"{name!r} is not a schedule such as 'dapple-a', 'dapple-b:D=4' or 'K=3,2,1'")
    return match[1], None if match[2] is None else int(match[2])


def make_schedule(name: str, stages: int, micro_batches: int) -> Schedule:
    """The schedule called ``name``, as ``named_warm_up`` reads it.

    Raises ScheduleError for a name that is none.
    """
    return early_backward(named_warm_up(name, stages, micro_batches), micro_batches)


def parse_schedule(text: str) -> Schedule:
    """The schedule that ``str(schedule)`` printed: one line a stage.

    Raises ScheduleError naming the word or stage that is wrong, or the deadlock.
    """
    stages = []
    for index, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        actions = []
        for word in line.split():
            match = _ACTION.fullmatch(word)
            if not match:
                raise ScheduleError(f"{word!r} is not an action such as 2F0")
            if int(match[1]) != index:
                raise ScheduleError(f"{word} stands in the line of stage {index}")
            kind: Literal["F", "B"] = "F" if match[2] == "F" else "B"
            actions.append(Action(index, kind, int(match[3])))
        stages.append(tuple(actions))
    schedule = Schedule(tuple(stages))
    check(schedule)
    return schedule


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """The actions whose results ``action`` takes: the forward before, the backward after, its own forward."""
    stage, kind, m = action.stage, action.kind, action.micro_batch
    if kind == "F":
        return (Action(stage - 1, "F", m),) if stage else ()
    own = (Action(stage, "F", m),)
    return own if stage == stages - 1 else (*own, Action(stage + 1, "B", m))


def check(schedule: Schedule) -> None:
    """Every stage runs each micro-batch's F and B once, and no order of the stages deadlocks.

    Raises ScheduleError; a deadlock prints the stage x step grid with the blocked actions marked ``!``.
    """
    counts = {len(actions) for actions in schedule.stages}
    if len(counts) != 1 or not schedule.stages or not schedule.stages[0]:
        raise ScheduleError("the stages of a schedule must have equally many actions, and some")
    micro_batches = counts.pop() // 2
    for stage, actions in enumerate(schedule.stages):
        wanted = {Action(stage, kind, m) for kind in ("F", "B") for m in range(micro_batches)}
        if set(actions) != wanted or len(actions) != len(wanted):
            missing = sorted(wanted ^ set(actions))
            raise ScheduleError(
                f"stage {stage} must run F and B of each micro-batch once; missing or odd: "
                f"{' '.join(map(str, missing)) or 'repeated actions'}"
            )
    heads = _run(schedule, micro_batches)
    if min(heads) < 2 * micro_batches:
        raise ScheduleError("the schedule deadlocks; blocked actions are marked:\n" + _grid(schedule, heads))


def _run(schedule: Schedule, micro_batches: int) -> list[int]:
    """The stages run as far as they can; how many actions each has run then."""
    last = len(schedule.stages) - 1
    ran = {kind: [[False] * micro_batches for _ in schedule.stages] for kind in ("F", "B")}
    heads = [0] * len(schedule.stages)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.stages):
            while heads[stage] < len(actions):
                kind, m = actions[heads[stage]].kind, actions[heads[stage]].micro_batch
                if kind == "F":
                    ready = stage == 0 or ran["F"][stage - 1][m]
                else:
                    ready = ran["F"][stage][m] and (stage == last or ran["B"][stage + 1][m])
                if not ready:
                    break
                ran[kind][stage][m] = True
                heads[stage] += 1
                moved = True
    return heads


def _grid(schedule: Schedule, heads: Sequence[int]) -> str:
    """A row a stage, the action it is stuck at marked."""
    rows = []
    for stage, actions in enumerate(schedule.stages):
        cells = [f"{a}{'!' if i == heads[stage] else ''}" for i, a in enumerate(actions)]
        rows.append(f"stage {stage}: " + " ".join(f"{cell:5}" for cell in cells).rstrip())
    return "\n".join(rows)
