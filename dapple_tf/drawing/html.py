"""Charts as web pages of a single file: a still picture as SVG. Perfetto zooms into traces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from string import Template

from dapple_tf.drawing.chart import COLOURS, CRITICAL, HEADING, IDLE, LABELS, MARK, Chart, Curve
from dapple_tf.profiler.units import format_bytes, format_seconds, scale_bytes

_WIDTHS = (1000.0, 10_000.0)  # least and largest width of the time axis, in pixels
_DIGIT = 7.0  # pixels
_GAP = 0.1  # of a row's height, above and below its spans
_MEMORY = 220  # pixels

PAGE_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { margin: 16px; background: var(--page); color: var(--ink); font: 14px system-ui, sans-serif; }
h1 { font-size: 17px; font-weight: 600; margin: 0 0 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-bottom: 8px; align-items: center; }
.legend i { display: inline-block; width: 14px; height: 14px; margin-right: 5px; vertical-align: -2px; }
"""
"""The first lines of every page, for a ``string.Template``: title, and the styles of the heading and the legend."""

_PAGE = Template(
    PAGE_HEAD
    + """\
:root { color-scheme: light dark; --page: #fff; --ink: #222; --faint: #8885; --critical: $critical;
  --idle: $idle; $colours }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #e4e4e4; --faint: #8886; --critical: #fff; --idle: #2b2e35; } }
h2 { font-size: 14px; font-weight: 600; margin: 12px 0 4px; }
.plots { overflow-x: auto; }
svg { display: block; }
svg text { fill: var(--ink); font-size: 12px; }
svg .heading { font-weight: 600; }
.idle { fill: var(--idle); background: var(--idle); }
.spans rect { stroke: var(--page); stroke-width: ${line}px; }
.spans rect.mark { fill: var(--critical); stroke: none; pointer-events: none; }
.spans path { fill: none; stroke-width: 1.6px; }
svg .number { fill: #fff; font-size: 11px; text-anchor: middle; pointer-events: none; }
svg .ticks text { text-anchor: middle; }
.ticks line, .levels line { stroke: var(--faint); }
.levels .limit { stroke: var(--ink); stroke-dasharray: 6 4; }
$classes
</style>
</head>
<body>
<h1>$title</h1>
<div class="legend">$legend</div>
<div class="plots">
$plots
</div>
</body>
</html>
"""
)


def make_page(chart: Chart) -> str:
    """Return the page."""
    classes = [f".{kind} {{ fill: var(--{kind}); background: var(--{kind}); }}" for kind in chart.kinds]
    legend = [f'<span><i class="{kind}"></i>{LABELS[kind]}</span>' for kind in chart.kinds]
    if any(row.until for row in chart.rows):
        legend.append('<span><i class="idle"></i>idle</span>')
    if any(span.critical for span in chart.spans):
        legend.append(
            '<span><i style="height: 4px; vertical-align: 3px; background: var(--critical)"></i>critical path</span>'
        )
    wide = chart.width_for_numbers(_DIGIT, 2, _WIDTHS)
    plots = [_draw_rows(chart, wide)]
    if chart.curves:
        plots.append(_draw_memory(chart, wide))
    return _PAGE.substitute(
        title=escape(chart.title),
        critical=CRITICAL,
        idle=IDLE,
        colours=" ".join(f"--{kind}: {colour};" for kind, colour in COLOURS.items()),
        classes="\n".join(classes),
        legend="\n".join(legend),
        plots="\n".join(plots),
        line=f"{min(0.8, chart.typical_seconds * wide / (chart.seconds or 1) / 8):.3f}",  # lines must not hide spans
    )


