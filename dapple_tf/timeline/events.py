"""The events of one training step or window: actions, transfers, AllReduces and weight updates, with their times."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from dapple_tf.graph_passes.schedules.schedule import Action, Kind
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.profiler.records import Count, Figure, Name

StageEventKind = Literal["allreduce", "update"]
Place = tuple[int, int, str]
"""Stage, replica and device."""


@dataclass(frozen=True, slots=True)
class Event:
    """One run of an action on one replica of its stage; seconds since the start of the step's first action.

    ``version``: in an asynchronous window, the version of the stage's weights that the action used: the number of
    updates in the window before it.
    """

    action: Action
    replica: int
    device: str
    start: float
    end: float
    version: int | None = None

    @property
    def name(self) -> str:
        """The action, and the version of the weights that it used: ``0F5 v3``."""
        return str(self.action) if self.version is None else f"{self.action} v{self.version}"

    def __str__(self) -> str:
        return self.name + (f" of replica {self.replica}" if self.replica else "")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between two neighbouring stages: activations forward or gradients backward; seconds.

    It carries the results of ``count`` consecutive micro-batches (usually one); ``micro_batch`` is the last.
    In a job it starts when the last of its ranks has reached it. Within one process TensorFlow moves tensors between
    devices by itself, and no transfer is recorded.
    """

    source: Count
    target: Count
    micro_batch: Count
    start: Figure
    end: Figure
    count: Count = 1

    @property
    def micro_batches(self) -> range:
        """The micro-batches whose results it carries."""
        return range(self.micro_batch - self.count + 1, self.micro_batch + 1)

    @property
    def producers(self) -> tuple[Action, ...]:
        """The actions whose results may be sent: F; or B or I, whichever a step has for each micro-batch."""
        kinds: tuple[Kind, ...] = ("F",) if self.source < self.target else ("B", "I")
        return tuple(Action(self.source, kind, m) for m in self.micro_batches for kind in kinds)

    def __str__(self) -> str:
        kind = "F" if self.source < self.target else "B"
        if self.count == 1:  # the same text in less time: long pipelines have very many transfers
            return f"{self.source}>{self.target} {kind}{self.micro_batch}"
        return f"{self.source}>{self.target} " + "+".join(f"{kind}{m}" for m in self.micro_batches)


@dataclass(frozen=True, slots=True)
class StageEvent:
    """An AllReduce of a stage's gradients (or of a part of them, where it overlaps backward), or its weight update.

    ``stage`` is None for the update of variables that belong to no stage. ``start`` and ``end`` are in seconds.
    ``micro_batch``: in an asynchronous window, the last micro-batch whose gradients are reduced or applied.
    """

    kind: StageEventKind
    stage: int | None
    replica: int
    device: str
    start: float
    end: float
    micro_batch: int | None = None

    @property
    def name(self) -> str:
        """``AllReduce`` or ``update``, in a window with the number of the last micro-batch."""
        name = "AllReduce" if self.kind == "allreduce" else "update"
        return name if self.micro_batch is None else f"{name} {self.micro_batch}"

    def __str__(self) -> str:
        return self.name if self.stage is None else f"{self.name} of stage {self.stage}"


Item: TypeAlias = Event | Transfer | StageEvent


@dataclass(frozen=True)
class StepEvents:
    """All events of one step, each kind in the order of start. ``window``: the step is this asynchronous window.

    ``together``: see ``Schedule.together``. Results may also travel together where no transfer is recorded.
    """

    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...] = ()
    stage_events: tuple[StageEvent, ...] = ()
    together: frozenset[Action] = frozenset()
    window: Window | None = None

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """Events of all kinds."""
        return (*self.events, *self.transfers, *self.stage_events)

    @cached_property
    def step_seconds(self) -> float:
        """Seconds from the first start of an action to the last end of any event."""
        return max(item.end for item in self.items)

    @cached_property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max((event.action.stage for event in self.events), default=0)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Stage, replica and device of everything that runs actions, sorted."""
        places = {(event.action.stage, event.replica, event.device) for event in self.events}
        return tuple(sorted(places, key=lambda place: (*place[:2], _device_key(place[2]))))

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices that run actions, in order of their first action."""
        return tuple(dict.fromkeys(event.device for event in self.events))

    @cached_property
    def device_utilisation(self) -> dict[str, float]:
        """The fraction of the step in which each device runs an action."""
        busy = dict.fromkeys(self.devices, 0.0)
        for event in self.events:
            busy[event.device] += event.end - event.start
        return {device: seconds / self.step_seconds for device, seconds in busy.items()}

    @cached_property
    def stage_utilisation(self) -> tuple[float, ...]:
        """The fraction of the step in which each stage's devices run its actions, averaged over its replicas."""
        busy = dict.fromkeys(sorted({event.action.stage for event in self.events}), 0.0)
        for event in self.events:
            busy[event.action.stage] += event.end - event.start
        replicas = Counter(stage for stage, _, _ in self.places)
        return tuple(seconds / replicas[stage] / self.step_seconds for stage, seconds in busy.items())

    def start(self, item: Item) -> float:
        """Return when ``item`` started, in seconds; an AllReduce starts when the last of its devices reaches it."""
        return self._joint_starts.get(item, item.start) if isinstance(item, StageEvent) else item.start

    @cached_property
    def _joint_starts(self) -> dict[StageEvent, float]:
        """For each AllReduce the latest start on any of its devices.

        All devices of a stage finish its AllReduces in the same order, so the n-th events of all devices are one.
        """
        together: dict[tuple[int | None, int], list[StageEvent]] = defaultdict(list)
        finished: dict[tuple[int | None, str], int] = defaultdict(int)
        for event in sorted(self.stage_events, key=lambda event: event.end):
            if event.kind == "allreduce":
                together[event.stage, finished[event.stage, event.device]].append(event)
                finished[event.stage, event.device] += 1
        return {event: max(other.start for other in group) for group in together.values() for event in group}

    def order(self, stage: int, replica: int = 0) -> tuple[Action, ...]:
        """Return the actions of one replica in the order in which they ran."""
        return tuple(e.action for e in self.events if (e.action.stage, e.replica) == (stage, replica))


@dataclass(frozen=True, slots=True)
class OpRun:
    """One run of a TensorFlow op inside of an action: seconds since the action's start, and those that it took.

    ``name``: the name of the op in the model. ``op``: the type of the op that ran, which may be a fused one.
    """

    stage: Count
    kind: Kind
    micro_batch: Count
    replica: Count
    name: Name
    op: Name
    start: Figure
    seconds: Figure

    @property
    def action(self) -> Action:
        """The action that ran it."""
        return Action(self.stage, self.kind, self.micro_batch)


@dataclass(frozen=True)
class MemoryCurve:
    """Measured bytes of a device, beyond those live before the step: ``values[i]`` from ``times[i]`` (seconds) on.

    ``device``: ``CPU`` where the devices of a process share one allocator.
    """

    device: Name
    times: tuple[float, ...]
    values: tuple[float, ...]


def _device_key(name: str) -> tuple[str, int]:
    """Sort ``CPU:10`` after ``CPU:9``."""
    kind, _, index = name.rpartition(":")
    return (kind, int(index)) if index.isdecimal() else (name, 0)
