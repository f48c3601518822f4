"""Asynchronous windows: the order in which each replica runs the minibatches of a window, without a flush between them.

A *window* is W minibatches; each updates the weights (PipeDream, section 3.2). In the start-up a replica of stage s
runs K_s forwards; then it alternates one backward and one forward (1F1B). A stage of r_s replicas runs minibatch m on
replica m mod r_s, forward and backward (1F1B-RR), and updates its weights once for each *group* of r_s consecutive
minibatches. That update follows the backwards of the whole group, and a replica's next forward waits for it.

Where a minibatch is cut into k micro-batches (PipeDream-2BW, Narayanan et al. 2021), a group is the micro-batches of
one minibatch, and the replicas of a stage share each micro-batch as in synchronous training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, alternate, dependencies
from dapple_tf.wording import format_count


@dataclass(frozen=True)
class Window:
    """The order of a window of ``minibatches`` minibatches, of ``micro_batches`` micro-batches each.

    ``replicas``: the number of replicas of each stage. ``warm_up``: K_s, the number of forwards that a replica of stage
    s runs before its first backward, if the window has so many. ``in_turn``: replicas take whole minibatches in turn;
    else they share each micro-batch. Micro-batch i of minibatch t has the number t k + i in actions. Raises
    ScheduleError where the minibatches cannot be dealt to the replicas, and where the order deadlocks.
    """

    minibatches: int
    replicas: tuple[int, ...]
    warm_up: tuple[int, ...]
    micro_batches: int = 1
    in_turn: bool = True

    def __post_init__(self) -> None:
        if self.minibatches < 1 or self.micro_batches < 1:
            raise ScheduleError(
                f"a window of {format_count(self.minibatches, 'minibatch')} of "
                f"{format_count(self.micro_batches, 'micro-batch')}: there must be at least one"
            )
        if self.in_turn and self.micro_batches > 1:
            raise ScheduleError(f"replicas take whole minibatches in turn, not {self.micro_batches} micro-batches each")
        if len(self.warm_up) != len(self.replicas) or min(self.warm_up) < 1:
            raise ScheduleError(f"K = {list(self.warm_up)}: give a number from 1 on for each of {self.stages} stages")
        for stage, turns in enumerate(self.turns):
            if self.minibatches % turns:
                raise ScheduleError(
                    f"minibatches={self.minibatches} is no multiple of the {turns} replicas of stage {stage}, which "
                    "take minibatches in turn: use a multiple"
                )
        ends = run_window(self, lambda action: 0.0)
        heads = (next((action for action in row if action not in ends), None) for row in self.rows.values())
        if blocked := [str(action) for action in heads if action is not None]:
            raise ScheduleError(
                f"a window of {format_count(self.minibatches, 'minibatch')} with K = {list(self.warm_up)} on "
                f"{list(self.replicas)} "
                f"replicas deadlocks at {' '.join(blocked[:8])}: use a larger depth, or other replicas"
            )

    @property
    def stages(self) -> int:
        """S."""
        return len(self.replicas)

    @property
    def size(self) -> int:
        """The number of micro-batches of the window."""
        return self.minibatches * self.micro_batches

    @cached_property
    def sharing(self) -> tuple[int, ...]:
        """How many replicas of each stage share a micro-batch."""
        return sharing_replicas(self.replicas, in_turn=self.in_turn)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """How many replicas of each stage take minibatches in turn; 1 where they share each micro-batch."""
        return self.replicas if self.in_turn else (1,) * self.stages

    def replicas_of(self, stage: int, m: int) -> tuple[int, ...]:
        """Return the replicas of ``stage`` that run micro-batch ``m``."""
        sharing = self.sharing[stage]
        first = m % self.turns[stage] * sharing
        return tuple(range(first, first + sharing))

    def update_of(self, stage: int, m: int) -> int:
        """Return the number, from 0, of the update of ``stage`` that takes the gradients of micro-batch ``m``."""
        return m // (self.turns[stage] * self.micro_batches)

    @cached_property
    def updates(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The micro-batches of each update, stage by stage."""
        sizes = (turns * self.micro_batches for turns in self.turns)
        return tuple(
            tuple(tuple(range(first, first + count)) for first in range(0, self.size, count)) for count in sizes
        )

    def last_of_update(self, stage: int, update: int) -> tuple[int, ...]:
        """Return the micro-batches of an update of ``stage`` that its replicas run last."""
        return self.updates[stage][update][-self.turns[stage] :]

    def last_minibatch(self, stage: int, update: int) -> int:
        """Return the last minibatch whose gradients an update of ``stage`` takes.

        The optimizer counts the update as this minibatch's step.
        """
        return self.updates[stage][update][-1] // self.micro_batches

    def ends_update(self, action: Action) -> bool:
        """Return whether ``action`` is the last backward that a replica runs for an update of its stage."""
        update = self.update_of(action.stage, action.micro_batch)
        return action.kind == "B" and action.micro_batch in self.last_of_update(action.stage, update)

    @cached_property
    def rows(self) -> Mapping[tuple[int, int], tuple[Action, ...]]:
        """The actions of each stage and replica, in the order in which its device runs them."""
        return {
            (stage, replica): self._row(stage, replica)
            for stage, count in enumerate(self.replicas)
            for replica in range(count)
        }

    def _row(self, stage: int, replica: int) -> tuple[Action, ...]:
        own = [m for m in range(self.size) if replica in self.replicas_of(stage, m)]
        forwards, backwards = [Action(stage, "F", m) for m in own], [Action(stage, "B", m) for m in own]
        return alternate(forwards, backwards, self.warm_up[stage])


