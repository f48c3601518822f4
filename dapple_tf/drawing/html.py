"""Charts as web pages of a single file: a still picture as SVG. Perfetto zooms into traces."""

from __future__ import annotations

from html import escape
from string import Template

from dapple_tf.drawing.chart import COLOURS, CRITICAL, HEADING, IDLE, LABELS, LATER_STAGES, LIGHTEST, MARK, Chart
from dapple_tf.drawing.page import PAGE_WIDTH, Axis, Plot, build_page, draw_axis
from dapple_tf.drawing.plan import draw_plan
from dapple_tf.profiler.units import format_bytes, format_seconds

_LARGEST = 10_000.0  # width of the time axis, in pixels
_DIGIT = 7.0  # pixels
_GAP = 0.1  # of a row's height, above and below its spans

_STYLE = Template("""\
svg .heading { font-weight: 600; }
.idle { fill: var(--idle); background: var(--idle); }
.spans rect { stroke: var(--page); stroke-width: ${line}px; }
.spans rect.mark { fill: var(--critical); stroke: none; pointer-events: none; }
svg .number { fill: #fff; font-size: 11px; text-anchor: middle; pointer-events: none; }
svg .light { fill: var(--ink); }
$classes""")


def make_page(chart: Chart) -> str:
    """Return the page."""
    classes = [f".{kind} {{ fill: var(--{kind}); background: var(--{kind}); }}" for kind in chart.kinds]
    legend = [f'<span><i class="{kind}"></i>{LABELS[kind]}</span>' for kind in chart.kinds]
    if chart.is_shaded:
        legend.append(f'<span><i class="forward" style="opacity: {1 - LIGHTEST:g}"></i>{LATER_STAGES}</span>')
    if any(row.until for row in chart.rows):
        legend.append('<span><i class="idle"></i>idle</span>')
    if any(span.critical for span in chart.spans):
        legend.append(
            '<span><i style="height: 4px; vertical-align: 3px; background: var(--critical)"></i>critical path</span>'
        )
    wide = chart.width_for_numbers(_DIGIT, 2, (PAGE_WIDTH - 8 - _left(chart), _LARGEST))
    plots = [_draw_rows(chart, wide)]
    if chart.curves:
        plots.append(_draw_memory(chart, wide))
    legends = "\n".join(legend)
    body = [f'<div class="legend">{legends}</div>', '<div class="wide">', *plots, "</div>"]
    if chart.plan is not None:
        body += ["<h2>The plan</h2>", '<div class="wide">', draw_plan(chart.plan), "</div>"]
    line = min(0.8, chart.typical_seconds * wide / (chart.seconds or 1) / 8)  # lines must not hide spans
    return build_page(
        chart.title,
        "\n".join(body),
        _STYLE.substitute(line=f"{line:.3f}", classes="\n".join(classes)),
        {"critical": CRITICAL, "idle": IDLE, **dict(COLOURS.items())},
        {"critical": "#fff", "idle": "#2b2e35"},
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
            light = " light" if span.is_light else ""
            rects.append(f'<text class="number{light}" x="{x + width / 2:.6f}" y="{y:g}">{number}</text>')
    axis = Axis(0.0, chart.seconds, format_seconds)
    return draw_axis(axis, "rows", _left(chart), wide, chart.height * pixels, "\n".join(rects), "\n".join(names))


def _draw_memory(chart: Chart, wide: float) -> str:
    top = 1.08 * chart.most_bytes or 1.0
    note = "Memory of a device"
    if chart.limit is not None:
        note += f" (it has {format_bytes(chart.limit)})"
    plot = Plot(
        "memory",
        Axis(0.0, chart.seconds, format_seconds),
        Axis(0.0, top, lambda count: format_bytes(count, 4)),
        chart.curves,
        limit=chart.drawn_limit,
        stepped=True,
        left=_left(chart),
        wide=wide,
    )
    return f"<h2>{note}</h2>\n{plot.legend()}\n{plot.draw()}"


def _left(chart: Chart) -> int:
    """Return the pixels left of the time axis, for the names of the rows."""
    return 16 + 7 * max(len(row.name) for row in chart.rows)
