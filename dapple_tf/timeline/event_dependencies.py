"""Dependencies between the events of a timeline: the edges of the pipelined graph."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dapple_tf.graph_passes.schedules.schedule import Action, dependencies
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.timeline.events import Event, Item, StageEvent, StepEvents, Transfer


class EventDependencies:
    """For each event of ``step`` the events that it waited for."""

    def __init__(self, step: StepEvents) -> None:
        self._step = step
        self._runs: dict[Action, list[Event]] = defaultdict(list)  # one run on each replica
        self._transfers = {(t.source, t.target, m): t for t in step.transfers for m in t.micro_batches}
        self._previous: dict[int, Item] = {}  # by the id of an event, the one before on its device or channel
        self._updates: dict[tuple[int | None, int], list[StageEvent]] = defaultdict(list)  # of a window
        self._reductions: dict[tuple[int | None, int], list[StageEvent]] = defaultdict(list)
        for event in step.stage_events:
            if event.micro_batch is not None:
                found = self._updates if event.kind == "update" else self._reductions
                found[event.stage, event.micro_batch].append(event)
        last: dict[object, Item] = {}
        in_place: list[Event | Transfer] = [*step.events, *step.transfers]
        for item in sorted(in_place, key=lambda item: (item.start, item.end)):
            place = item.device if isinstance(item, Event) else (item.source, item.target)
            if place in last and (isinstance(item, Event) or step.window is None):
                self._previous[id(item)] = last[place]
            last[place] = item
            if isinstance(item, Event):
                self._runs[item.action].append(item)
        if step.window is not None:
            self._previous |= _last_ended(step.transfers)

    def inputs(self, item: Item) -> Iterator[Item]:
        """Yield the events that had to end before ``item`` started.

        For an event and a transfer the first is preferred where several ended last: of an event, the one before on the
        same device; of a transfer, its producer.
        """
        if isinstance(item, StageEvent):
            yield from self._inputs_of_stage_event(item)
        elif isinstance(item, Transfer):
            yield from self.senders(item)
            yield from self._before(item)
        else:
            yield from self._before(item)
            yield from self._update_before(item)
            for needed in self._needed_actions(item.action):
                yield from self._runs[needed] if needed.stage == item.action.stage else self._senders_of(needed, item)

    def senders(self, item: Event | Transfer) -> Iterator[Event | Transfer]:
        """Yield the events that give ``item`` what it takes from another stage.

        These are transfers, or actions where no transfer was recorded; of a transfer, the actions whose results it has.
        """
        if isinstance(item, Transfer):
            yield from (run for action in item.producers for run in self._runs[action])
        else:
            others = [action for action in self._needed_actions(item.action) if action.stage != item.action.stage]
            found = [sender for needed in others for sender in self._senders_of(needed, item)]
            yield from {id(sender): sender for sender in found}.values()  # B or I of the next stage: one transfer

    def _senders_of(self, needed: Action, item: Event) -> Sequence[Event | Transfer]:
        """Return what gives ``item`` the result of ``needed``, an action of another stage."""
        transfer = self._transfers.get((needed.stage, item.action.stage, needed.micro_batch))
        return self._runs[self._sent_with(needed)] if transfer is None else [transfer]

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

        The optimizer's own update, of no stage, runs before or after those of all stages. In a window both wait for
        the backwards of their group only, and an update for its AllReduce and the stage's update before.
        """
        if self._step.window is not None and item.stage is not None and item.micro_batch is not None:
            yield from self._inputs_in_window(self._step.window, item, item.stage, item.micro_batch)
            return
        updates = [event for event in self._step.stage_events if event.kind == "update"]
        if item.kind == "update":
            yield from (other for other in self._step.items if other not in updates)
            yield from (other for other in updates if item.stage is None or other.stage is None)
            return
        reductions = [event for event in self._step.stage_events if event.kind == "allreduce"]
        yield from (event for event in self._step.events if event.action.stage == item.stage)
        yield from (other for other in reductions if other.stage == item.stage and other.end < item.end)

    def _inputs_in_window(self, window: Window, item: StageEvent, stage: int, micro_batch: int) -> Iterator[Item]:
        groups, number = window.updates[stage], window.update_of(stage, micro_batch)
        if item.kind == "update":
            yield from self._reductions[stage, micro_batch]
            yield from self._updates[stage, groups[number - 1][-1]] if number else ()
        elif number:  # the ranks of a job reduce gradients one after the other
            yield from self._reductions[stage, groups[number - 1][-1]]
        for m in groups[number]:
            yield from self._runs[Action(stage, "B", m)]

    def _ends_of_update(self, window: Window, stage: int, number: int) -> Iterator[Item]:
        """Yield an update; where its event is left out since it takes no time, what it waits for."""
        group = window.updates[stage][number]
        found = self._updates[stage, group[-1]] or self._reductions[stage, group[-1]]
        yield from found
        if not found:
            yield from (run for m in group for run in self._runs[Action(stage, "B", m)])

    def _update_before(self, item: Event) -> Iterator[Item]:
        """Yield the update of the backward before an action of a window, if the action waits for it.

        A forward does, and a backward that uses the weights which the update made.
        """
        previous, window = self._previous.get(id(item)), self._step.window
        if window is not None and isinstance(previous, Event) and previous.action.kind == "B":
            stage = previous.action.stage
            number = window.update_of(stage, previous.action.micro_batch)
            if item.action.kind == "F" or item.version == number + 1:
                yield from self._ends_of_update(window, stage, number)


def _last_ended(transfers: Iterable[Transfer]) -> dict[int, Item]:
    """Return by the id of a transfer the last one between the same stages that had ended when it started.

    Replicas that take minibatches in turn send at the same time, so the one that started before is not waited for.
    """
    channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for transfer in sorted(transfers, key=lambda transfer: transfer.end):
        channels[transfer.source, transfer.target].append(transfer)
    found: dict[int, Item] = {}
    for ordered in channels.values():
        ends = [transfer.end for transfer in ordered]
        for transfer in ordered:
            place = bisect_right(ends, transfer.start)
            earlier = [other for other in ordered[max(0, place - 2) : place] if other is not transfer]
            if earlier:
                found[id(transfer)] = earlier[-1]
    return found
