"""Write self-contained web pages, in the light or dark theme of the reader's system, and drawings with axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from dapple_tf.drawing.chart import Curve
from dapple_tf.drawing.plan import PLAN_STYLE, series_colour

_PAGE = Template(
    """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #222; --faint: #8885; $colours }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #e4e4e4; --faint: #8886; $dark } }
body { margin: 16px; background: var(--page); color: var(--ink); font: 14px system-ui, sans-serif; }
h1 { font-size: 17px; font-weight: 600; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 14px; font-weight: 600; margin: 16px 0 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-bottom: 8px; align-items: center; }
.legend i { display: inline-block; width: 14px; height: 14px; margin-right: 5px; vertical-align: -2px; }
.wide { overflow-x: auto; }
svg { display: block; }
svg text { fill: var(--ink); font-size: 12px; }
svg .ticks text { text-anchor: middle; }
.ticks line, .levels line { stroke: var(--faint); }
.levels .limit { stroke: var(--ink); stroke-dasharray: 6 4; }
.spans path { fill: none; stroke-width: 1.6px; }
table { border-collapse: collapse; }
th, td { padding: 4px 10px 4px 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
th { font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; min-width: 12em; overflow-wrap: anywhere; }
td.bar { min-width: 120px; padding-right: 16px; }
td.bar ~ td:nth-child(-n + 5) { white-space: normal; min-width: 6em; overflow-wrap: anywhere; }
td.bar div { display: flex; height: 15px; }
td.bar i { display: block; height: 100%; }
$style
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
"""
)


PAGE_WIDTH = 1050.0
"""Pixels that a window of 1100 has for a drawing, beside its margins and its scroll bar."""


def build_page(
    title: str,
    body: str,
    style: str = "",
    colours: Mapping[str, str] | None = None,
    dark: Mapping[str, str] | None = None,
) -> str:
    """Return a page of HTML; ``colours`` are variables of its styles, ``dark`` those that differ in a dark theme."""
    return _PAGE.substitute(
        title=escape(title),
        body=body,
        style=f"{PLAN_STYLE}\n{style}",
        colours=_variables(colours or {}),
        dark=_variables(dark or {}),
    )


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def make_legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return a legend; each entry is the style of its mark and its text."""
    marks = (f'<span><i style="{style}"></i>{escape(text)}</span>' for style, text in entries)
    return f'<div class="legend">{"".join(marks)}</div>'


# --- Drawings with axes, as SVG


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``; ``label``: returns the text of a number on it."""

    low: float
    high: float
    label: Callable[[float], str]

    def place(self, value: float, length: float) -> float:
        """Return how far a value is from the low end of the axis, which has this ``length``."""
        return (value - self.low) / (self.high - self.low or 1) * length

    def ticks(self, most: float) -> list[float]:
        """Return numbers on the axis with at most ``most`` steps of 1, 2 or 5 times a power of ten."""
        size = self.high - self.low
        if not size > 0:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(size / most))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= size)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def draw_axis(axis: Axis, name: str, left: float, wide: float, bottom: float, spans: str, fixed: str) -> str:
    """Return a drawing of ``spans`` above a horizontal axis, with what is ``fixed`` to the left of it or behind.

    ``left``: pixels left of the axis. ``wide``: its length. ``bottom``: its distance from the upper edge.
    """
    ticks = []
    for number in axis.ticks(wide / 110):
        x = left + axis.place(number, wide)
        ticks.append(f'<line x1="{x:g}" x2="{x:g}" y1="0" y2="{bottom + 4:g}"/>')
        ticks.append(f'<text x="{min(x, left + wide - 16):g}" y="{bottom + 17:g}">{axis.label(number)}</text>')
    return (
        f'<svg id="{name}" width="{left + wide + 8:g}" height="{bottom + 24:g}">\n{fixed}\n'
        f'<g class="ticks">{"".join(ticks)}</g>\n<g class="spans" transform="translate({left:g},0)">\n{spans}\n</g>'
        "</svg>"
    )


@dataclass(frozen=True)
class Plot:
    """Curves over the axis ``x``, with the axis ``y`` upwards; ``name``: the drawing's identifier.

    ``limit``: a dashed line. ``stepped``: each value holds until the next one; else points are joined. ``left``,
    ``wide``, ``height``: pixels left of the axes, and their lengths.
    """

    name: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    limit: float | None = None
    stepped: bool = False
    left: float = 80.0
    wide: float = PAGE_WIDTH - 90.0
    height: float = 220.0

    def draw(self) -> str:
        """Return the drawing."""
        levels = []
        for level in self.y.ticks(5.9):
            y = self._y(level)
            levels.append(f'<line x1="{self.left:g}" x2="{self.left + self.wide:g}" y1="{y:g}" y2="{y:g}"/>')
            levels.append(f'<text x="4" y="{min(max(y + 4, 10), self.height):g}">{self.y.label(level)}</text>')
        if self.limit is not None:
            y = self._y(self.limit)
            levels.append(
                f'<line class="limit" x1="{self.left:g}" x2="{self.left + self.wide:g}" y1="{y:g}" y2="{y:g}"/>'
            )
        paths = []
        for index, curve in enumerate(self.curves):
            colour = series_colour(index, len(self.curves))
            title = f"{escape(curve.name)}: at most {self.y.label(max(curve.values))}"
            points = "".join(self._points(curve))
            paths.append(f'<path stroke="{colour}" d="{points}"><title>{title}</title></path>')
        levels_text = f'<g class="levels">{"".join(levels)}</g>'
        return draw_axis(self.x, self.name, self.left, self.wide, self.height, "\n".join(paths), levels_text)

    def legend(self) -> str:
        """Return the names of the curves with their colours."""
        count = len(self.curves)
        entries = [(f"background: {series_colour(i, count)}", curve.name) for i, curve in enumerate(self.curves)]
        return make_legend(entries)

    def _y(self, value: float) -> float:
        return self.height - self.y.place(value, self.height)

    def _points(self, curve: Curve) -> Iterator[str]:
        for index, (time, value) in enumerate(zip(curve.times, curve.values, strict=True)):
            x, y = self.x.place(time, self.wide), self._y(value)
            if not index:
                yield f"M{x:.6f} {y:.2f}"
            else:
                yield f"H{x:.6f}V{y:.2f}" if self.stepped else f"L{x:.6f} {y:.2f}"
        if self.stepped:
            yield f"H{self.wide:g}"
