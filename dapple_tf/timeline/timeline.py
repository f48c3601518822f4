"""When each action, transfer, AllReduce and update ran, measured inside the step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from graph_passes.ir.graph import Graph
from graph_passes.passes.instrument import timed_nodes
from graph_passes.passes.project import parse_exchange_name
from graph_passes.schedules.schedule import Action, Kind

_KINDS: Mapping[str, Kind] = {"forward": "F", "backward": "B", "weights": "W"}

if TYPE_CHECKING:
    from dapple_tf.timeline.critical_path import Part


@dataclass(frozen=True)
class Stamp:
    """When a node ran, seconds by the clock of its process; ``device`` says where."""

    op: str
    name: str
    stage: int | None
    replica: int | None
    micro_batch: int | None
    device: str
    start: float
    end: float


@dataclass(frozen=True)
class Event:
    """One run of a forward, backward or weights' part of one; seconds since the step's first."""

    action: Action
    replica: int
    device: str
    start: float
    end: float

    def __str__(self) -> str:
        return str(self.action) + (f" of replica {self.replica}" if self.replica else "")


@dataclass(frozen=True)
class Transfer:
    """One exchange between the ranks of two stages; it starts when the last of them has come to it.

    Within one process TensorFlow sends between devices by itself, and no transfer is seen.
    """

    source: int
    target: int
    micro_batch: int
    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.source}>{self.target} {self.micro_batch}"


@dataclass(frozen=True)
class StageEvent:
    """The AllReduce of a stage's gradients (a part of them, where it overlaps backward), or the update of its weights.

    A stage of None: the update of what belongs to no stage.
    """

    kind: Literal["allreduce", "update"]
    stage: int | None
    replica: int
    device: str
    start: float
    end: float

    def __str__(self) -> str:
        name = "AllReduce" if self.kind == "allreduce" else "update"
        return name if self.stage is None else f"{name} of stage {self.stage}"


@dataclass(frozen=True)
class Timeline:
    """All events of one step, by start."""

    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...] = ()
    stage_events: tuple[StageEvent, ...] = ()

    @cached_property
    def seconds(self) -> float:
        """From the first start of an action to the last end of anything."""
        ends = [e.end for e in self.events] + [t.end for t in self.transfers] + [s.end for s in self.stage_events]
        return max(ends)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Those that run actions."""
        return tuple(dict.fromkeys(event.device for event in self.events))

    @property
    def bubble(self) -> float:
        """The fraction of device time in which no action runs."""
        return 1 - sum(self.utilisation(device) for device in self.devices) / len(self.devices)

    def utilisation(self, device: str) -> float:
        """The fraction of the step in which ``device`` runs an action."""
        return sum(event.end - event.start for event in self.events if event.device == device) / self.seconds

    @cached_property
    def places(self) -> tuple[tuple[int, int, str], ...]:
        """Stage, replica and device of every row of actions, in that order."""
        found = {(event.action.stage, event.replica, event.device) for event in self.events}
        return tuple(sorted(found, key=lambda place: (*place[:2], _device_order(place[2]))))

    @cached_property
    def stage_utilisation(self) -> tuple[float, ...]:
        """Of each stage the fraction of the step in which its devices run its actions, over its replicas."""
        busy: dict[int, float] = {}
        for event in self.events:
            stage = event.action.stage
            busy[stage] = busy.get(stage, 0.0) + event.end - event.start
        replicas = Counter(stage for stage, _, _ in self.places)
        return tuple(busy[stage] / replicas[stage] / self.seconds for stage in sorted(busy))

    @cached_property
    def critical_path(self) -> tuple[Part, ...]:
        """What made the step as long as it is: see ``find_critical_path``."""
        from dapple_tf.timeline.critical_path import find_critical_path

        return find_critical_path(self)

    @property
    def critical_stage(self) -> int:
        """The stage whose compute fills most of the critical path."""
        from dapple_tf.timeline.critical_path import critical_stage

        return critical_stage(self.critical_path)

    def __str__(self) -> str:
        from dapple_tf.timeline.describe import describe_timeline

        return describe_timeline(self)

    def order(self, stage: int, replica: int = 0) -> tuple[Action, ...]:
        """The actions of one replica in the order in which they ran."""
        return tuple(e.action for e in self.events if (e.action.stage, e.replica) == (stage, replica))


def name_stamps(graph: Graph, device: str | None = None) -> tuple[Stamp, ...]:
    """The nodes that an instrumented graph times, without the times; ``device``: say that they are there."""
    found = []
    for node in timed_nodes(graph):
        stage, replica, m = (node.integer(k) if node.has(k) else None for k in ("stage", "replica", "micro_batch"))
        found.append(Stamp(node.op, node.name, stage, replica, m, node.device if device is None else device, 0.0, 0.0))
    return tuple(found)


def fill_stamps(named: Sequence[Stamp], times: Any) -> tuple[Stamp, ...]:
    """The stamps with the graph's times [2 x nodes], start and end of each."""
    pairs = zip(named, times[::2], times[1::2], strict=True)
    return tuple(dataclasses.replace(stamp, start=float(start), end=float(end)) for stamp, start, end in pairs)


def make_timeline(stamps: Sequence[Stamp]) -> Timeline:
    """The timeline of all processes' stamps, whose clocks agree; times count from the first action's start."""
    first = min(stamp.start for stamp in stamps if stamp.op in _KINDS)
    since = [dataclasses.replace(s, start=s.start - first, end=s.end - first) for s in stamps]
    since.sort(key=lambda stamp: (stamp.start, stamp.end))
    events = tuple(_event(stamp) for stamp in since if stamp.op in _KINDS)
    return Timeline(events, tuple(_transfers(since)), tuple(_stage_events(since)))


def read_timeline(graph: Graph, stamps: Any) -> Timeline:
    """The timeline of an instrumented graph that ran in one process."""
    return make_timeline(fill_stamps(name_stamps(graph), stamps))


def _event(stamp: Stamp) -> Event:
    assert stamp.stage is not None
    assert stamp.replica is not None
    assert stamp.micro_batch is not None
    return Event(
        Action(stamp.stage, _KINDS[stamp.op], stamp.micro_batch), stamp.replica, stamp.device, stamp.start, stamp.end
    )


def _transfers(stamps: Iterable[Stamp]) -> list[Transfer]:
    """Each exchange once: nothing moves before all its ranks have come, and it is over when all have gone on."""
    found: dict[str, Transfer] = {}
    for stamp in stamps:
        way = parse_exchange_name(stamp.name) if stamp.op == "exchange" else None
        if way is None:
            continue
        known = found.get(stamp.name, Transfer(*way, stamp.start, stamp.end))
        start, end = max(known.start, stamp.start), max(known.end, stamp.end)
        found[stamp.name] = dataclasses.replace(known, start=start, end=end)
    return sorted(found.values(), key=lambda transfer: transfer.start)


def _stage_events(stamps: Iterable[Stamp]) -> list[StageEvent]:
    found = []
    for stamp in stamps:
        if stamp.op == "allreduce" or stamp.op == "update":
            kind: Literal["allreduce", "update"] = "allreduce" if stamp.op == "allreduce" else "update"
            found.append(StageEvent(kind, stamp.stage, stamp.replica or 0, stamp.device, stamp.start, stamp.end))
    return found


def _device_order(name: str) -> tuple[str, int]:
    """``CPU:10`` after ``CPU:9``."""
    kind, _, index = name.rpartition(":")
    return (kind, int(index)) if index.isdecimal() else (name, 0)
