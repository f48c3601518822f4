"""What a timeline's picture shows, whatever it was taken from: rows of spans, and curves of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
CRITICAL = "#c00000"
THIN = 0.3  # the height of a transfers' row, that of a stage's row being 1


@dataclass(frozen=True)
class Row:
    """A line of the picture: a stage's (or replica's) work, or, ``network``, one direction of a boundary.

    ``detail`` says what more there is to say, such as the device.
    """

    name: str
    detail: str = ""
    network: bool = False

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
    """A picture ``seconds`` wide; ``limit`` is the bytes that each curve should stay below."""

    title: str
    seconds: float
    rows: tuple[Row, ...]
    spans: tuple[Span, ...]
    curves: tuple[Curve, ...] = ()
    limit: float | None = None

    @property
    def kinds(self) -> tuple[SpanKind, ...]:
        """The kinds of span that occur, in the legend's order."""
        there = {span.kind for span in self.spans}
        return tuple(kind for kind in LABELS if kind in there)

    def tops(self) -> Iterator[float]:
        """The upper edge of every row, downwards from 0, in heights of a stage's row."""
        top = 0.0
        for row in self.rows:
            yield top
            top += row.height

    @property
    def height(self) -> float:
        """Of all rows together."""
        return sum(row.height for row in self.rows)


def scale_time(seconds: float) -> tuple[float, str]:
    """Units a second, and the unit's name, in which so many seconds read well."""
    if seconds >= 1 or seconds == 0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def scale_bytes(most: float) -> tuple[float, str]:
    """Bytes a unit, and the unit's name, in which so many bytes read well."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= unit:
            return unit, name
    return 1.0, "B"
