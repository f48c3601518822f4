"""When each action ran, measured inside the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from graph_passes.instrument import timed_calls
from graph_passes.ir import Graph
from graph_passes.schedule import Action


@dataclass(frozen=True)
class Event:
    """One run of a forward or backward; seconds since the step's first."""

    action: Action
    replica: int
    device: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All events of one step, by start."""

    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(event.end for event in self.events)

    @property
    def bubble(self) -> float:
        """The idle fraction of device time."""
        busy = sum(event.end - event.start for event in self.events)
        return 1 - busy / (self.seconds * len({event.device for event in self.events}))

    def order(self, stage: int, replica: int = 0) -> tuple[Action, ...]:
        """The actions of one replica in the order in which they ran."""
        return tuple(e.action for e in self.events if (e.action.stage, e.replica) == (stage, replica))


def read_timeline(graph: Graph, stamps: Any) -> Timeline:
    """Pair the time stamps [2 x calls] of an instrumented graph with its calls."""
    first = float(min(stamps))
    events = []
    for i, name in enumerate(timed_calls(graph)):
        node = graph.node(name)
        kind: Literal["F", "B"] = "F" if node.op == "forward" else "B"
        action = Action(node.integer("stage"), kind, node.integer("micro_batch"))
        start, end = float(stamps[2 * i]) - first, float(stamps[2 * i + 1]) - first
        events.append(Event(action, node.integer("replica"), node.device, start, end))
    return Timeline(tuple(sorted(events, key=lambda e: (e.start, e.end))))
