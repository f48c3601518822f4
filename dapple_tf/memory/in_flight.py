"""Micro-batches that a stage holds at each of its actions, from the schedule or the window alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dapple_tf.graph_passes.schedules.schedule import (
    CALL_OF_KIND,
    FREEING,
    Action,
    Kind,
    Schedule,
    dependencies,
    of_kind,
    run_schedule,
)
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.memory.stash import Origin


@dataclass(frozen=True)
class StageState:
    """Progress of a stage at the end of ``action``, which may be of another stage on its worker.

    ``started`` and ``finished``: the stage's actions by kind (its own ``action`` has started, not finished).
    ``activations_received``, ``gradients_received``: micro-batches whose forward on the previous stage, and whose
    backward on the next stage, has ended. ``kept``: micro-batches whose gradients wait for the update.
    """

    action: Action
    started: Mapping[str, int]
    finished: Mapping[str, int]
    activations_received: int
    gradients_received: int
    kept: int = 0

    @property
    def in_flight(self) -> int:
        """Micro-batches whose forward has started and whose stash no action has freed before this one."""
        return self.started["F"] - sum(self.finished[kind] for kind in FREEING)

    def stashed(self, origin: Origin, last_use: str) -> int:
        """Return of how many micro-batches the stage holds a tensor that exists from ``origin`` to ``last_use``.

        ``last_use``: the kind of the last action that reads it. See ``StashedTensor``.
        """
        match origin:
            case "previous stage":
                produced = self.activations_received
            case "next stage":
                produced = self.gradients_received
            case _:
                produced = _count(self.started, origin)
        return produced - _count(self.finished, last_use)

    def queued(self, origin: Origin) -> int:
        """Return how many micro-batches a neighbour (``origin``) has sent that the stage has not started to use."""
        match origin:
            case "previous stage":
                return max(0, self.activations_received - self.started["F"])
            case "next stage":
                return max(0, self.gradients_received - _count(self.started, "I"))
        return 0


def _count(actions: Mapping[str, int], kind: str) -> int:
    """Return the number of actions of this kind; a B is an I and a W as well."""
    return actions[kind] + (actions["B"] if kind in "IW" else 0)


def stage_states(schedule: Schedule, stage: int) -> tuple[StageState, ...]:
    """Return the state of ``stage`` at each action of its worker, in order, where all stages are equally fast."""
    ends = nominal_ends(schedule)
    started: Counter[str] = Counter(dict.fromkeys(CALL_OF_KIND, 0))
    states = []
    for action in schedule.workers[schedule.worker_map.worker_of[stage]]:
        finished = Counter(started)
        started[action.kind] += action.stage == stage
        received = [
            sum(a.kind in kinds and ends[a] < ends[action] for a in schedule.stages[other]) if exists else 0
            for kinds, other, exists in (
                ("F", stage - 1, stage > 0),
                ("BI", stage + 1, stage + 1 < len(schedule.stages)),
            )
        ]
        kept = sum(finished[kind] for kind in FREEING)
        states.append(StageState(action, Counter(started), finished, received[0], received[1], kept))
    return tuple(states)


def window_states(window: Window, stage: int) -> tuple[StageState, ...]:
    """Return the state of replica 0 of ``stage`` at each of its actions, in order, where all stages are equally fast.

    Only its own micro-batches count.
    """
    ends = _window_ends(window)
    row = window.rows[stage, 0]
    own = {action.micro_batch for action in row}
    started: Counter[str] = Counter(dict.fromkeys(CALL_OF_KIND, 0))
    states, kept = [], 0
    for action in row:
        finished = Counter(started)
        started[action.kind] += 1
        now = ends[action]
        senders: tuple[tuple[int, Kind], ...] = ((stage - 1, "F"), (stage + 1, "B"))
        received = [sum(ends.get(Action(other, kind, m), now) < now for m in own) for other, kind in senders]
        states.append(StageState(action, Counter(started), finished, received[0], received[1], kept))
        if action.kind == "B":
            kept = 0 if window.ends_update(action) else kept + 1
    return tuple(states)


def _window_ends(window: Window) -> dict[Action, float]:
    """Return when each action of a window ends: as ``nominal_ends``, and updates take no time."""
    ends: dict[Action, float] = {}
    heads, free = dict.fromkeys(window.rows, 0), dict.fromkeys(window.rows, 0.0)
    while len(ends) < 2 * window.size * window.stages:
        for place, row in window.rows.items():
            while heads[place] < len(row):
                action, before = row[heads[place]], row[heads[place] - 1] if heads[place] else None
                needed = [a for a in dependencies(action, window.stages) if a.kind in "FB"]
                if action.kind == "F" and before is not None and window.ends_update(before):
                    group = window.updates[place[0]][window.update_of(place[0], before.micro_batch)]
                    needed += [Action(place[0], "B", m) for m in group]
                if any(a not in ends for a in needed):
                    break
                begin = max([free[place], *(ends[a] for a in needed)])
                free[place] = begin + of_kind(action.kind, 1.0, 2.0, 1.0)
                ends[action] = free[place]
                heads[place] += 1
    return ends


def nominal_ends(schedule: Schedule) -> dict[Action, float]:
    """Return when each action ends, in units of a forward, where communication takes no time.

    Every stage takes 1 for a forward and 2 for a backward: 1 for each of its halves.
    """
    ends = run_schedule(schedule, lambda action: of_kind(action.kind, 1.0, 2.0, 1.0))
    return {
        action: end
        for actions, worker_ends in zip(schedule.workers, ends, strict=True)
        for action, end in zip(actions, worker_ends, strict=True)
    }
