"""Save a measured timeline: a picture, a web page, or a trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dapple_tf.runtime.timeline import Timeline
from dapple_tf.timeline.chart import Chart, Row, Span, SpanKind
from dapple_tf.timeline.save import check_path, save_chart
from graph_passes.schedule import Kind

_SPANS: Mapping[Kind, SpanKind] = {"F": "forward", "B": "backward", "W": "weights"}

__all__ = ["check_path", "make_chart", "save_timeline"]


def save_timeline(timeline: Timeline, path: str | os.PathLike[str], title: str = "") -> None:
    """Save as the path's suffix says (.png, .html or .json).

    Raises UsageError for another suffix or a path that cannot be written.
    """
    save_chart(make_chart(timeline, title), path)


def make_chart(timeline: Timeline, title: str = "") -> Chart:
    """A row a replica of a stage; between two stages of a job a thin row for each direction."""
    places = sorted(
        {(e.action.stage, e.replica, e.device) for e in timeline.events},
        key=lambda place: (*place[:2], _device_order(place[2])),
    )
    ways = {(transfer.source, transfer.target) for transfer in timeline.transfers}
    rows: list[tuple[tuple[Any, ...], Row]] = []
    many = len({replica for _, replica, _ in places}) > 1
    for i, (stage, replica, device) in enumerate(places):
        rows.append(((stage, replica, device), Row(f"stage {stage}" + many * f", replica {replica}", device)))
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
        )
        for e in timeline.events
    ]
    for t in timeline.transfers:
        kind: SpanKind = "send-forward" if t.source < t.target else "send-backward"
        spans.append(Span(at[t.source, t.target], str(t), kind, t.start, t.end, t.micro_batch))
    for s in timeline.stage_events:
        if s.stage is not None and (s.stage, s.device) in by_device:  # what belongs to no stage has no row
            name = "AllReduce" if s.kind == "allreduce" else "update"
            spans.append(Span(by_device[s.stage, s.device], name, s.kind, s.start, s.end))
    return Chart(
        title=" · ".join(filter(None, (title, f"{timeline.seconds * 1e3:.0f} ms, {timeline.bubble:.0%} idle"))),
        seconds=timeline.seconds,
        rows=tuple(row for _, row in rows),
        spans=tuple(spans),
    )


def _network_row(way: tuple[int, int]) -> Row:
    source, target = way
    return Row(f"{source} to {target}", "activations" if source < target else "gradients", network=True)


def _device_order(name: str) -> tuple[str, int]:
    kind, _, index = name.rpartition(":")
    return kind, int(index)
