"""A measured step in a few lines: how much of it was idle, and what made it as long as it is."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapple_tf.drawing.chart import scale_time
from dapple_tf.timeline.critical_path import PART_LABELS, share_out

if TYPE_CHECKING:
    from dapple_tf.timeline.timeline import Event, Timeline


@dataclass(frozen=True)
class Slow:
    """An action that took ``times`` the median of its stage's actions of that kind."""

    event: Event
    times: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.event.end - self.event.start

    def __str__(self) -> str:
        return f"{self.event} {write_seconds(self.seconds)} ({self.times:.2g}x the median)"


def describe_timeline(timeline: Timeline) -> str:
    """Step and bubble, utilisation by stage, and the critical path: what it is made of, and its longest wait."""
    path = timeline.critical_path
    shares = share_out(path)
    parts = [
        f"{PART_LABELS[kind]} {write_seconds(seconds)} ({seconds / timeline.seconds:.0%})"
        for kind, seconds in shares.items()
        if seconds >= 5e-4 * timeline.seconds
    ]
    busy = ", ".join(f"stage {stage} {share:.0%}" for stage, share in enumerate(timeline.stage_utilisation))
    lines = [
        f"{write_seconds(timeline.seconds)}, bubble {timeline.bubble:.1%}; busy: {busy}",
        f"critical path: {', '.join(parts)}; critical stage {timeline.critical_stage}",
    ]
    waits = [part for part in path if part.kind == "waiting"]
    if waits:
        longest = max(waits, key=lambda part: part.seconds)
        lines[-1] += f"; longest wait {write_seconds(longest.seconds)}, before {longest.item}"
    return "\n".join(lines)


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """The same as JSON; seconds, and fractions of the step."""
    return {
        "step_seconds": timeline.seconds,
        "bubble": timeline.bubble,
        "utilisation": list(timeline.stage_utilisation),
        "critical_stage": timeline.critical_stage,
        "critical_path_seconds": share_out(timeline.critical_path),
        "critical_path": [str(part) for part in timeline.critical_path],
    }


def find_slowest(timeline: Timeline, count: int = 5) -> tuple[Slow, ...]:
    """The actions that took longest by the median of their stage and kind, the slowest first."""
    alike: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in timeline.events:
        alike[event.action.stage, event.action.kind].append(event)
    found = []
    for events in alike.values():
        median = statistics.median(event.end - event.start for event in events)
        found += [Slow(event, (event.end - event.start) / median) for event in events if median]
    return tuple(sorted(found, key=lambda slow: -slow.times)[:count])


def write_seconds(seconds: float) -> str:
    """In the unit in which it reads well: ``12.3 ms``."""
    scale, unit = scale_time(seconds)
    return f"{seconds * scale:.4g} {unit}"
