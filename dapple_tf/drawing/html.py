"""Charts as web pages of a single file: SVG, style, and a script for zoom and tooltips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from string import Template

from dapple_tf.drawing.chart import COLOURS, CRITICAL, HEADING, IDLE, LABELS, MARK, Chart, Curve
from profiler.units import format_bytes, scale_bytes

_WIDE = 1000.0  # width of the time axis in the drawing's units; the script fits it to the window
_GAP = 0.1  # of a row's height, above and below its spans
_MEMORY = 220  # pixels

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #222; --faint: #8885; --critical: $critical; --tip: #fffffff2;
  --idle: $idle; $colours }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #e4e4e4; --faint: #8886; --critical: #fff; --tip: #2a2d33f2; --idle: #2b2e35; } }
body { margin: 16px; background: var(--page); color: var(--ink); font: 14px system-ui, sans-serif; }
h1 { font-size: 17px; font-weight: 600; margin: 0 0 8px; }
h2 { font-size: 14px; font-weight: 600; margin: 12px 0 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-bottom: 8px; align-items: center; }
.legend i { display: inline-block; width: 14px; height: 14px; margin-right: 5px; vertical-align: -2px; }
.legend button { font: inherit; padding: 0 8px; }
.hint { opacity: .7; }
svg { display: block; width: 100%; cursor: grab; touch-action: none; user-select: none; }
svg text { fill: var(--ink); font-size: 12px; }
svg .heading { font-weight: 600; }
.idle { fill: var(--idle); background: var(--idle); }
.spans rect { stroke: var(--page); stroke-width: var(--line, .8px); vector-effect: non-scaling-stroke; }
.spans rect.mark { fill: var(--critical); stroke: none; pointer-events: none; }
.spans path { fill: none; stroke-width: 1.6px; vector-effect: non-scaling-stroke; }
svg .numbers text { fill: #fff; font-size: 11px; text-anchor: middle; pointer-events: none; }
svg .ticks text { text-anchor: middle; }
.ticks line, .levels line { stroke: var(--faint); }
.levels .limit { stroke: var(--ink); stroke-dasharray: 6 4; }
#tip { position: fixed; display: none; padding: 4px 8px; border: 1px solid var(--faint); border-radius: 4px;
  background: var(--tip); pointer-events: none; white-space: pre; }
$classes
</style>
</head>
<body>
<h1>$title</h1>
<div class="legend">$legend
<span><button id="out">&minus;</button> <button id="in">+</button> <button id="all">all</button></span>
<span class="hint">wheel zooms, drag moves, double-click shows all</span></div>
$plots
<div id="tip"></div>
<script>
"use strict";
const SECONDS = $seconds, LEFT = $left, WIDE = $wide;
$script
</script>
</body>
</html>
""")

