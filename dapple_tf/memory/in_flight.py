"""How many micro-batches a stage holds at each of its actions, by the schedule alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from graph_passes.schedules.schedule import Action, Schedule, dependencies


@dataclass(frozen=True)
class Moment:
    """A stage while it runs ``action``.

    ``begun`` and ``ended``: its actions by kind (the running one is begun). ``sent_forward``, ``sent_back``: the
    micro-batches that the stage before, and the one behind, have made before this one ends.
    """

    action: Action
    begun: Mapping[str, int]
    ended: Mapping[str, int]
    sent_forward: int
    sent_back: int

    def held(self, birth: str, until: str) -> int:
        """Micro-batches of which the stage holds what is there from ``birth`` until the end of ``until``."""
        made = {"sent forward": self.sent_forward, "sent back": self.sent_back}.get(birth)
        return (self.begun[birth] if made is None else made) - self.ended[until]

    def waiting(self, birth: str) -> int:
        """Micro-batches whose tensors of a neighbour (``birth``) are there before the stage begins to take them."""
        match birth:
            case "sent forward":
                return max(0, self.sent_forward - self.begun["F"])
            case "sent back":
                return max(0, self.sent_back - self.begun["B"])
        return 0


def freeing_kind(schedule: Schedule) -> str:
    """The kind of the action behind which nothing is left of a micro-batch: W where backward is split, else B."""
    return max((action.kind for action in schedule.stages[0]), key="FBW".index)


def most_held(schedule: Schedule, stage: int) -> int:
    """K of a stage: the most micro-batches whose forward has begun and whose stash is not free yet."""
    last, held, most = freeing_kind(schedule), 0, 0
    for action in schedule.stages[stage]:
        held += action.kind == "F"
        most = max(most, held)
        held -= action.kind == last
    return most


def moments(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """Each action of ``stage``, with what has happened by its end, where all stages are equally fast."""
    times = nominal_ends(schedule)
    begun: Counter[str] = Counter(F=0, B=0, W=0)
    found = []
    for action in schedule.stages[stage]:
        ended = Counter(begun)
        begun[action.kind] += 1
        sent = [
            sum(a.kind == kind and times[a] < times[action] for a in schedule.stages[other]) if exists else 0
            for kind, other, exists in (("F", stage - 1, stage > 0), ("B", stage + 1, stage + 1 < len(schedule.stages)))
        ]
        found.append(Moment(action, Counter(begun), ended, *sent))
    return tuple(found)


def nominal_ends(schedule: Schedule) -> dict[Action, int]:
    """When each action ends if backward takes twice as long as forward on every stage, and sending nothing.

    Where backward is split its halves take as long as forward.
    """
    seconds = {"F": 1, "B": 2} if freeing_kind(schedule) == "B" else {"F": 1, "B": 1, "W": 1}
    ends: dict[Action, int] = {}
    heads, free, moved = [0] * len(schedule.stages), [0] * len(schedule.stages), True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.stages):
            while heads[stage] < len(actions):
                action = actions[heads[stage]]
                needs = dependencies(action, len(schedule.stages))
                if not all(need in ends for need in needs):
                    break
                ends[action] = max([free[stage], *(ends[need] for need in needs)]) + seconds[action.kind]
                free[stage] = ends[action]
                heads[stage] += 1
                moved = True
    return ends
