"""Bars of a comparison as PNG pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dapple_tf.drawing.bars import PART_COLOURS, PART_LABELS, BarChart
from profiler.units import format_bytes, scale_bytes, scale_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 130
_WIDTH = 14.0  # inches
_ROW = 0.46  # inches
_MEMORY_COLOUR = "#7a6fae"
_LABEL, _NOTE = 70, 110  # characters


def draw_bars(chart: BarChart, path: Path) -> None:
    """Write the picture: on the left the seconds of each row, on the right the bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _ROW * len(chart.bars) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3.2, 1])
    figure.suptitle(chart.title, fontsize=11, x=0.01, ha="left")
    _draw_seconds(chart, left)
    _draw_memory(chart, right)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    left.set_yticks(range(len(chart.bars)), [bar.name for bar in chart.bars])
    left.set_ylim(len(chart.bars) - 0.5, -0.5)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw_seconds(chart: BarChart, axes: Axes) -> None:
    most = max((bar.seconds for bar in chart.bars), default=0.0) or 1.0
    scale, unit = scale_time(most)
    ends = [0.0] * len(chart.bars)
    for part, label in PART_LABELS.items():
        widths = [bar.parts.get(part, 0.0) * scale for bar in chart.bars]
        axes.barh(range(len(ends)), widths, left=ends, height=0.62, color=PART_COLOURS[part], label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, (bar, end) in enumerate(zip(chart.bars, ends, strict=True)):
        text = _shorten(bar.label, _LABEL) if bar.parts else _shorten(bar.note, _NOTE)
        axes.text(end + 0.01 * most * scale, row, text, va="center", fontsize=8, color="#222" if bar.parts else "#777")
    axes.set_xlim(0, 1.6 * most * scale)  # labels stand behind the bars
    axes.set_xlabel(f"predicted step, {unit}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8, borderaxespad=0.2)


def _shorten(text: str, most: int) -> str:
    """Return the text, or its beginning where it has more than ``most`` characters."""
    return text if len(text) <= most else text[: most - 4] + " ..."


def _draw_memory(chart: BarChart, axes: Axes) -> None:
    most = max((bar.memory for bar in chart.bars), default=0.0) or 1.0
    shown = chart.limit <= 2.5 * most  # a line far away would make all bars short
    scale, unit = scale_bytes(max(most, chart.limit) if shown else most)
    axes.barh(range(len(chart.bars)), [bar.memory / scale for bar in chart.bars], height=0.62, color=_MEMORY_COLOUR)
    title = "memory of the fullest device"
    if shown:
        axes.axvline(chart.limit / scale, color="black", linestyle="--", linewidth=1)
        title += " (dashed: what it has)"
    else:
        title += f" (it has {format_bytes(chart.limit)})"
    axes.set_title(title, fontsize=8, loc="left")
    axes.set_xlabel(unit)
