"""The contents of a timeline's picture: rows of spans, and curves of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from dapple_tf.drawing.plan import PlanDrawing

SpanKind = Literal["forward", "backward", "inputs", "weights", "send-forward", "send-backward", "allreduce", "update"]

# Forward blue, backward green, as in the DAPPLE paper's figures. A backward that is split is "inputs" and "weights".
# Transfers have hues of their own: tints of blue and green are actions of a device's later stages.
COLOURS: Mapping[SpanKind, str] = MappingProxyType(
    {
        "forward": "#4f81bd",
        "backward": "#6aa84f",
        "inputs": "#45a29e",
        "weights": "#c27ba0",
        "send-forward": "#767c87",
        "send-backward": "#b5916a",
        "allreduce": "#d98b2b",
        "update": "#8e7cc3",
    }
)
LABELS: Mapping[SpanKind, str] = MappingProxyType(
    {
        "forward": "forward",
        "backward": "backward",
        "inputs": "input gradients",
        "weights": "weight gradients",
        "send-forward": "send forward",
        "send-backward": "send backward",
        "allreduce": "AllReduce",
        "update": "weight update",
    }
)
LIGHTEST = 0.55  # the shade of the last stage in a row of several
LATER_STAGES = "a device's later stages"
"""The entry of the legend for lighter actions, where there are any."""
CRITICAL = "#1c1c1c"  # dark on all colours above, also for colour-blind readers
MARK = 0.16  # height, in rows of a stage, of the bar that marks a span on the critical path
IDLE = "#e9e9ee"
THIN = 0.3  # height of a row of transfers, in rows of a stage
HEADING = 0.8  # height of the name of a group of rows


@dataclass(frozen=True)
class Row:
    """A row of the picture: the actions of a stage or of a replica, or (``network``) one direction of a boundary.

    ``detail``: more about it, such as the device. Rows of one ``group`` stand together under its name. From 0 to
    ``until`` (seconds) the row is drawn as idle where it has no span.
    """

    name: str
    detail: str = ""
    network: bool = False
    group: str = ""
    until: float = 0.0

    @property
    def height(self) -> float:
        """Height, in rows of a stage."""
        return THIN if self.network else 1.0


class Span(NamedTuple):  # a picture can have hundreds of thousands; a tuple is made fastest
    """An event from ``start`` to ``end`` (seconds), drawn in the row of index ``row``.

    ``shade``: between 0, the colour of its kind, and 1, white; it distinguishes the stages of one row. ``detail``: what
    is written beside the number, where there is room.
    """

    row: int
    name: str
    kind: SpanKind
    start: float
    end: float
    micro_batch: int | None = None
    critical: bool = False
    shade: float = 0.0
    detail: str = ""

    @property
    def is_light(self) -> bool:
        """Whether its colour is so light that text on it must be dark."""
        return self.shade > 0.3


@dataclass(frozen=True)
class Curve:
    """Bytes over time: ``values[i]`` from ``times[i]`` (seconds) on."""

    name: str
    times: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """A picture whose time axis has ``seconds``.

    ``limit``: bytes that each curve should stay below. ``captions``: the text above each group of rows, by its name.
    ``numbers``: what the numbers are. ``arrows``: pairs of spans, by their index, of which the second takes what the
    first gives; only traces show them. ``plan``: drawn below, on web pages.
    """

    title: str
    seconds: float
    rows: tuple[Row, ...]
    spans: tuple[Span, ...]
    curves: tuple[Curve, ...] = ()
    limit: float | None = None
    captions: Mapping[str, str] = field(default_factory=dict)
    numbers: str = "micro-batches"
    arrows: tuple[tuple[int, int], ...] = ()
    plan: PlanDrawing | None = None

    @property
    def kinds(self) -> tuple[SpanKind, ...]:
        """The kinds of the spans, in the order of the legend."""
        kinds = {span.kind for span in self.spans}
        return tuple(kind for kind in LABELS if kind in kinds)

    @property
    def is_shaded(self) -> bool:
        """Whether a row has several stages, of which the later ones are lighter."""
        return any(span.shade for span in self.spans)

    @property
    def typical_seconds(self) -> float:
        """The seconds that three quarters of the spans take at least; 0 without spans."""
        return _lower_quartile(self.spans)

    def is_numbered(self, span: Span) -> bool:
        """Return whether the number of the span's micro-batch is written into it where there is room."""
        return span.micro_batch is not None and not self.rows[span.row].network and span.end > span.start

    def width_for_numbers(self, digit: float, margin: float, limits: tuple[float, float]) -> float:
        """Return the width of the time axis at which most numbers are readable, within the least and largest of limits.

        ``digit``: the width of a digit; ``margin``: the width beside a number.
        """
        numbered = [span for span in self.spans if self.is_numbered(span)]
        if not numbered:
            return limits[0]
        digits = max(len(str(span.micro_batch)) for span in numbered)
        wanted = (digits * digit + margin) * self.seconds / _lower_quartile(numbered)
        return min(max(wanted, limits[0]), limits[1])

    @property
    def drawn_limit(self) -> float | None:
        """``limit``, unless it is so far above the curves that it would flatten them: then a heading states it."""
        highest = max(max(curve.values) for curve in self.curves)
        return None if self.limit is None or self.limit > 2.5 * highest else self.limit

    @property
    def most_bytes(self) -> float:
        """The most bytes of a curve or of the limit that is drawn."""
        return max(self.drawn_limit or 0.0, *(max(curve.values) for curve in self.curves))

    def tops(self) -> Iterator[float]:
        """Yield the upper edge of every row, downwards from 0, in rows of a stage."""
        top, group = 0.0, ""
        for row in self.rows:
            top += HEADING if row.group != group else 0.0
            group = row.group
            yield top
            top += row.height

    @property
    def headings(self) -> tuple[tuple[str, float], ...]:
        """The caption of each group of rows, and its upper edge in rows of a stage."""
        first: dict[str, float] = {}
        for row, top in zip(self.rows, self.tops(), strict=True):
            if row.group:
                first.setdefault(row.group, top - HEADING)
        return tuple((self.captions.get(group, group), top) for group, top in first.items())

    @property
    def height(self) -> float:
        """Height of all rows and headings, in rows of a stage."""
        return max((top + row.height for row, top in zip(self.rows, self.tops(), strict=True)), default=0.0)


