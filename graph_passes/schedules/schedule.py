"""Schedules as data: the order in which each worker runs forwards (F) and backwards (B, or I and W).

A worker is the group of devices that run the same stages: one device, or r replicas. It has one stage or several
(chunks of the model). An action prints as ``2F0`` (stage 2, forward, micro-batch 0). The backward of a stage and
micro-batch is either one action, B, or two: I computes the gradients of the stage's inputs, and W, at any later time,
the gradients of its weights (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). ``2F0+ 2F1`` are two actions whose
results travel to the next stage together, once both results exist (AutoPipe, section III.C). The letters are the DAPPLE
paper's: S stages, M micro-batches, K_i warm-up forwards of stage i, D the most micro-batches that the device's memory
holds.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeVar

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap

_Number = TypeVar("_Number", int, float)

Kind = Literal["F", "B", "I", "W"]
Call = Literal["forward", "backward", "inputs", "weights"]

CALL_OF_KIND: Mapping[Kind, Call] = MappingProxyType({"F": "forward", "B": "backward", "I": "inputs", "W": "weights"})
"""The op of the pipelined graph, and the stage function, that each kind of action runs."""

KIND_OF_CALL: Mapping[str, Kind] = MappingProxyType({call: kind for kind, call in CALL_OF_KIND.items()})
"""The reverse of ``CALL_OF_KIND``."""

FREEING: tuple[Kind, ...] = ("B", "W")
"""The kinds of action after which their stage no longer needs the micro-batch's stash."""

# The result of an action of each kind: activations, gradients of inputs, or gradients of weights.
_Result = Literal["activations", "gradients", "weights"]
_RESULT: Mapping[Kind, _Result] = MappingProxyType(
    {"F": "activations", "B": "gradients", "I": "gradients", "W": "weights"}
)
# The results that each kind of action takes, for the same micro-batch: the kind of result, and the offset from the
# action's own stage to the stage that computes it.
_OF_BACKWARD: tuple[tuple[_Result, int], ...] = (("activations", 0), ("gradients", 1))
_NEEDS: Mapping[Kind, tuple[tuple[_Result, int], ...]] = MappingProxyType(
    {"F": (("activations", -1),), "B": _OF_BACKWARD, "I": _OF_BACKWARD, "W": (("gradients", 0),)}
)
_HALVES: tuple[Kind, Kind] = ("I", "W")
_NAMED_ACTIONS = 20  # in the message of a stage with wrong actions
_GRID_ACTIONS = 32  # of a stage, in the message of a deadlock


