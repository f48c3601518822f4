"""What each event of a measured step waited for: the edges of the pipelined graph, as far as a timeline knows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from dapple_tf.timeline.timeline import Event, StageEvent, Timeline, Transfer
from graph_passes.schedules.schedule import Action, dependencies

Item: TypeAlias = Event | Transfer | StageEvent


class Awaited:
    """The ``items`` of a timeline, and for each those that it waited for."""

    def __init__(self, timeline: Timeline) -> None:
        self.items: tuple[Item, ...] = (*timeline.events, *timeline.transfers, *timeline.stage_events)
        self._timeline = timeline
        self._stages = 1 + max((event.action.stage for event in timeline.events), default=0)
        self._runs: dict[Action, list[Event]] = defaultdict(list)
        self._transfers = {(t.source, t.target, t.micro_batch): t for t in timeline.transfers}
        self._before: dict[Item, Item] = {}  # on the same device, or in the same channel
        last: dict[object, Item] = {}
        for item in sorted(self.items, key=lambda item: (item.start, item.end)):
            if isinstance(item, StageEvent):
                continue
            place = item.device if isinstance(item, Event) else (item.source, item.target)
            if place in last:
                self._before[item] = last[place]
            last[place] = item
            if isinstance(item, Event):
                self._runs[item.action].append(item)
        self._joint = _joint_starts(timeline.stage_events)

    def begin(self, item: Item) -> float:
        """When it began (seconds): an AllReduce when the last of its devices had come to it."""
        return self._joint.get(item, item.start) if isinstance(item, StageEvent) else item.start

    def by(self, item: Item) -> Iterator[Item]:
        """What had to end, or to get far enough, before ``item`` began; what ran in the same place first."""
        if isinstance(item, StageEvent):
            yield from self._before_stage_event(item)
            return
        if item in self._before:
            yield self._before[item]
        if isinstance(item, Transfer):
            yield from self._runs[Action(item.source, "F" if item.source < item.target else "B", item.micro_batch)]
            return
        for action in self._given(item.action):
            way = action.stage, item.action.stage, action.micro_batch
            if way in self._transfers:
                yield self._transfers[way]
            else:
                yield from self._runs[action]

    def _given(self, action: Action) -> Iterator[Action]:
        """The actions whose results ``action`` takes.

        The B of a stage whose inputs want no gradient, such as the first, is empty, and waits for nothing: its W takes
        the gradient that comes back.
        """
        yield from dependencies(action, self._stages)
        if action.kind == "W" and action.stage + 1 < self._stages:
            yield Action(action.stage + 1, "B", action.micro_batch)

    def _before_stage_event(self, item: StageEvent) -> Iterator[Item]:
        """AllReduce takes what its stage's backwards give; updates wait at a barrier for everything."""
        updates = [found for found in self._timeline.stage_events if found.kind == "update"]
        if item.kind == "update":
            yield from (found for found in self.items if found not in updates)
            # The optimizer's own, of no stage, come before those of all stages or after.
            yield from (found for found in updates if item.stage is None or found.stage is None)
            return
        sums = [found for found in self._timeline.stage_events if found.kind == item.kind]
        yield from (event for event in self._timeline.events if event.action.stage == item.stage)
        yield from (found for found in sums if found.stage == item.stage and found.end < item.end)


def _joint_starts(events: Sequence[StageEvent]) -> dict[StageEvent, float]:
    """For every AllReduce the latest start on any of its devices, which end them in the same order."""
    turns: dict[tuple[int | None, int], list[StageEvent]] = defaultdict(list)
    done: dict[tuple[int | None, str], int] = defaultdict(int)
    for event in sorted(events, key=lambda event: event.end):
        if event.kind == "allreduce":
            turns[event.stage, done[event.stage, event.device]].append(event)
            done[event.stage, event.device] += 1
    return {event: max(found.start for found in together) for together in turns.values() for event in together}