# Spans and curves are stretched by their group's transform; names and numbers are not, so the script places them.
_SCRIPT = """\
const plots = [...document.querySelectorAll("svg")], tip = document.getElementById("tip");
let zoom = 1, shift = 0, drag = null, waiting = false;
const SVG = "http://www.w3.org/2000/svg";
const width = () => Math.max(50, plots[0].clientWidth - LEFT - 8);
const make = (kind, attributes, text) => {
  const node = document.createElementNS(SVG, kind);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
};
const labelled = [...document.querySelectorAll("rect[data-m]")].map(rect => ({
  start: +rect.getAttribute("x"), wide: +rect.getAttribute("width"), text: rect.dataset.m,
  y: +rect.getAttribute("y") + +rect.getAttribute("height") / 2 + 4 }));
const widths = labelled.map(({ wide }) => wide).sort((a, b) => a - b);
const typical = widths[Math.floor(widths.length / 4)] ?? WIDE;  // lines around spans must not hide them
const time = seconds => {
  const [scale, unit] = SECONDS >= 1 ? [1, "s"] : SECONDS >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return (seconds * scale).toPrecision(5).replace(/\\.?0+$/, "") + " " + unit;
};
function ticks(svg) {
  const group = svg.querySelector(".ticks"), bottom = +svg.dataset.bottom, found = [];
  const shown = SECONDS / zoom, rough = shown / Math.max(2, width() / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  const from = shift / WIDE * SECONDS;
  for (let i = Math.ceil(from / step); SECONDS > 0 && i * step <= from + shown * (1 + 1e-9); i++) {
    const x = LEFT + (i * step - from) / shown * width();
    found.push(make("line", { x1: x, x2: x, y1: 0, y2: bottom + 4 }),
               make("text", { x: Math.min(x, LEFT + width() - 16), y: bottom + 17 }, time(i * step)));
  }
  group.replaceChildren(...found);
}
function place() {
  waiting = false;
  zoom = Math.min(Math.max(zoom, 1), 1e5);
  shift = Math.min(Math.max(shift, 0), WIDE - WIDE / zoom);
  const unit = width() / WIDE * zoom;
  for (const svg of plots) {
    svg.querySelector(".clip rect").setAttribute("width", width());
    svg.style.setProperty("--line", Math.min(.8, typical * unit / 8) + "px");
    svg.querySelector(".spans").setAttribute("transform", `translate(${LEFT - shift * unit},0) scale(${unit},1)`);
    for (const line of svg.querySelectorAll(".across")) line.setAttribute("x2", LEFT + width());
    ticks(svg);
  }
  const numbers = [];
  for (const { start, wide, text, y } of labelled) {
    const x = LEFT + (start + wide / 2 - shift) * unit;
    if (wide * unit > 7 * text.length + 2 && x > LEFT && x < LEFT + width()) numbers.push(make("text", { x, y }, text));
  }
  plots[0].querySelector(".numbers").replaceChildren(...numbers);
}
const later = () => { if (!waiting) { waiting = true; requestAnimationFrame(place); } };
function scale(factor, x) {
  const at = (x - LEFT) / width();
  const here = shift + at * WIDE / zoom;
  zoom = Math.min(Math.max(zoom * factor, 1), 1e5);
  shift = here - at * WIDE / zoom;
  later();
}
for (const svg of plots) {
  const x = event => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("wheel", event => { event.preventDefault(); scale(1.0015 ** -event.deltaY, x(event)); },
    { passive: false });
  svg.addEventListener("pointerdown", event => { drag = { x: event.clientX, shift }; });
  svg.addEventListener("dblclick", () => { zoom = 1; later(); });
  svg.addEventListener("pointermove", event => {
    const text = event.target.dataset.n;
    tip.style.display = text && !drag ? "block" : "none";
    if (!text) return;
    const start = +event.target.getAttribute("x") / WIDE * SECONDS;
    const wide = +event.target.getAttribute("width") / WIDE * SECONDS;
    tip.textContent = event.target.tagName === "rect"
      ? `${text}\\n${time(start)} to ${time(start + wide)}\\ntakes ${time(wide)}` : text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
addEventListener("pointermove", event => {
  if (!drag) return;
  shift = drag.shift - (event.clientX - drag.x) / width() * WIDE / zoom;
  later();
});
addEventListener("pointerup", () => { drag = null; });
addEventListener("resize", later);
document.getElementById("in").onclick = () => scale(1.5, LEFT + width() / 2);
document.getElementById("out").onclick = () => scale(1 / 1.5, LEFT + width() / 2);
document.getElementById("all").onclick = () => { zoom = 1; later(); };
place();
"""


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
    plots = [_draw_rows(chart)]
    if chart.curves:
        plots.append(_draw_memory(chart))
    return _PAGE.substitute(
        title=escape(chart.title),
        critical=CRITICAL,
        idle=IDLE,
        colours=" ".join(f"--{kind}: {colour};" for kind, colour in COLOURS.items()),
        classes="\n".join(classes),
        legend="\n".join(legend),
        plots="\n".join(plots),
        seconds=repr(float(chart.seconds)),
        left=_left(chart),
        wide=_WIDE,
        script=_SCRIPT,
    )


def _left(chart: Chart) -> int:
    """Return the pixels left of the plot, for the names of the rows."""
    return 16 + 7 * max(len(row.name) for row in chart.rows)


