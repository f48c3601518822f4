"""The contents of a comparison's picture: for each planner a bar of the step's parts, and one of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dapple_tf.drawing.chart import COLOURS
from dapple_tf.drawing.page import build_page, make_legend
from dapple_tf.drawing.plan import PlanDrawing, draw_plan
from dapple_tf.drawing.png import open_frame
from dapple_tf.profiler.units import format_bytes, scale_bytes, scale_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PART_COLOURS: Mapping[str, str] = MappingProxyType(
    {"compute": COLOURS["forward"], "allreduce": COLOURS["allreduce"], "wait": "#b9b9c3"}
)
PART_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "computing on the busiest device",
        "allreduce": "AllReduce after the last backward",
        "wait": "waiting for other stages and transfers",
    }
)


@dataclass(frozen=True)
class Bar:
    """A row: the seconds of each part (keys of ``PART_LABELS``), and the ``memory`` bytes of the fullest device.

    ``label``: what is written behind the bar. ``note``: a line about it. Without ``parts`` there is no bar: the note
    says why.
    """

    name: str
    label: str
    note: str
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class BarChart:
    """A picture of ``bars``, the fastest first. ``limit``: bytes of a device."""

    title: str
    bars: tuple[Bar, ...]
    limit: float


# --- A comparison as a web page of a single file: a table with bars


def make_bars_page(
    chart: BarChart,
    header: Sequence[str],
    cells: Sequence[Mapping[str, str]],
    drawings: Sequence[tuple[str, PlanDrawing]],
) -> str:
    """Return the page: a row for each bar, with its name, its ``cells`` by their ``header``, the bar, and its note.

    ``drawings``: those of the cluster and of plans, with their headings, for below the table.
    """
    most = max((bar.seconds for bar in chart.bars), default=0.0) or 1.0
    rows = []
    for bar, row in zip(chart.bars, cells, strict=True):
        parts = "".join(
            f'<i class="{part}" style="width: {100 * seconds / most:.3f}%" title="{escape(PART_LABELS[part])}"></i>'
            for part, seconds in bar.parts.items()
        )
        fields = "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in header)
        rows.append(
            f'<tr><td>{escape(bar.name)}</td><td class="bar"><div>{parts}</div></td>{fields}'
            f'<td class="text">{escape(bar.note)}</td></tr>'
        )
    head = "<th>planner</th><th></th>" + "".join(f"<th>{escape(name)}</th>" for name in header)
    legend = make_legend([(f"background: {PART_COLOURS[part]}", text) for part, text in PART_LABELS.items()])
    body = [
        legend,
        f'<div class="wide">\n<table>\n<thead><tr>{head}<th class="text">why</th></tr></thead>\n<tbody>',
        *rows,
        "</tbody>\n</table>\n</div>",
    ]
    for heading, drawing in drawings:
        body += [f"<h2>{escape(heading)}</h2>", f'<div class="wide">\n{draw_plan(drawing)}\n</div>']
    style = "\n".join(f".{part} {{ background: {colour}; }}" for part, colour in PART_COLOURS.items())
    return build_page(chart.title, "\n".join(body), style)


# --- Bars of a comparison as PNG pictures


_DPI = 130
_WIDTH = 14.0  # inches
_ROW = 0.46  # inches
_MEMORY_COLOUR = "#7a6fae"
_LABEL, _NOTE = 70, 110  # characters


def draw_bars(chart: BarChart, path: Path) -> None:
    """Write the picture: on the left the seconds of each row, on the right the bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _ROW * len(chart.bars) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3.2, 1])
    figure.suptitle(chart.title, fontsize=11, x=0.01, ha="left")
    _draw_seconds(chart, left)
    _draw_memory(chart, right)
    open_frame(left)
    open_frame(right)
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
