"""Micro-batches that a stage holds at each of its actions, from the schedule alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dapple_tf.memory.stash import Origin
from graph_passes.schedules.schedule import CALL_OF_KIND, Action, Schedule, of_kind, run_schedule


@dataclass(frozen=True)
class StageState:
    """Progress of a stage at the end of ``action``, which may be of another stage on its worker.

    ``started`` and ``finished``: the stage's actions by kind (its own ``action`` has started, not finished).
    ``activations_received``, ``gradients_received``: micro-batches whose forward on the previous stage, and whose
    backward on the next stage, has ended.
    """

    action: Action
    started: Mapping[str, int]
    finished: Mapping[str, int]
    activations_received: int
    gradients_received: int

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
        states.append(StageState(action, Counter(started), finished, *received))
    return tuple(states)


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