@dataclass(frozen=True, order=True)
class Action:
    """One run of a stage's forward, or of its backward or a half of it, on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of each worker, in the order in which its devices run them.

    ``together``: actions whose result travels to another worker with the result of the next action. That is an action
    of the same stage and kind on the next micro-batch.
    """

    workers: tuple[tuple[Action, ...], ...]
    together: frozenset[Action] = frozenset()

    def __str__(self) -> str:
        return "\n".join(" ".join(map(self.print_action, actions)) for actions in self.workers)

    def print_action(self, action: Action) -> str:
        """Return the action as it stands in the schedule's text: ``2F0``, or ``2F0+`` if it is in ``together``."""
        return f"{action}{'+' * (action in self.together)}"

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The stage and micro-batch of each backward that is two actions, I and W."""
        actions = itertools.chain.from_iterable(self.workers)
        return frozenset((action.stage, action.micro_batch) for action in actions if action.kind == "W")

    @cached_property
    def worker_map(self) -> WorkerMap:
        """The stages of each worker."""
        return WorkerMap(tuple(tuple(sorted({action.stage for action in actions})) for actions in self.workers))

    @cached_property
    def stages(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each stage, in the order in which its worker runs them."""
        found: list[list[Action]] = [[] for _ in range(self.worker_map.stages)]
        for action in itertools.chain.from_iterable(self.workers):
            found[action.stage].append(action)
        return tuple(map(tuple, found))

    @property
    def micro_batches(self) -> int:
        """M, the number of micro-batches."""
        return sum(action.kind == "F" for action in self.stages[0])

    @property
    def warm_up(self) -> tuple[int, ...]:
        """K_i: the forwards of each stage before its first backward."""
        return tuple(
            sum(1 for _ in itertools.takewhile(lambda action: action.kind == "F", actions)) for actions in self.stages
        )

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches in flight on each stage; see ``most_in_flight``."""
        return tuple(most_in_flight(a.kind for a in actions) for actions in self.stages)

    @property
    def stashes(self) -> tuple[int, ...]:
        """The most stashes that each worker holds at once, one for each stage and micro-batch in flight."""
        return tuple(most_in_flight(a.kind for a in actions) for actions in self.workers)

    def followed_by(self, other: Schedule) -> Schedule:
        """Return a schedule in which each worker runs its own actions, then those of the ``other`` schedule.

        The micro-batches of the other schedule get the numbers that follow those of this one. Both are for the same
        stages on the same workers; this one may be empty.
        """
        count = max((action.micro_batch + 1 for actions in self.workers for action in actions), default=0)

        def later(action: Action) -> Action:
            return Action(action.stage, action.kind, action.micro_batch + count)

        rows = zip(self.workers, other.workers, strict=True)
        workers = tuple((*own, *map(later, following)) for own, following in rows)
        return Schedule(workers, self.together | frozenset(map(later, other.together)))

    def first_micro_batches(self, count: int) -> Schedule:
        """Return this schedule without the micro-batches from ``count`` on; it deadlocks only if this one does."""
        workers = tuple(tuple(a for a in actions if a.micro_batch < count) for actions in self.workers)
        return Schedule(workers, frozenset(a for a in self.together if a.micro_batch + 1 < count))


def most_in_flight(kinds: Iterable[Kind]) -> int:
    """Return the largest number of micro-batches that are in flight at once.

    A micro-batch is in flight from the start of its F to the end of its B or W, which frees the stash. ``kinds``: the
    kinds of a stage's actions, in the order in which each F starts and each B or W ends.
    """
    changes = ((kind == "F") - (kind in FREEING) for kind in kinds)
    return max(itertools.accumulate(changes), default=0)


def of_kind(kind: Kind, forward: _Number, backward: _Number, weights: _Number) -> _Number:
    """Return the amount (of seconds, or another unit) for an action of this kind.

    ``forward``: the amount for F. ``backward``: the amount for B. ``weights``: the part of ``backward`` that is the
    amount for W; the rest is the amount for I.
    """
    return {"F": forward, "B": backward, "I": backward - weights, "W": weights}[kind]


def of_stage(stage: int, kind: Kind, micro_batches: int) -> list[Action]:
    """Return a stage's actions of one kind, in micro-batch order."""
    return [Action(stage, kind, m) for m in range(micro_batches)]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int, weights: Sequence[Action] = (), delay: int = 0
) -> tuple[Action, ...]:
    """Return ``ahead`` forwards, then one backward and one forward alternately, then the other backwards.

    ``weights``: the W of each of the ``backwards``, where these are I. A W runs after the I that is ``delay`` later, or
    after all of them.
    """
    actions = list(forwards[:ahead])
    for i, backward in enumerate(backwards):
        actions.append(backward)
        if i >= delay:
            actions += weights[i - delay : i - delay + 1]
        actions += forwards[ahead + i : ahead + i + 1]
    return (*actions, *weights[max(0, len(weights) - delay) :])


