"""Micro-batches that a stage holds at each of its actions, from the schedule or the window alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.graph_passes.schedules.schedule import CALL_OF_KIND, FREEING, Action, Schedule, of_kind, run_schedule
from dapple_tf.graph_passes.schedules.window import Window, run_window
from dapple_tf.memory.stash import Origin


@dataclass(frozen=True)
class StageState:
    """Progress of a stage at the end of ``action``, which may be of another stage on its worker.

    ``started`` and ``finished``: the stage's actions by kind (its own ``action`` has started, not finished).
    ``activations_received``, ``gradients_received``: micro-batches whose forward on the previous stage, and whose
    backward on the next stage, has ended. ``kept``: micro-batches whose gradients wait for the update. ``ending``: the
    stage has started its last action that gives gradients of variables.
    """

    action: Action
    started: Mapping[str, int]
    finished: Mapping[str, int]
    activations_received: int
    gradients_received: int
    kept: int = 0
    ending: bool = False

    @property
    def in_flight(self) -> int:
        """Micro-batches whose forward has started and whose stash no action has freed before this one."""
        return self.started["F"] - sum(self.finished[kind] for kind in FREEING)

    def stashed(self, origin: Origin, last_use: str) -> int:
        """Return for how many micro-batches the stage holds a tensor that exists from ``origin`` to ``last_use``.

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
    row = schedule.workers[schedule.worker_map.worker_of[stage]]
    return tuple(_states(row, stage, nominal_ends(schedule), lambda action: False))


def window_states(window: Window, stage: int) -> tuple[StageState, ...]:
    """Return the state of replica 0 of ``stage`` at each of its actions, in order, where all stages are equally fast.

    Only its own micro-batches count.
    """
    row = window.rows[stage, 0]
    own = {action.micro_batch for action in row}
    ends = {a: end for a, end in run_window(window, _nominal_seconds).items() if a.micro_batch in own}
    return tuple(_states(row, stage, ends, window.ends_update))


def _states(
    row: Sequence[Action], stage: int, ends: Mapping[Action, float], ends_update: Callable[[Action], bool]
) -> Iterator[StageState]:
    """Yield the state of ``stage`` at each action of ``row``; ``ends``: when each action of all stages ends.

    ``ends_update``: whether the update that takes the gradients of an action follows it.
    """
    activations, gradients = (
        sorted(end for action, end in ends.items() if action.stage == other and action.kind in kinds)
        for other, kinds in ((stage - 1, "F"), (stage + 1, "BI"))
    )
    started, kept = Counter[str](dict.fromkeys(CALL_OF_KIND, 0)), 0
    left = sum(action.stage == stage and action.kind in FREEING for action in row)
    for action in row:
        finished, now = Counter(started), ends[action]
        started[action.kind] += action.stage == stage
        left -= action.stage == stage and action.kind in FREEING
        received = bisect_left(activations, now), bisect_left(gradients, now)
        yield StageState(action, Counter(started), finished, *received, kept, ending=not left)
        if action.stage == stage and action.kind in FREEING:
            kept = 0 if ends_update(action) else kept + 1


def nominal_ends(schedule: Schedule) -> dict[Action, float]:
    """Return when each action ends, in units of a forward, where communication takes no time."""
    ends = run_schedule(schedule, _nominal_seconds)
    return {
        action: end
        for actions, worker_ends in zip(schedule.workers, ends, strict=True)
        for action, end in zip(actions, worker_ends, strict=True)
    }


def _nominal_seconds(action: Action) -> float:
    """Return 1 for a forward and 2 for a backward: 1 for each of its halves."""
    return of_kind(action.kind, 1.0, 2.0, 1.0)