def _draw_rows(chart: Chart, wide: float) -> str:
    pixels = 34 if len(chart.rows) < 40 else 24  # a stage's row
    tops = [top * pixels for top in chart.tops()]
    second = wide / (chart.seconds or 1)
    names, rects = [], []
    for row, top in zip(chart.rows, tops, strict=True):
        if not row.network:
            title = escape(f"{row.name}: {row.detail}" if row.detail else row.name)
            y = top + pixels / 2 + 4
            names.append(f'<text x="4" y="{y:g}">{escape(row.name)}<title>{title}</title></text>')
            if row.until:
                place = f'x="0" width="{row.until * second:.6f}" y="{top + _GAP * pixels:g}"'
                rects.append(f'<rect {place} height="{(1 - 2 * _GAP) * pixels:g}" class="idle"/>')
    for caption, top in chart.headings:
        y = (top + HEADING / 2) * pixels + 4
        names.append(f'<text x="4" y="{y:g}" class="heading">{escape(caption)}</text>')
    for span in chart.spans:
        height = chart.rows[span.row].height * pixels
        x, width = span.start * second, (span.end - span.start) * second
        title = (
            f"{escape(span.name)} ({LABELS[span.kind]})\n{format_seconds(span.start)} to {format_seconds(span.end)}\n"
            f"takes {format_seconds(span.end - span.start)}"
        )
        opacity = f' opacity="{1 - span.shade:g}"' if span.shade else ""
        rects.append(
            f'<rect class="{span.kind}" x="{x:.6f}" width="{width:.6f}" y="{tops[span.row] + _GAP * height:g}" '
            f'height="{(1 - 2 * _GAP) * height:g}"{opacity}><title>{title}</title></rect>'
        )
        if span.critical:
            thick = (1.5 if chart.rows[span.row].network else 1.0) * MARK * height
            y = tops[span.row] + (1 - _GAP) * height - thick
            rects.append(f'<rect x="{x:.6f}" width="{width:.6f}" y="{y:g}" height="{thick:g}" class="mark"/>')
        number = str(span.micro_batch)
        if chart.is_numbered(span) and width > _DIGIT * len(number) + 2:
            y = tops[span.row] + height / 2 + 4
            rects.append(f'<text class="number" x="{x + width / 2:.6f}" y="{y:g}">{number}</text>')
    return _svg(chart, wide, "rows", chart.height * pixels, "\n".join(rects), "\n".join(names))


def _draw_memory(chart: Chart, wide: float) -> str:
    top = 1.08 * chart.most_bytes or 1.0
    size, unit = scale_bytes(top)
    left, note = _left(chart), "Memory of a device"
    levels = []
    for level in _round_numbers(top, 5.9):
        y = _MEMORY * (1 - level / top)
        levels.append(f'<line x1="{left}" x2="{left + wide:g}" y1="{y:g}" y2="{y:g}"/>')
        levels.append(f'<text x="4" y="{y + 4:g}">{level / size:.3g} {unit}</text>')
    if chart.limit is not None:
        note += f" (it has {format_bytes(chart.limit)})"
    if chart.drawn_limit is not None:
        y = _MEMORY * (1 - chart.drawn_limit / top)
        levels.append(f'<line class="limit" x1="{left}" x2="{left + wide:g}" y1="{y:g}" y2="{y:g}"/>')
    paths, legend = [], []
    for index, curve in enumerate(chart.curves):
        # From blue over green to orange, in even steps, readable on light and on dark.
        colour = f"hsl({220 - 190 * index / max(1, len(chart.curves) - 1):.0f} 65% 50%)"
        title = f"{escape(curve.name)}: at most {format_bytes(max(curve.values), 4)}"
        steps = "".join(_steps(curve, chart.seconds, wide, top))
        paths.append(f'<path stroke="{colour}" d="{steps}"><title>{title}</title></path>')
        legend.append(f'<span><i style="background: {colour}"></i>{escape(curve.name)}</span>')
    drawing = _svg(chart, wide, "memory", _MEMORY, "\n".join(paths), f'<g class="levels">{"".join(levels)}</g>')
    return f'<h2>{note}</h2>\n<div class="legend">{"".join(legend)}</div>\n{drawing}'


def _steps(curve: Curve, seconds: float, wide: float, top: float) -> Iterator[str]:
    second = wide / (seconds or 1)
    for index, (time, value) in enumerate(zip(curve.times, curve.values, strict=True)):
        y = _MEMORY * (1 - value / top)
        yield f"H{time * second:.6f}V{y:.2f}" if index else f"M{time * second:.6f} {y:.2f}"
    yield f"H{wide:g}"


def _round_numbers(top: float, most: float) -> list[float]:
    """Return numbers from 0 to ``top`` with at most ``most`` steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= top)
    return [index * step for index in range(int(top / step + 1e-9) + 1)]


def _left(chart: Chart) -> int:
    """Return the pixels left of the time axis, for the names of the rows."""
    return 16 + 7 * max(len(row.name) for row in chart.rows)


def _svg(chart: Chart, wide: float, name: str, bottom: float, spans: str, fixed: str) -> str:
    """Return a drawing of ``spans`` above a time axis, with what is ``fixed`` to the left of it or behind."""
    left = _left(chart)
    ticks = []
    for time in _round_numbers(chart.seconds, wide / 110):
        x = left + time / (chart.seconds or 1) * wide
        ticks.append(f'<line x1="{x:g}" x2="{x:g}" y1="0" y2="{bottom + 4:g}"/>')
        ticks.append(f'<text x="{min(x, left + wide - 16):g}" y="{bottom + 17:g}">{format_seconds(time)}</text>')
    return (
        f'<svg id="{name}" width="{left + wide + 8:g}" height="{bottom + 24:g}">\n{fixed}\n'
        f'<g class="ticks">{"".join(ticks)}</g>\n<g class="spans" transform="translate({left},0)">\n{spans}\n</g></svg>'
    )
