"""Charts as PNG pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dapple_tf.drawing.chart import (
    COLOURS,
    CRITICAL,
    HEADING,
    IDLE,
    LABELS,
    LATER_STAGES,
    LIGHTEST,
    MARK,
    Chart,
    Span,
    SpanKind,
)
from dapple_tf.profiler.units import format_bytes, scale_bytes, scale_time

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

_DPI = 130
_INCHES = (12.0, 20.0)  # least and largest width of a picture
_ROW_INCHES, _MOST_ROWS_INCHES = 0.6, 30.0  # height of a row of a stage, and the most of all rows
_PLOT = 0.92  # share of the width that the rows' names leave
_SHARE = 0.8  # share of a row's height that its spans take
_DIGIT_INCHES = 0.06  # width of a digit of the small labels
_SPANS, _MARKS = 1.1, 1.2  # what is drawn over idle times (1), in this order
_INK = "#1c1c1c"  # of numbers on light spans
_LEGEND_COLUMNS = 6  # entries of the legend that fit side by side


def draw(chart: Chart, path: Path) -> None:
    """Write the picture: the rows, and below them the curves of memory if there are any."""
    from matplotlib.figure import Figure

    least, largest = _INCHES
    width = chart.width_for_numbers(_DIGIT_INCHES, 0.01, (_PLOT * least, _PLOT * largest)) / _PLOT
    rows = min(_ROW_INCHES * chart.height, _MOST_ROWS_INCHES) + 1.2
    memory = 2.6 if chart.curves else 0.0
    figure = Figure(figsize=(width, rows + memory), layout="constrained")
    if chart.curves:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[rows, memory])
        _draw_memory(chart, lower)
        bottom = lower
    else:
        upper = bottom = figure.subplots()
    _draw_rows(chart, upper, width)
    scale, unit = scale_time(chart.seconds)
    upper.set_xlim(0, chart.seconds * scale or 1)
    bottom.set_xlabel(f"{_UNITS[unit]} since the step's first forward (numbers are {chart.numbers})")
    # Reason: zlib's least effort makes files half larger than its default, in a third of the time.
    figure.savefig(path, dpi=_DPI, format="png", pil_kwargs={"compress_level": 1})


_UNITS = {"s": "seconds", "ms": "milliseconds", "µs": "microseconds"}


def _line_points(chart: Chart, inches: float) -> float:
    """Return the width of the lines around spans, in points; ``inches``: of a second on the time axis.

    It is 0 where most spans are only a few pixels wide, since lines would hide them.
    """
    if len(chart.spans) < 1000:
        return 0.8
    return 0.3 if chart.typical_seconds * inches * _DPI > 3 else 0.0


def _lighten(colour: str, shade: float) -> tuple[float, float, float]:
    """Return the ``colour`` (#rrggbb) with so much white in it: 0 for none, 1 for white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * shade, green + (1 - green) * shade, blue + (1 - blue) * shade


def _draw_rows(chart: Chart, axes: Axes, width: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    scale, _ = scale_time(chart.seconds)
    tops = list(chart.tops())
    inches = _PLOT * width / (chart.seconds or 1)  # a second's width
    line = _line_points(chart, inches)

    idle = [(row.until, top) for row, top in zip(chart.rows, tops, strict=True) if row.until and not row.network]
    ends, edges = np.array(idle).reshape(-1, 2).T
    axes.add_collection(
        PolyCollection(
            _boxes(np.zeros(len(idle)), ends * scale, edges + 0.1, edges + 0.9),
            facecolors=IDLE,
            edgecolors="none",
        )
    )
    for caption, top in chart.headings:
        axes.text(0, top + HEADING / 2, caption, va="center", fontsize=9.5, fontweight="bold")

    heights = np.array([row.height for row in chart.rows])
    lows = np.array(tops) + (1 - _SHARE) / 2 * heights  # the upper edge of a row's spans: rows count downwards
    thick = np.array([(1.5 if row.network else 1.0) * MARK * row.height for row in chart.rows])
    if line:
        for (kind, shade), spans in _group_by_colour(chart.spans).items():
            left, right, row = _extents(spans, scale)
            boxes = _boxes(left, right, lows[row], lows[row] + _SHARE * heights[row])
            colour = _lighten(COLOURS[kind], shade)
            polygons = PolyCollection(boxes, facecolors=[colour], edgecolors="white", linewidths=line, zorder=_SPANS)
            axes.add_collection(polygons)
    else:
        _draw_columns(chart, axes, int(_PLOT * width * _DPI), lows, lows + _SHARE * heights)
    marked = [span for span in chart.spans if span.critical]
    left, right, row = _extents(marked, scale)
    bottom = lows[row] + _SHARE * heights[row]
    marks = _boxes(left, right, bottom - thick[row], bottom)
    axes.add_collection(PolyCollection(marks, facecolors=CRITICAL, edgecolors="none", zorder=_MARKS))
    for span in chart.spans:
        room = (span.end - span.start) * inches
        if room > _DIGIT_INCHES and chart.is_numbered(span) and room > _DIGIT_INCHES * len(str(span.micro_batch)):
            middle = (span.start + span.end) / 2 * scale
            text = f"{span.micro_batch} {span.detail}" if span.detail else str(span.micro_batch)
            if room <= _DIGIT_INCHES * len(text):
                text = str(span.micro_batch)
            axes.text(
                middle,
                tops[span.row] + 0.5,
                text,
                ha="center",
                va="center",
                color=_INK if span.is_light else "white",
                fontsize=9 if room > max(0.22, 1.5 * _DIGIT_INCHES * len(text)) else 6.5,
                clip_on=True,
            )
    named = [index for index, row in enumerate(chart.rows) if not row.network]
    axes.set_yticks([tops[i] + 0.5 for i in named], [chart.rows[i].name for i in named])
    if _ROW_INCHES * chart.height <= _MOST_ROWS_INCHES:  # else they would overlap
        thin = [(top + row.height / 2, row.name) for row, top in zip(chart.rows, tops, strict=True) if row.network]
        axes.set_yticks(
            [place for place, _ in thin], [name for _, name in thin], minor=True, fontsize=6.5, color="#555"
        )
        axes.tick_params(axis="y", which="minor", length=0)
    axes.set_ylim(chart.height, 0)
    handles: list[Artist] = [Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in chart.kinds]
    if chart.is_shaded:
        handles.append(Patch(color=_lighten(COLOURS["forward"], LIGHTEST), label=LATER_STAGES))
    if idle:
        handles.append(Patch(color=IDLE, label="idle"))
    if marked:
        handles.append(Line2D([], [], color=CRITICAL, linewidth=3, label="critical path"))
    lines = -(-len(handles) // _LEGEND_COLUMNS)
    axes.set_title(chart.title, fontsize=11, loc="left", pad=10 + 14 * lines)
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=-(-len(handles) // lines) if lines else 1,
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
        borderpad=0,
    )
    open_frame(axes)


def _draw_columns(chart: Chart, axes: Axes, columns: int, lows: Floats, highs: Floats) -> None:
    """Draw the spans as columns of about a pixel; ``lows``, ``highs``: the edges of each row's spans."""
    scale, _ = scale_time(chart.seconds)
    groups = _group_by_colour(chart.spans)
    extents = [_extents(spans, columns / (chart.seconds or 1)) for spans in groups.values()]
    covered = np.stack([measure_coverage(*extent, len(lows), columns) for extent in extents])
    colours = np.array([_lighten(COLOURS[kind], shade) for kind, shade in groups])
    mixed = np.zeros((2 * len(lows) - 1, columns, 4))  # between two rows nothing is drawn
    mixed[::2] = mix_colours(covered, colours)
    edges = np.stack([lows, highs], axis=1).ravel()
    axes.pcolorfast(np.linspace(0, chart.seconds * scale or 1, columns + 1), edges, mixed, zorder=_SPANS)


def _group_by_colour(spans: Sequence[Span]) -> dict[tuple[SpanKind, float], list[Span]]:
    """Return the spans of each kind and shade."""
    groups: dict[tuple[SpanKind, float], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.kind, span.shade), []).append(span)
    return groups


def _extents(spans: Sequence[Span], scale: float) -> tuple[Floats, Floats, Integers]:
    """Return the left and right ends of the spans, in seconds times ``scale``, and their rows."""
    left = np.array([span.start for span in spans]) * scale
    right = np.array([span.end for span in spans]) * scale
    return left, right, np.array([span.row for span in spans], np.int64)


def _boxes(left: Floats, right: Floats, low: Floats, high: Floats) -> Sequence[npt.ArrayLike]:
    """Return the corners of rectangles, [rectangles, 4, 2]: of an array matplotlib makes polygons much faster."""
    corners = [(left, low), (right, low), (right, high), (left, high)]
    boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    return cast("Sequence[npt.ArrayLike]", boxes)


def _draw_memory(chart: Chart, axes: Axes) -> None:
    from matplotlib import colormaps

    scale, _ = scale_time(chart.seconds)
    size, unit = scale_bytes(chart.most_bytes)
    ramp = colormaps["viridis"]
    every = -(-len(chart.curves) // 12)  # at most 12 names fit
    for index, curve in enumerate(chart.curves):
        axes.step(
            [time * scale for time in (*curve.times, chart.seconds)],
            [value / size for value in (*curve.values, curve.values[-1])],
            where="post",
            color=ramp(0.9 * index / max(1, len(chart.curves) - 1)),
            linewidth=1.3,
            label=curve.name if index % every == 0 else None,
        )
    note = "memory of a device"
    if chart.drawn_limit is not None:
        axes.axhline(chart.drawn_limit / size, color="black", linestyle="--", linewidth=1, label="the device's memory")
    elif chart.limit is not None:
        note += f" (of {format_bytes(chart.limit)})"
    axes.set_ylim(0, 1.08 * chart.most_bytes / size or 1)
    axes.set_ylabel(unit)
    axes.set_title(note, fontsize=10, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=7, frameon=False, fontsize=8)
    open_frame(axes)


def open_frame(axes: Axes) -> None:
    """Leave out the upper and the right edge of the axes' frame."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# --- Columns of a picture whose spans are narrower than its pixels: the share of a column that they cover
# Polygons take long to draw where there are many, and most of these would be less than a pixel wide.


def measure_coverage(left: Floats, right: Floats, row: Integers, rows: int, columns: int) -> Floats:
    """Return the share of each column that spans cover, [rows, columns]; those that overlap count twice.

    ``left``, ``right``: the ends of each span, in columns from 0; ``row``: its row.
    """
    change = np.zeros((rows, columns + 2))  # of the share from one column to the next
    for ends, sign in ((left, 1.0), (right, -1.0)):
        ends = np.clip(ends, 0, columns)
        column = ends.astype(np.int64)
        np.add.at(change, (row, column), sign * (1 - (ends - column)))
        np.add.at(change, (row, column + 1), sign * (ends - column))
    covered: Floats = np.cumsum(change, axis=1)[:, :columns].clip(0.0)
    return covered


def mix_colours(covered: Floats, colours: Floats) -> Floats:
    """Return red, green, blue and opacity of each column, [rows, columns, 4], all from 0 to 1.

    ``covered`` [kinds, rows, columns]: by spans of each kind; ``colours`` [kinds, 3].
    """
    whole = covered.sum(axis=0)
    mixed = np.tensordot(covered, colours, axes=(0, 0)) / np.maximum(whole, 1e-12)[..., None]
    return np.concatenate([mixed.clip(0, 1), whole.clip(0, 1)[..., None]], axis=2)