def _lower_quartile(spans: Sequence[Span]) -> float:
    return sorted(span.end - span.start for span in spans)[len(spans) // 4] if spans else 0.0


def stack_charts(title: str, parts: Sequence[tuple[str, Chart]]) -> Chart:
    """Return one chart with the rows of several, each under its name and title, on one time axis; without curves."""
    rows: list[Row] = []
    spans: list[Span] = []
    arrows: list[tuple[int, int]] = []
    for name, chart in parts:
        arrows += _shift_arrows(chart, len(spans))
        spans += [span._replace(row=span.row + len(rows)) for span in chart.spans]
        rows += [dataclasses.replace(row, group=name) for row in chart.rows]
    seconds = max(chart.seconds for _, chart in parts)
    captions = {name: f"{name}: {chart.title}" if chart.title else name for name, chart in parts}
    numbers = parts[0][1].numbers
    return Chart(title, seconds, tuple(rows), tuple(spans), captions=captions, numbers=numbers, arrows=tuple(arrows))


def chain_charts(last: Chart, earlier: Sequence[tuple[float, Chart]]) -> Chart:
    """Return the chart ``last`` with the spans of ``earlier`` ones on the same rows, all at their own times.

    ``earlier`` gives for each earlier step how many seconds before ``last`` it began. Time 0 is the beginning of the
    first step. A row that ``last`` does not have is added below.
    """
    begin = max((seconds for seconds, _ in earlier), default=0.0)
    rows = list(last.rows)
    spans: list[Span] = []
    arrows: list[tuple[int, int]] = []
    for seconds, chart in (*earlier, (0.0, last)):
        rows += [row for row in chart.rows if _row_key(row) not in map(_row_key, rows)]
        places = [list(map(_row_key, rows)).index(_row_key(row)) for row in chart.rows]
        arrows += _shift_arrows(chart, len(spans))
        later = begin - seconds
        spans += [s._replace(row=places[s.row], start=s.start + later, end=s.end + later) for s in chart.spans]
    curves = tuple(dataclasses.replace(c, times=tuple(time + begin for time in c.times)) for c in last.curves)
    return dataclasses.replace(
        last, seconds=begin + last.seconds, rows=tuple(rows), spans=tuple(spans), curves=curves, arrows=tuple(arrows)
    )


def _row_key(row: Row) -> tuple[str, str, str]:
    return row.group, row.name, row.detail


def _shift_arrows(chart: Chart, spans: int) -> list[tuple[int, int]]:
    """Return the chart's arrows behind this number of other spans."""
    return [(first + spans, second + spans) for first, second in chart.arrows]
