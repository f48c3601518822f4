"""Draw and save recorded steps: a picture, a web page, or a trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dapple_tf.drawing.chart import Chart, Row, Span, SpanKind, stack_charts
from dapple_tf.drawing.save import check_path, save_chart
from dapple_tf.timeline.describe import write_seconds
from dapple_tf.timeline.recording import Recording
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.timeline.trace_file import recording_data
from graph_passes.schedules.schedule import Kind

_SPANS: Mapping[Kind, SpanKind] = {"F": "forward", "B": "backward", "W": "weights"}

__all__ = ["check_path", "draw_recording", "make_chart", "save_recording", "save_timeline"]

_SEEN = 1e-4  # of a step: what is shorter cannot be seen


def save_timeline(timeline: Timeline, path: str | os.PathLike[str], title: str = "") -> None:
    """Save a measured step as the path's suffix says (.png, .html or .json).

    Raises UsageError for another suffix or a path that cannot be written.
    """
    save_recording(Recording(title, timeline), path)


def save_recording(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Save it as the path's suffix says: predicted above measured; a trace (.json) can be read again.

    Raises UsageError for another suffix or a path that cannot be written.
    """
    save_chart(draw_recording(recording), path, recording_data(recording))


def draw_recording(recording: Recording) -> Chart:
    """Predicted above measured, on one axis; or the one that there is."""
    measured, predicted = recording.measured, recording.predicted
    if measured is None or predicted is None:
        return make_chart(recording.shown, recording.headline)
    parts = {
        "predicted": make_chart(predicted.timeline, f"{_summarise(predicted.timeline)} ({predicted.source})"),
        "measured": make_chart(measured, _summarise(measured)),
    }
    return stack_charts(recording.headline, tuple(parts.items()))


def make_chart(timeline: Timeline, title: str = "") -> Chart:
    """A row a replica of a stage; between two stages of a job a thin row for each direction that takes some time."""
    ways = {(t.source, t.target) for t in timeline.transfers if t.end - t.start >= _SEEN * timeline.seconds}
    critical = {id(part.item) for part in timeline.critical_path if part.kind != "waiting"}
    rows: list[tuple[tuple[Any, ...], Row]] = []
    places = timeline.places
    many = len({replica for _, replica, _ in places}) > 1
    for i, (stage, replica, device) in enumerate(places):
        name = f"stage {stage}" + many * f", replica {replica}"
        rows.append(((stage, replica, device), Row(name, device, until=timeline.seconds)))
        if i + 1 == len(places) or places[i + 1][0] != stage:
            rows += [(way, _network_row(way)) for way in sorted(ways) if min(way) == stage]
    at = {key: i for i, (key, _) in enumerate(rows)}
    by_device = {(stage, device): at[stage, replica, device] for stage, replica, device in places}
    spans = [
        Span(
            at[e.action.stage, e.replica, e.device],
            str(e.action),
            _SPANS[e.action.kind],
            e.start,
            e.end,
            e.action.micro_batch,
            id(e) in critical,
        )
        for e in timeline.events
    ]
    for t in timeline.transfers:
        kind: SpanKind = "send-forward" if t.source < t.target else "send-backward"
        if (t.source, t.target) in ways:
            spans.append(Span(at[t.source, t.target], str(t), kind, t.start, t.end, t.micro_batch, id(t) in critical))
    for s in timeline.stage_events:
        if s.stage is not None and (s.stage, s.device) in by_device:  # what belongs to no stage has no row
            name = "AllReduce" if s.kind == "allreduce" else "update"
            row = by_device[s.stage, s.device]
            spans.append(Span(row, name, s.kind, s.start, s.end, critical=id(s) in critical))
    return Chart(title, timeline.seconds, tuple(row for _, row in rows), tuple(spans))


def _summarise(timeline: Timeline) -> str:
    return f"{write_seconds(timeline.seconds)}, {timeline.bubble:.0%} idle"


def _network_row(way: tuple[int, int]) -> Row:
    source, target = way
    return Row(f"{source} to {target}", "activations" if source < target else "gradients", network=True)