def name_input_halves(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return the actions with I in place of each B that has a W of the same stage and micro-batch.

    Texts and traces of earlier versions write B for the half of backward that gives gradients of inputs.
    """
    actions = tuple(actions)
    split = {(a.stage, a.micro_batch) for a in actions if a.kind == "W"}
    return tuple(
        Action(a.stage, "I", a.micro_batch) if a.kind == "B" and (a.stage, a.micro_batch) in split else a
        for a in actions
    )


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """Return the actions whose results ``action`` may take, in a pipeline of ``stages`` stages.

    F takes the activations of the previous stage. B and I take the activations of their own stage, and the gradients
    that the next stage computes, either by B or by I: both are returned. W takes the result of its own stage's I.
    """
    found = [
        Action(action.stage + offset, kind, action.micro_batch)
        for needed, offset in _NEEDS[action.kind]
        for kind, result in _RESULT.items()
        if result == needed and 0 <= action.stage + offset < stages
    ]
    return tuple(a for a in found if (a.kind, a.stage) != ("B", action.stage))  # a stage with a B has no W


def run_schedule(
    schedule: Schedule, seconds: Callable[[Action], float], send_seconds: Callable[[Action], float] = lambda action: 0.0
) -> tuple[tuple[float, ...], ...]:
    """Return when each action ends, in seconds from the start: ``[worker][i]`` for the worker's i-th action.

    Each worker runs its actions strictly in order, each for ``seconds(action)``, as soon as the results that it takes
    have arrived (see ``dependencies``). The result of an action travels to a stage on another worker for
    ``send_seconds(action)``; a channel (one boundary, one direction) moves one result at a time, first in first out. A
    stage on the same worker has the result when the action ends. Results that travel together leave when the last of
    their actions ends, and arrive together. A worker for which fewer ends than actions are returned is blocked at its
    next action: the schedule deadlocks.
    """
    stages, kinds, results = range(schedule.worker_map.stages), tuple(CALL_OF_KIND), set(_RESULT.values())
    worker_of = schedule.worker_map.worker_of
    ended: dict[_Result, list[dict[int, float]]] = {result: [{} for _ in stages] for result in results}
    arrived: dict[_Result, list[dict[int, float]]] = {result: [{} for _ in stages] for result in results}
    channel_free = {result: [0.0 for _ in stages] for result in results}
    inputs: list[dict[Kind, list[dict[int, float]]]] = [
        {
            kind: [(arrived if d else ended)[need][stage + d] for need, d in _NEEDS[kind] if stage + d in stages]
            for kind in kinds
        }
        for stage in stages
    ]
    # Whether a result leaves the worker: activations go to the next stage, gradients of inputs to the one before.
    sent: dict[_Result, list[bool]] = {
        "activations": [worker_of[s] != worker_of[s + 1] for s in stages[:-1]] + [False],
        "gradients": [False] + [worker_of[s] != worker_of[s - 1] for s in stages[1:]],
        "weights": [False for _ in stages],
    }
    ends: list[list[float]] = [[] for _ in schedule.workers]
    free = [0.0 for _ in schedule.workers]
    unsent: list[list[Action]] = [[] for _ in schedule.workers]  # actions that have run, whose results have not left
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(schedule.workers):
            while len(ends[worker]) < len(actions):
                action = actions[len(ends[worker])]
                stage, result, m = action.stage, _RESULT[action.kind], action.micro_batch
                start = max([free[worker], *[known.get(m, math.inf) for known in inputs[stage][action.kind]]])
                if start == math.inf:
                    break
                free[worker] = end = start + seconds(action)
                ended[result][stage][m] = end
                ends[worker].append(end)
                unsent[worker].append(action)
                moved = True
                if action in schedule.together:
                    continue
                arrival = end
                if sent[result][stage]:
                    begin = max(end, channel_free[result][stage])
                    arrival = channel_free[result][stage] = begin + sum(map(send_seconds, unsent[worker]))
                for sender in unsent[worker]:
                    arrived[result][stage][sender.micro_batch] = arrival
                unsent[worker].clear()
    return tuple(map(tuple, ends))


def checked_schedule(workers: Iterable[tuple[Action, ...]], together: Iterable[Action] = ()) -> Schedule:
    """Return the schedule with these actions of each worker; raises ScheduleError as ``check`` does."""
    schedule = Schedule(tuple(workers), frozenset(together))
    check(schedule)
    return schedule


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless the schedule is complete, and runs to its end.

    Complete: each stage is on one worker, which runs F, and B or both I and W, of each micro-batch. Results that travel
    together must go to another worker, and belong to consecutive actions. If the schedule deadlocks, the message has a
    row of actions for each worker, in which the blocked action is marked ``!``.
    """
    if not schedule.workers or not all(schedule.workers):
        raise ScheduleError("each worker of a schedule must have at least one action")
    stages_of = schedule.worker_map.stages_of  # raises where a stage is on two workers, or on none
    micro_batches = len({action.micro_batch for action in schedule.stages[0] if action.kind == "F"})
    halves = any(action.kind in "IW" for actions in schedule.workers for action in actions)
    for worker, (stages, actions) in enumerate(zip(stages_of, schedule.workers, strict=True)):
        who = f"stage {stages[0]}" if len(stages) == 1 else f"worker {worker} (stages {list(stages)})"
        present = set(actions)
        expected = {Action(stage, "F", m) for stage in stages for m in range(micro_batches)}
        for forward in tuple(expected):
            inputs, weights = (Action(forward.stage, kind, forward.micro_batch) for kind in _HALVES)
            whole = Action(forward.stage, "B", forward.micro_batch)
            expected |= {inputs, weights} if not present.isdisjoint({inputs, weights}) else {whole}
        if present != expected or len(actions) != len(expected):
            different = heapq.nsmallest(_NAMED_ACTIONS, expected ^ present)
            raise ScheduleError(
                f"{who} must run F{', and B or both I and W,' if halves else ' and B'} of each micro-batch once; "
                f"missing or unexpected: {' '.join(map(str, different)) or 'repeated actions'}"
            )
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            if action in schedule.together:
                _check_together(action, following, who, schedule.worker_map)
    heads = [len(ends) for ends in run_schedule(schedule, lambda action: 0.0)]
    if any(head < len(actions) for head, actions in zip(heads, schedule.workers, strict=True)):
        raise ScheduleError("the schedule deadlocks; blocked actions are marked:\n" + _grid(schedule, heads))


def groups_together(schedule: Schedule) -> Iterator[tuple[Action, ...]]:
    """Yield the actions of each stage whose results travel together, in their order."""
    for actions in schedule.workers:
        group: list[Action] = []
        for action in actions:
            group.append(action)
            if action not in schedule.together:
                if len(group) > 1:
                    yield tuple(group)
                group = []


def _check_together(action: Action, following: Action | None, who: str, worker_map: WorkerMap) -> None:
    """Raise ScheduleError unless the results of ``action`` and of the ``following`` one leave their worker together."""
    stage, result = action.stage, _RESULT[action.kind]
    taker = stage + {"activations": 1, "gradients": -1, "weights": 0}[result]
    if result == "weights":
        reason = f"gradients of weights stay on stage {stage}"
    elif not 0 <= taker < worker_map.stages:
        reason = f"no stage takes the {result} of stage {stage}"
    elif worker_map.worker_of[taker] == worker_map.worker_of[stage]:
        reason = f"stage {taker}, which takes its result, is on the same worker"
    else:
        partner = dataclasses.replace(action, micro_batch=action.micro_batch + 1)
        if following != partner:
            raise ScheduleError(
                f"the result of {action}+ travels with the result of {partner}, so {who} must run {partner} next, not "
                f"{following or 'end there'}"
            )
        return
    raise ScheduleError(f"{action}+ has no meaning: {reason}, so no result travels: write {action}")


def _grid(schedule: Schedule, heads: Sequence[int]) -> str:
    """Return a row of actions for each worker, with the blocked one marked; of a long row only the actions near it."""
    rows, what = [], "stage" if schedule.worker_map.has_one_stage_per_worker else "worker"
    for worker, actions in enumerate(schedule.workers):
        cells = [f"{schedule.print_action(a)}{'!' if i == heads[worker] else ''}" for i, a in enumerate(actions)]
        if len(cells) > _GRID_ACTIONS:
            first = max(0, min(heads[worker] - _GRID_ACTIONS // 2, len(cells) - _GRID_ACTIONS))
            before, after = first, len(cells) - first - _GRID_ACTIONS
            cells = cells[first : first + _GRID_ACTIONS]
            cells = [f"({before} before)"] * (before > 0) + cells + [f"({after} more)"] * (after > 0)
        rows.append(f"{what} {worker}: " + " ".join(f"{cell:5}" for cell in cells).rstrip())
    return "\n".join(rows)
