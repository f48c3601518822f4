"""A comparison as a web page of a single file: a table with bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from dapple_tf.drawing.bars import PART_COLOURS, PART_LABELS, BarChart

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #222; --faint: #8885; $colours }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #e4e4e4; --faint: #8886; } }
body { margin: 16px; background: var(--page); color: var(--ink); font: 14px system-ui, sans-serif; }
h1 { font-size: 17px; font-weight: 600; margin: 0 0 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-bottom: 12px; }
.legend i { display: inline-block; width: 14px; height: 14px; margin-right: 5px; vertical-align: -2px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 4px 10px 4px 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
th { font-weight: 600; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; min-width: 14em; overflow-wrap: anywhere; }
td.bar { min-width: 260px; padding-right: 16px; }
td.bar div { display: flex; height: 15px; }
td.bar i { display: block; height: 100%; }
$classes
</style>
</head>
<body>
<h1>$title</h1>
<div class="legend">$legend</div>
<div class="wide">
<table>
<thead><tr>$header</tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>
</body>
</html>
""")


def make_bars_page(chart: BarChart, header: Sequence[str], cells: Sequence[Mapping[str, str]]) -> str:
    """Return the page: a row for each bar, with its name, its ``cells`` by their ``header``, the bar, and its note."""
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
    return _PAGE.substitute(
        title=escape(chart.title),
        colours=" ".join(f"--{part}: {colour};" for part, colour in PART_COLOURS.items()),
        classes="\n".join(f".{part} {{ background: var(--{part}); }}" for part in PART_COLOURS),
        legend="".join(f'<span><i class="{part}"></i>{escape(text)}</span>' for part, text in PART_LABELS.items()),
        header="<th>planner</th><th></th>"
        + "".join(f"<th>{escape(name)}</th>" for name in header)
        + '<th class="text">why</th>',
        rows="\n".join(rows),
    )
