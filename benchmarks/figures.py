"""Line plots of the benchmarks, saved under out/benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "out" / "benchmarks"

# For each panel, by title: its x values, and its y values by name of a line (NaN: no point).
Panels = Mapping[str, tuple[Sequence[float], Mapping[str, Sequence[float]]]]

# Where the numbers of a picture come from. Every picture says it.
Origin = Literal["measured", "simulated"]

_STYLES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))


def say_origin(figure: Figure, origin: Origin) -> None:
    """Write at the upper left of a picture whether its numbers were measured or simulated."""
    figure.text(0.008, 0.992, origin, ha="left", va="top", fontsize=10, fontweight="bold")


def line_figure(
    name: str,
    panels: Panels,
    origin: Origin,
    *,
    x: str,
    y: str,
    columns: int = 1,
    log_y: bool = False,
    folder: Path = FOLDER,
) -> Path:
    """Draw the panels, ``columns`` in a row, and return the path of the PNG in ``folder``.

    Panels with the same lines have one legend, others one each. The x axis is logarithmic (base 2) where x spans more
    than 8-fold. A line without points is named in its panel as one that does not fit the memory.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.0 * columns if columns > 1 else 6.5, 2.5 * rows + 0.4 if rows > 1 else 4.4), dpi=80)
    canvas = FigureCanvasAgg(figure)
    alike = len({tuple(lines) for _, lines in panels.values()}) == 1
    for index, (title, (xs, lines)) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        draw_lines(axes, xs, lines)
        if log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.06 * axes.dataLim.y1)
        axes.set_title(title, fontsize=10)
        if index % columns == 0:
            axes.set_ylabel(y, fontsize=9)
        if index >= len(panels) - columns:
            axes.set_xlabel(x, fontsize=9)
        if index == 0:
            handles = axes.get_legend_handles_labels()
        if not alike and len(lines) > 1:
            axes.legend(fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    if alike:
        figure.legend(*handles, loc="upper center", ncols=len(handles[0]), fontsize=9, frameon=False)
    say_origin(figure, origin)
    canvas.draw()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    # 64 colours are enough, and make the file a third as large.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(64).save(path, optimize=True)
    return path


def draw_lines(axes: Axes, xs: Sequence[float], lines: Mapping[str, Sequence[float]]) -> None:
    """Draw the lines of one panel."""
    absent = []
    for (label, ys), (marker, style) in zip(lines.items(), _STYLES, strict=False):
        axes.plot(xs, ys, marker=marker, linestyle=style, markersize=4, linewidth=1.4, label=label)
        if all(math.isnan(value) for value in ys):
            absent.append(label)
    if absent:
        axes.text(0.97, 0.06, f"{', '.join(absent)}: out of memory", ha="right", fontsize=8, transform=axes.transAxes)
    ticks = list(xs)
    if max(xs) > 8 * min(xs):
        axes.set_xscale("log", base=2)
        ticks = [xs[0]]
        for x in xs:
            if x >= 1.2 * ticks[-1]:
                ticks.append(x)
    axes.set_xticks(ticks, [str(value) for value in ticks])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
