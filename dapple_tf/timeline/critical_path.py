"""The critical path of a measured step: from its last event back, what ended last of all that each event waited for.

AutoPipe, section III.B, takes the longest path through a pipeline's operations. In a measured step it has gaps, which
are waiting: dispatch, contention for cores, clocks that do not quite agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from dapple_tf.timeline.event_dependencies import Awaited, Item
from dapple_tf.timeline.timeline import Event, StageEvent, Timeline, Transfer

PartKind = Literal["compute", "transfer", "allreduce", "update", "waiting"]
PART_LABELS: Mapping[PartKind, str] = MappingProxyType(
    {
        "compute": "compute",
        "transfer": "transfers",
        "allreduce": "AllReduce",
        "update": "weight update",
        "waiting": "waiting",
    }
)


@dataclass(frozen=True)
class Part:
    """A stretch of the path, from ``start`` to ``end`` (seconds): what ran then, or ``waiting`` before ``item``.

    It is shorter than the item's own time where what comes next began before its end, as AllReduce does that overlaps
    backward.
    """

    kind: PartKind
    item: Item
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start

    @property
    def stage(self) -> int | None:
        """The stage that computes, sums or updates; None for the rest."""
        if self.kind == "waiting" or isinstance(self.item, Transfer):
            return None
        return self.item.action.stage if isinstance(self.item, Event) else self.item.stage

    def __str__(self) -> str:
        return f"wait before {self.item}" if self.kind == "waiting" else str(self.item)


def find_critical_path(timeline: Timeline) -> tuple[Part, ...]:
    """The parts from 0 to the step's end, each beginning where the one before it ends."""
    awaited = Awaited(timeline)
    item: Item | None = max(awaited.items, key=lambda found: (found.end, awaited.begin(found)))
    until = timeline.seconds
    parts: list[Part] = []
    seen: set[Item] = set()
    while item is not None:
        seen.add(item)
        if parts and item.end < until:
            parts.append(Part("waiting", parts[-1].item, item.end, until))
        begin = awaited.begin(item)
        parts.append(Part(_kind(item), item, begin, min(item.end, until)))
        until = begin
        # What takes less than the clock can tell begins, and ends, as what waited for it begins.
        before = [found for found in awaited.by(item) if awaited.begin(found) < begin or found.end <= begin]
        earlier = [found for found in before if found not in seen]
        # The first of several that ended by then: it is the one on the same device.
        item = max(earlier, key=lambda found: min(found.end, until), default=None)
    if until > 0:
        parts.append(Part("waiting", parts[-1].item, 0.0, until))
    return tuple(part for part in reversed(parts) if part.seconds > 0)


def share_out(path: Iterable[Part]) -> dict[PartKind, float]:
    """Seconds of the path by kind; all together are the step."""
    seconds = dict.fromkeys(PART_LABELS, 0.0)
    for part in path:
        seconds[part.kind] += part.seconds
    return seconds


def critical_stage(path: Sequence[Part]) -> int:
    """The stage whose compute fills most of the path (AutoPipe's master stage); the first of several."""
    busy: dict[int, float] = {}
    for part in path:
        if part.kind == "compute" and part.stage is not None:
            busy[part.stage] = busy.get(part.stage, 0.0) + part.seconds
    return max(sorted(busy), key=lambda stage: busy[stage], default=0)


def _kind(item: Item) -> PartKind:
    match item:
        case Event():
            return "compute"
        case Transfer():
            return "transfer"
        case StageEvent():
            return item.kind
