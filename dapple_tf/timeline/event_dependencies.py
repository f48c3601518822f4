"""Dependencies between the events of a timeline: the edges of the pipelined graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from dapple_tf.timeline.events import Event, Item, StageEvent, StepEvents, Transfer
from graph_passes.schedules.schedule import Action, dependencies


class EventDependencies:
    """For each event of ``step`` the events that it waited for."""

    def __init__(self, step: StepEvents) -> None:
        self._step = step
        self._runs: dict[Action, list[Event]] = defaultdict(list)  # one run on each replica
        self._transfers = {(t.source, t.target, m): t for t in step.transfers for m in t.micro_batches}
        self._previous: dict[int, Item] = {}  # by the id of an event, the one before on its device or channel
        last: dict[object, Item] = {}
        in_place: list[Event | Transfer] = [*step.events, *step.transfers]
        for item in sorted(in_place, key=lambda item: (item.start, item.end)):
            place = item.device if isinstance(item, Event) else (item.source, item.target)
            if place in last:
                self._previous[id(item)] = last[place]
            last[place] = item
            if isinstance(item, Event):
                self._runs[item.action].append(item)

    def inputs(self, item: Item) -> Iterator[Item]:
        """Yield the events that had to end before ``item`` started.

        For an event and a transfer the first is preferred where several ended last: of an event, the one before on the
        same device; of a transfer, its producer.
        """
        if isinstance(item, StageEvent):
            yield from self._inputs_of_stage_event(item)
        elif isinstance(item, Transfer):
            yield from (run for action in item.producers for run in self._runs[action])
            yield from self._before(item)
        else:
            yield from self._before(item)
            for needed in self._needed_actions(item.action):
                transfer = self._transfers.get((needed.stage, item.action.stage, needed.micro_batch))
                if transfer is not None:
                    yield transfer
                else:
                    yield from self._runs[needed if needed.stage == item.action.stage else self._sent_with(needed)]

    def _before(self, item: Item) -> Iterator[Item]:
        if id(item) in self._previous:
            yield self._previous[id(item)]

    def _sent_with(self, action: Action) -> Action:
        """Return the action with whose result that of ``action`` goes to another stage: itself, or a later one."""
        while action in self._step.together:
            action = replace(action, micro_batch=action.micro_batch + 1)
        return action

    def _needed_actions(self, action: Action) -> Iterator[Action]:
        """Yield the actions whose results ``action`` takes.

        The I of a stage whose inputs need no gradient, such as the first, is empty and waits for nothing: its W takes
        the gradient from the next stage.
        """
        yield from dependencies(action, self._step.stages)
        if action.kind == "W":
            inputs = Action(action.stage, "I", action.micro_batch)
            yield from (a for a in dependencies(inputs, self._step.stages) if a.stage > action.stage)

    def _inputs_of_stage_event(self, item: StageEvent) -> Iterator[Item]:
        """Yield the stage's events before an AllReduce; before a weight update, which waits at a barrier, all events.

        The optimizer's own update, of no stage, runs before or after those of all stages.
        """
        updates = [event for event in self._step.stage_events if event.kind == "update"]
        if item.kind == "update":
            yield from (other for other in self._step.items if other not in updates)
            yield from (other for other in updates if item.stage is None or other.stage is None)
            return
        reductions = [event for event in self._step.stage_events if event.kind == "allreduce"]
        yield from (event for event in self._step.events if event.action.stage == item.stage)
        yield from (other for other in reductions if other.stage == item.stage and other.end < item.end)
