"""Heat maps of the benchmarks, saved under out/benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.figures import FOLDER, Origin, say_origin

# Of each panel, by title: its rows, its columns, and the values; NaN where there is none.
Panels = Mapping[str, tuple[Sequence[str], Sequence[str], Sequence[Sequence[float]]]]

_MOST = 3.0  # the darkest colour is for this and more


def heat_map(name: str, panels: Panels, origin: Origin, title: str) -> Path:
    """Draw ratios from 1 on, side by side, with their values; return the path of the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    widths = [len(columns) for _, columns, _ in panels.values()]
    rows = max(len(names) for names, _, _ in panels.values())
    figure = Figure(figsize=(0.52 * sum(widths) + 2.2 * len(widths), 0.36 * rows + 2.2), dpi=90, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    say_origin(figure, origin)
    for axes, (heading, (names, columns, values)) in zip(
        np.atleast_1d(figure.subplots(1, len(panels), width_ratios=widths)), panels.items(), strict=True
    ):
        shown = np.ma.masked_invalid(np.log(np.array(values, float)))
        axes.imshow(shown, cmap="YlOrRd", vmin=0, vmax=math.log(_MOST), aspect="auto")
        axes.set_facecolor("#dddddd")
        axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set_title(heading, fontsize=9, loc="left")
        for (row, column), value in np.ndenumerate(np.array(values, float)):
            text = "none" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"
            colour = "white" if value > math.exp(0.7 * math.log(_MOST)) else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / name
    canvas.draw()
    # 128 colours are enough, and make the file smaller.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128).save(path, optimize=True)
    return path
