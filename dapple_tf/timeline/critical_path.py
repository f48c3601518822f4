"""The critical path of a step: from its last event backwards, each time to the input that ended last.

AutoPipe, section III.B, takes the longest path through a pipeline's operations. In a simulated step each event starts
when one of its inputs ends, so the path has no gaps. In a recorded step the gaps are waiting: dispatch, contention for
cores, and clocks that differ a little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from dapple_tf.timeline.event_dependencies import dependencies_of
from dapple_tf.timeline.events import Event, Item, StageEvent, StepEvents, Transfer

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
    """A part of the critical path, from ``start`` to ``end`` (seconds): ``item`` runs, or the path waits before it.

    The part is shorter than the event if the next event started before the end of this one, as an AllReduce that
    overlaps backward does.
    """

    kind: PartKind
    item: Item
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    @property
    def stage(self) -> int | None:
        """The stage that computes, reduces or updates; None for transfers and waiting."""
        if self.kind == "waiting" or isinstance(self.item, Transfer):
            return None
        return self.item.action.stage if isinstance(self.item, Event) else self.item.stage

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch, or the last of those, that is computed or sent; None for AllReduce, update and waiting."""
        if self.kind == "waiting" or isinstance(self.item, StageEvent):
            return None
        return self.item.action.micro_batch if isinstance(self.item, Event) else self.item.micro_batch

    def __str__(self) -> str:
        return f"wait before {self.item}" if self.kind == "waiting" else str(self.item)


def find_critical_path(step: StepEvents) -> tuple[Part, ...]:
    """Return the parts of the path from 0 to the step's end; each starts where the part before it ends.

    Their seconds add up to the step time. Events that take no time are left out.
    """
    dependencies = dependencies_of(step)
    item: Item | None = max(step.items, key=_end_and_rank)
    until = step.step_seconds
    parts: list[Part] = []
    seen: set[int] = set()
    while item is not None:
        seen.add(id(item))
        if parts and item.end < until:
            parts.append(Part("waiting", parts[-1].item, item.end, until))
        start = step.start(item)
        parts.append(Part(_part_kind(item), item, start, min(item.end, until)))
        until = start
        # An event shorter than the clock's resolution starts and ends at the start of the event that waits for it.
        inputs = [other for other in dependencies.inputs(item) if step.start(other) < start or other.end <= start]
        new = [other for other in inputs if id(other) not in seen]
        item = max(new, key=lambda other: min(other.end, until), default=None)  # the first of several
    if until > 0:
        parts.append(Part("waiting", parts[-1].item, 0.0, until))
    return tuple(part for part in reversed(parts) if part.seconds > 0)


def sum_by_kind(path: Iterable[Part]) -> dict[PartKind, float]:
    """Return the seconds of the path by kind; their sum is the step's seconds."""
    seconds = dict.fromkeys(PART_LABELS, 0.0)
    for part in path:
        seconds[part.kind] += part.seconds
    return seconds


def critical_stage(path: Sequence[Part]) -> int:
    """Return the stage whose compute fills most of the path (AutoPipe's master stage); the first of several."""
    busy: dict[int, float] = {}
    for part in path:
        if part.kind == "compute" and part.stage is not None:
            busy[part.stage] = busy.get(part.stage, 0.0) + part.end - part.start
    return max(sorted(busy), key=lambda stage: busy[stage], default=0)


def _end_and_rank(item: Item) -> tuple[float, float, bool]:
    """Order events by their end; of equal ends the first stage's counts as later, and its AllReduce as latest."""
    match item:
        case Event():
            return item.end, -item.action.stage, False
        case StageEvent():
            return item.end, -(item.stage or 0), True
        case Transfer():
            return item.end, -math.inf, False


def _part_kind(item: Item) -> PartKind:
    match item:
        case Event():
            return "compute"
        case Transfer():
            return "transfer"
        case StageEvent():
            return item.kind
