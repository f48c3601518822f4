"""Save a measured timeline: a picture, a web page, or a trace."""

from __future__ import annotations

import os

from dapple_tf.runtime.timeline import Timeline
from dapple_tf.timeline.chart import Chart, Row, Span
from dapple_tf.timeline.save import check_path, save_chart

__all__ = ["check_path", "make_chart", "save_timeline"]


def save_timeline(timeline: Timeline, path: str | os.PathLike[str], title: str = "") -> None:
    """Save as the path's suffix says (.png, .html or .json).

    Raises UsageError for another suffix or a path that cannot be written.
    """
    save_chart(make_chart(timeline, title), path)


def make_chart(timeline: Timeline, title: str = "") -> Chart:
    """A row a replica of a stage."""
    places = sorted(
        {(e.action.stage, e.replica, e.device) for e in timeline.events},
        key=lambda place: (*place[:2], _device_order(place[2])),
    )
    many = len({replica for _, replica, _ in places}) > 1
    return Chart(
        title=" · ".join(filter(None, (title, f"{timeline.seconds * 1e3:.0f} ms, {timeline.bubble:.0%} idle"))),
        seconds=timeline.seconds,
        rows=tuple(
            Row(f"stage {stage}" + (f", replica {replica}" if many else ""), device)
            for stage, replica, device in places
        ),
        spans=tuple(
            Span(
                places.index((e.action.stage, e.replica, e.device)),
                str(e.action),
                "forward" if e.action.kind == "F" else "backward",
                e.start,
                e.end,
                e.action.micro_batch,
            )
            for e in timeline.events
        ),
    )


def _device_order(name: str) -> tuple[str, int]:
    kind, _, index = name.rpartition(":")
    return kind, int(index)