def sharing_replicas(replicas: Sequence[int], *, in_turn: bool) -> tuple[int, ...]:
    """Return how many of the ``replicas`` of each stage share a micro-batch: all, or one where they take turns."""
    return (1,) * len(replicas) if in_turn else tuple(replicas)


def round_robin_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return K_s of each replica of stage s: the sum of r_t over all t >= s, divided by r_s and rounded up.

    PipeDream, section 3.2; at stage 0 this is NOAM.
    """
    return tuple(math.ceil(sum(replicas[stage:]) / count) for stage, count in enumerate(replicas))


def depth_warm_up(stages: int, depth: int) -> tuple[int, ...]:
    """Return K_s = max(1, min(depth - s, 2 (S - s) - 1)), for a pipeline of this depth (PipeDream, Fig. 18)."""
    return tuple(max(1, min(depth - stage, 2 * (stages - stage) - 1)) for stage in range(stages))


def run_window(window: Window, seconds: Callable[[Action], float]) -> dict[Action, float]:
    """Return when each action of a window ends, where it takes ``seconds``, and transfers and updates take no time.

    Each action waits for the results that it takes. A forward that follows a backward on its replica also waits for
    that backward's update, and so for the backwards of the whole group, on all replicas of the stage. Actions that are
    not returned never run: the order deadlocks.
    """
    ends: dict[Action, float] = {}
    heads, free = dict.fromkeys(window.rows, 0), dict.fromkeys(window.rows, 0.0)
    moved = True
    while moved:
        moved = False
        for place, actions in window.rows.items():
            while heads[place] < len(actions):
                needed = _needed_actions(window, actions, heads[place])
                start = max([free[place], *(ends.get(action, math.inf) for action in needed)])
                if start == math.inf:
                    break
                action = actions[heads[place]]
                free[place] = ends[action] = start + seconds(action)
                heads[place] += 1
                moved = True
    return ends


def _needed_actions(window: Window, actions: Sequence[Action], index: int) -> list[Action]:
    """Return the actions that must end before a replica's action at ``index`` starts."""
    action, before = actions[index], actions[index - 1] if index else None
    needed = [a for a in dependencies(action, window.stages) if a.kind in "FB"]
    if action.kind == "F" and before is not None and window.ends_update(before):
        last = window.last_of_update(action.stage, window.update_of(action.stage, before.micro_batch))
        needed += [Action(action.stage, "B", m) for m in last]
    return needed
