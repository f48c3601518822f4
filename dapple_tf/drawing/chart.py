"""What a timeline's picture shows, whatever it was taken from: rows of spans, and curves of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

SpanKind = Literal["forward", "backward", "weights", "send-forward", "send-backward", "allreduce", "update"]

# Forward blue, backward green, as in the DAPPLE paper's figures. Where backward is split, "backward" is the gradients
# of inputs, and "weights" those of weights.
COLOURS: Mapping[SpanKind, str] = MappingProxyType(
    {
        "forward": "#4f81bd",
        "backward": "#6aa84f",
        "weights": "#c27ba0",
        "send-forward": "#93b5dd",
        "send-backward": "#a9cf99",
        "allreduce": "#d98b2b",
        "update": "#8e7cc3",
    }
)
LABELS: Mapping[SpanKind, str] = MappingProxyType(
    {
        "forward": "forward",
        "backward": "backward",
        "weights": "weight gradients",
        "send-forward": "send forward",
        "send-backward": "send backward",
        "allreduce": "AllReduce",
        "update": "weight update",
    }
)
CRITICAL = "#1c1c1c"  # dark on every colour, for all eyes
MARK = 0.16  # of a stage's row: the bar that marks what is on the critical path
IDLE = "#e9e9ee"
THIN = 0.3  # the height of a transfers' row, that of a stage's row being 1
HEADING = 0.8  # that of the name of a group of rows


@dataclass(frozen=True)
class Row:
    """A line of the picture: a stage's (or replica's) work, or, ``network``, one direction of a boundary.

    ``detail`` says what more there is to say, such as the device. Rows of one ``group`` stand together under its name.
    Up to ``until`` (seconds) what is empty is idle, and drawn so.
    """

    name: str
    detail: str = ""
    network: bool = False
    group: str = ""
    until: float = 0.0

    @property
    def height(self) -> float:
        """Relative to a stage's row."""
        return THIN if self.network else 1.0


@dataclass(frozen=True)
class Span:
    """Something that took from ``start`` to ``end`` (seconds) in the row of that index."""

    row: int
    name: str
    kind: SpanKind
    start: float
    end: float
    micro_batch: int | None = None
    critical: bool = False


@dataclass(frozen=True)
class Curve:
    """Bytes over time: ``values[i]`` holds from ``times[i]`` (seconds) on."""

    name: str
    times: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """A picture ``seconds`` wide; ``limit`` is the bytes that each curve should stay below.

    ``captions``: what is told of each group of rows, by its name.
    """

    title: str
    seconds: float
    rows: tuple[Row, ...]
    spans: tuple[Span, ...]
    curves: tuple[Curve, ...] = ()
    limit: float | None = None
    captions: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[SpanKind, ...]:
        """The kinds of span that occur, in the legend's order."""
        there = {span.kind for span in self.spans}
        return tuple(kind for kind in LABELS if kind in there)

    def tops(self) -> Iterator[float]:
        """The upper edge of every row, downwards from 0, in heights of a stage's row."""
        top, group = 0.0, ""
        for row in self.rows:
            top += HEADING if row.group != group else 0.0
            group = row.group
            yield top
            top += row.height

    @property
    def headings(self) -> tuple[tuple[str, float], ...]:
        """What is told of each group of rows, and the upper edge of that."""
        first: dict[str, float] = {}
        for row, top in zip(self.rows, self.tops(), strict=True):
            if row.group:
                first.setdefault(row.group, top - HEADING)
        return tuple((self.captions.get(group, group), top) for group, top in first.items())

    @property
    def height(self) -> float:
        """Of all rows and headings together."""
        return max((top + row.height for row, top in zip(self.rows, self.tops(), strict=True)), default=0.0)


def stack_charts(title: str, parts: Sequence[tuple[str, Chart]]) -> Chart:
    """Charts one above the other on one time axis, the rows of each under its name and title; without their curves."""
    rows: list[Row] = []
    spans: list[Span] = []
    for name, chart in parts:
        spans += [replace(span, row=span.row + len(rows)) for span in chart.spans]
        rows += [replace(row, group=name) for row in chart.rows]
    seconds = max(chart.seconds for _, chart in parts)
    captions = {name: f"{name}: {chart.title}" if chart.title else name for name, chart in parts}
    return Chart(title, seconds, tuple(rows), tuple(spans), captions=captions)