def _draw_rows(chart: Chart) -> str:
    pixels = 34 if len(chart.rows) < 40 else 24  # a stage's row
    tops = [top * pixels for top in chart.tops()]
    bottom = chart.height * pixels
    wide = _WIDE / (chart.seconds or 1)
    names, rects = [], []
    for row, top in zip(chart.rows, tops, strict=True):
        if not row.network:
            tip = escape(f"{row.name}: {row.detail}" if row.detail else row.name)
            names.append(f'<text x="4" y="{top + pixels / 2 + 4:g}" data-n="{tip}">{escape(row.name)}</text>')
            if row.until:
                place = f'x="0" width="{row.until * wide:.6f}" y="{top + _GAP * pixels:g}"'
                rects.append(f'<rect {place} height="{(1 - 2 * _GAP) * pixels:g}" class="idle"/>')
    for caption, top in chart.headings:
        y = (top + HEADING / 2) * pixels + 4
        names.append(f'<text x="4" y="{y:g}" class="heading">{escape(caption)}</text>')
    for span in chart.spans:
        height = chart.rows[span.row].height * pixels
        number = "" if span.micro_batch is None or chart.rows[span.row].network else f' data-m="{span.micro_batch}"'
        rects.append(
            f'<rect class="{span.kind}" x="{span.start * wide:.6f}" '
            f'width="{(span.end - span.start) * wide:.6f}" y="{tops[span.row] + _GAP * height:g}" '
            f'height="{(1 - 2 * _GAP) * height:g}"{_opacity(span.shade)} '
            f'data-n="{escape(span.name)} ({LABELS[span.kind]})"{number}/>'
        )
        if span.critical:
            thick = (1.5 if chart.rows[span.row].network else 1.0) * MARK * height
            rects.append(
                f'<rect x="{span.start * wide:.6f}" width="{(span.end - span.start) * wide:.6f}" '
                f'y="{tops[span.row] + (1 - _GAP) * height - thick:g}" height="{thick:g}" class="mark"/>'
            )
    return _svg("rows", bottom, _left(chart), "\n".join(rects), "\n".join(names))


def _draw_memory(chart: Chart) -> str:
    most = max(max(curve.values) for curve in chart.curves)
    # A limit far above the curves would flatten them to a line: the heading states it instead.
    shown = chart.limit is not None and chart.limit <= 2.5 * most
    top = 1.08 * max(most, (chart.limit or 0) if shown else 0) or 1.0
    size, unit = scale_bytes(top)
    left, note = _left(chart), "Memory of a device"
    levels = []
    for level in _levels(top):
        y = _MEMORY * (1 - level / top)
        levels.append(f'<line class="across" x1="{left}" x2="{left}" y1="{y:g}" y2="{y:g}"/>')
        levels.append(f'<text x="4" y="{y + 4:g}">{level / size:.3g} {unit}</text>')
    if chart.limit is not None:
        note += f" (it has {format_bytes(chart.limit)})"
        if shown:
            y = _MEMORY * (1 - chart.limit / top)
            levels.append(f'<line class="across limit" x1="{left}" x2="{left}" y1="{y:g}" y2="{y:g}"/>')
    paths, legend = [], []
    for index, curve in enumerate(chart.curves):
        # From blue over green to orange, in even steps, readable on light and on dark.
        colour = f"hsl({220 - 190 * index / max(1, len(chart.curves) - 1):.0f} 65% 50%)"
        tip = f"{escape(curve.name)}: at most {format_bytes(max(curve.values), 4)}"
        paths.append(f'<path stroke="{colour}" data-n="{tip}" d="{"".join(_steps(curve, chart.seconds, top))}"/>')
        legend.append(f'<span><i style="background: {colour}"></i>{escape(curve.name)}</span>')
    drawing = _svg("memory", _MEMORY, left, "\n".join(paths), f'<g class="levels">{"".join(levels)}</g>')
    return f'<h2>{note}</h2>\n<div class="legend">{"".join(legend)}</div>\n{drawing}'


def _levels(top: float) -> list[float]:
    """Return three to six round numbers from 0 to ``top``."""
    power = 10 ** math.floor(math.log10(top))
    step = next(power * factor for factor in (0.2, 0.5, 1.0, 2.0) if top / (power * factor) < 6)
    return [index * step for index in range(int(top / step) + 1)]


def _steps(curve: Curve, seconds: float, top: float) -> Iterator[str]:
    wide = _WIDE / (seconds or 1)
    for index, (time, value) in enumerate(zip(curve.times, curve.values, strict=True)):
        y = _MEMORY * (1 - value / top)
        yield f"H{time * wide:.6f}V{y:.2f}" if index else f"M{time * wide:.6f} {y:.2f}"
    yield f"H{_WIDE:g}"


def _opacity(shade: float) -> str:
    """Return the attribute that lightens a span by ``shade`` on the light ground of its row; empty for none."""
    return f' opacity="{1 - shade:g}"' if shade else ""


def _svg(name: str, bottom: float, left: int, spans: str, fixed: str) -> str:
    return (
        f'<svg id="{name}" height="{bottom + 24:g}" data-bottom="{bottom:g}">\n'
        f'<clipPath class="clip" id="clip-{name}"><rect x="{left}" y="0" width="{_WIDE:g}" height="{bottom:g}"/>'
        f'</clipPath>\n{fixed}\n<g class="ticks"></g>\n'
        f'<g clip-path="url(#clip-{name})"><g class="spans" transform="translate({left},0)">\n{spans}\n</g></g>\n'
        f'<g class="numbers"></g></svg>'
    )
