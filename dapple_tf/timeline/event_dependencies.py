"""Find the events for which each event of a timeline waited: the edges of the pipelined graph."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from dapple_tf.graph_passes.schedules.schedule import Action, dependencies
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.timeline.events import Event, Item, StageEvent, StepEvents, Transfer

T = TypeVar("T", Event, Transfer)


class EventDependencies:
    """The dependencies between the events of ``step``."""

    def __init__(self, step: StepEvents) -> None:
        self._step = step
        self._runs: dict[Action, list[Event]] = defaultdict(list)  # one run on each replica
        self._transfers = {(t.source, t.target, m): t for t in step.transfers for m in t.micro_batches}
        for event in sorted(step.events, key=_by_start):
            self._runs[event.action].append(event)
        # By the id of an event or a transfer, the one before it on the same device or channel.
        self._previous = _previous(step.events, lambda event: event.device) | self._previous_transfers()

    def _previous_transfers(self) -> dict[int, Item]:
        return _previous(self._step.transfers, lambda transfer: (transfer.source, transfer.target))

    def inputs(self, item: Item) -> Iterator[Item]:
        """Yield the events that had to end before ``item`` started.

        If several ended last, the first one is preferred: for an event, the event before it on the same device; for a
        transfer, its producer.
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

    def _update_before(self, item: Event) -> Iterator[Item]:
        """Yield the update for which an action waited: none, since updates are the end of a synchronous step."""
        yield from ()

    def _sent_with(self, action: Action) -> Action:
        """Return the action whose result ends the transfer of the result of ``action``: the same, or a later one."""
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
        """Yield the stage's events for an AllReduce; for a weight update, which waits at a barrier, all events.

        The optimizer's own update belongs to no stage, and runs before or after the updates of all stages.
        """
        updates = [event for event in self._step.stage_events if event.kind == "update"]
        if item.kind == "update":
            yield from (other for other in self._step.items if other not in updates)
            yield from (other for other in updates if item.stage is None or other.stage is None)
            return
        reductions = [event for event in self._step.stage_events if event.kind == "allreduce"]
        yield from (event for event in self._step.events if event.action.stage == item.stage)
        yield from (other for other in reductions if other.stage == item.stage and other.end < item.end)


class WindowDependencies(EventDependencies):
    """The dependencies between the events of an asynchronous window, which ``step`` holds."""

    def __init__(self, step: StepEvents, window: Window) -> None:
        super().__init__(step)
        self._window = window
        self._updates: dict[tuple[int | None, int | None], list[StageEvent]] = defaultdict(list)
        self._reductions: dict[tuple[int | None, int | None], list[StageEvent]] = defaultdict(list)
        for event in step.stage_events:
            found = self._updates if event.kind == "update" else self._reductions
            found[event.stage, event.micro_batch].append(event)

    def _previous_transfers(self) -> dict[int, Item]:
        """Return, by the id of a transfer, the last one between the same stages that had ended when it started.

        Replicas that take minibatches in turn send at the same time, so a transfer does not wait for each earlier one.
        """
        channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for transfer in sorted(self._step.transfers, key=lambda transfer: transfer.end):
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

    def _inputs_of_stage_event(self, item: StageEvent) -> Iterator[Item]:
        """Yield the backwards of the group for an AllReduce and for an update.

        An update also waits for its AllReduce, and for the previous update of its stage. An AllReduce also waits for
        the previous AllReduce of its stage.
        """
        if item.stage is None or item.micro_batch is None:
            yield from super()._inputs_of_stage_event(item)
            return
        stage, micro_batch = item.stage, item.micro_batch
        groups, number = self._window.updates[stage], self._window.update_of(stage, micro_batch)
        if item.kind == "update":
            yield from self._reductions[stage, micro_batch]
            yield from self._updates[stage, groups[number - 1][-1]] if number else ()
        elif number:
            yield from self._reductions[stage, groups[number - 1][-1]]
        for m in groups[number]:
            yield from self._runs[Action(stage, "B", m)]

    def _update_before(self, item: Event) -> Iterator[Item]:
        """Yield the update of the backward before an action, if the action waits for it.

        A forward waits for it, and so does a backward that uses the weights of this update.
        """
        previous = self._previous.get(id(item))
        if isinstance(previous, Event) and previous.action.kind == "B":
            stage = previous.action.stage
            number = self._window.update_of(stage, previous.action.micro_batch)
            if item.action.kind == "F" or item.version == number + 1:
                yield from self._ends_of_update(stage, number)

    def _ends_of_update(self, stage: int, number: int) -> Iterator[Item]:
        """Yield an update, or, if it takes no time and has no event, the events for which it waits."""
        group = self._window.updates[stage][number]
        found = self._updates[stage, group[-1]] or self._reductions[stage, group[-1]]
        yield from found
        if not found:
            yield from (run for m in group for run in self._runs[Action(stage, "B", m)])


def dependencies_of(step: StepEvents) -> EventDependencies:
    """Return the dependencies of the events of a step, or of an asynchronous window."""
    return EventDependencies(step) if step.window is None else WindowDependencies(step, step.window)


def _by_start(item: Item) -> tuple[float, float]:
    return item.start, item.end


def _previous(items: Iterable[T], place_of: Callable[[T], object]) -> dict[int, Item]:
    """Return, by the id of an item, the item that started last before it at the same place."""
    last: dict[object, T] = {}
    found: dict[int, Item] = {}
    for item in sorted(items, key=_by_start):
        place = place_of(item)
        if place in last:
            found[id(item)] = last[place]
        last[place] = item
    return found
