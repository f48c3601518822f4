"""Charts as traces, pages and PNGs; tests/dapple_tf/timeline/test_picture.py looks at PNGs too."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from dapple_tf.drawing.chart import COLOURS, IDLE, LABELS, LATER_STAGES, LIGHTEST, Chart, Curve, Row, Span, stack_charts
from dapple_tf.drawing.html import make_page
from dapple_tf.drawing.save import save_chart
from dapple_tf.drawing.trace import trace_events
from tests.dapple_tf.timeline.test_picture import chunks

CHART = Chart(
    title="one & <two>",
    seconds=4.0,
    rows=(Row("stage 0", "devices 0-1"), Row("0 to 1", "activations", network=True), Row("stage 1")),
    spans=(
        Span(0, "0F0", "forward", 0.0, 1.0, 0, critical=True),
        Span(1, "0>1 F0", "send-forward", 1.0, 1.5, 0),
        Span(2, "1B0", "backward", 1.5, 3.5, 0),
        Span(2, "1 AllReduce", "allreduce", 3.5, 4.0),
    ),
    curves=(Curve("stage 0", (0.0, 1.0), (1e6, 3e6)), Curve("stage 1", (0.0, 1.5), (1e6, 2e6))),
    limit=4e6,
)


def test_rows_have_their_upper_edges_below_one_another() -> None:
    assert list(CHART.tops()) == [0, 1, 1.3]
    assert CHART.height == pytest.approx(2.3)
    assert CHART.kinds == ("forward", "backward", "send-forward", "allreduce")


def test_charts_are_stacked_on_one_axis() -> None:
    short = Chart("1 s", 1.0, (Row("stage 0", until=1.0),), (Span(0, "0F0", "forward", 0.0, 1.0, 0),))
    stacked = stack_charts("both", (("predicted", short), ("measured", CHART)))
    assert (stacked.title, stacked.seconds, stacked.curves) == ("both", 4, ())
    assert [(row.group, row.name) for row in stacked.rows] == [
        ("predicted", "stage 0"),
        ("measured", "stage 0"),
        ("measured", "0 to 1"),
        ("measured", "stage 1"),
    ]
    assert [span.row for span in stacked.spans] == [0, 1, 2, 3, 3]
    assert stacked.headings == (("predicted: 1 s", 0), ("measured: one & <two>", pytest.approx(1.8)))
    assert list(stacked.tops()) == pytest.approx([0.8, 2.6, 3.6, 3.9])
    assert stacked.height == pytest.approx(4.9)
    names = [e["args"]["name"] for e in trace_events(stacked)["traceEvents"] if e["name"] == "process_name"]
    assert names == ["predicted: stages", "measured: stages", "measured: network"]
    places = [(e["pid"], e["tid"]) for e in trace_events(stacked)["traceEvents"] if e["ph"] == "X"]
    assert places == [(1, 4), (2, 5), (3, 6), (2, 7), (2, 7)]
    page = Page(make_page(stacked))
    (idle,) = [rect for rect in page.named("rect") if rect.get("class") == "idle"]
    end = max(
        float(rect["x"] or 0) + float(rect["width"] or 0) for rect in page.named("rect") if rect["class"] in LABELS
    )
    assert (float(idle["x"] or 1), float(idle["width"] or 0)) == (0, pytest.approx(end / 4))
    assert len([text for text in page.named("text") if text.get("class") == "heading"]) == 2


def test_a_trace_has_processes_threads_spans_and_counters() -> None:
    trace = trace_events(CHART)
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    named = [(e["name"], e["pid"], e["tid"], e["args"]) for e in events if e["ph"] == "M"]
    assert [entry for entry in named if "sort" not in entry[0]] == [
        ("process_name", 1, 0, {"name": "stages"}),
        ("process_name", 2, 0, {"name": "network"}),
        ("thread_name", 1, 3, {"name": "stage 0 (devices 0-1)"}),
        ("thread_name", 2, 4, {"name": "0 to 1 (activations)"}),
        ("thread_name", 1, 5, {"name": "stage 1"}),
    ]
    assert [
        (e["name"], e["cat"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"
    ] == [
        ("0F0", "forward", 1, 3, 0, 1e6, {"kind": "forward", "micro_batch": 0, "critical": True}),
        ("0>1 F0", "send-forward", 2, 4, 1e6, 5e5, {"kind": "send forward", "micro_batch": 0}),
        ("1B0", "backward", 1, 5, 1.5e6, 2e6, {"kind": "backward", "micro_batch": 0}),
        ("1 AllReduce", "allreduce", 1, 5, 3.5e6, 5e5, {"kind": "AllReduce"}),
    ]
    assert [(e["name"], e["pid"], e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [
        ("memory stage 0", 1, 0, {"bytes": 1e6}),
        ("memory stage 0", 1, 1e6, {"bytes": 3e6}),
        ("memory stage 1", 1, 0, {"bytes": 1e6}),
        ("memory stage 1", 1, 1.5e6, {"bytes": 2e6}),
    ]


class Page(HTMLParser):
    """Tags that were opened, and those left open; void ones aside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.titles: list[str] = []
        self.numbers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["title"]:
            self.titles.append(data)
        if self.open[-1:] == ["text"] and self.seen[-1][1].get("class") == "number":
            self.numbers.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for seen, attributes in self.seen if seen == tag]


def test_a_page_draws_every_span_at_its_time_and_row() -> None:
    page = Page(make_page(CHART))
    assert page.open == []
    spans = [rect for rect in page.named("rect") if rect.get("class") in LABELS]
    assert [s["class"] for s in spans] == ["forward", "send-forward", "backward", "allreduce"]
    starts, widths = ([float(s[name] or 0) for s in spans] for name in ("x", "width"))
    end = starts[-1] + widths[-1]  # of the axis of 4 s
    assert starts == pytest.approx([0, end / 4, end * 3 / 8, end * 7 / 8])
    assert widths == pytest.approx([end / 4, end / 8, end / 2, end / 8])
    assert page.titles[1:] == [
        "stage 0: devices 0-1",
        "stage 1",
        "0F0 (forward)\n0 s to 1 s\ntakes 1 s",
        "0>1 F0 (send forward)\n1 s to 1.5 s\ntakes 500 ms",
        "1B0 (backward)\n1.5 s to 3.5 s\ntakes 2 s",
        "1 AllReduce (AllReduce)\n3.5 s to 4 s\ntakes 500 ms",
        "stage 0: at most 3 MB",
        "stage 1: at most 2 MB",
    ]
    assert page.numbers == ["0", "0"]  # in the stages' rows alone
    heights = [(float(s["y"] or 0), float(s["height"] or 0)) for s in spans]
    assert heights[0][0] + heights[0][1] < heights[1][0] < heights[2][0] == heights[3][0]
    (mark,) = [rect for rect in page.named("rect") if rect.get("class") == "mark"]
    assert (mark["x"], mark["width"]) == (spans[0]["x"], spans[0]["width"])
    assert heights[0][0] < float(mark["y"] or 0) < sum(heights[0])
    assert len(page.named("path")) == 2


def test_a_page_loads_no_other_file() -> None:
    text = make_page(CHART)
    assert not re.search(r"\b(src|href)\s*=|@import|url\((?!#)|fetch\(|XMLHttpRequest", text)
    assert "http" not in text
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text


def test_numbers_on_light_spans_are_dark_and_the_legend_explains_the_shade() -> None:
    spans = (Span(0, "0F0", "forward", 0.0, 1.0, 0), Span(0, "2F0", "forward", 1.0, 2.0, 0, shade=LIGHTEST))
    text = make_page(Chart("two stages", 2.0, (Row("stages 0,2", until=2.0),), spans))
    assert re.findall(r'<text class="(number[ a-z]*)"', text) == ["number", "number light"]
    assert text.count(LATER_STAGES) == 1
    assert LATER_STAGES not in make_page(CHART)


def test_transfers_look_like_no_shade_of_an_action() -> None:
    """Nor like the idle times, or each other; the distances are Euclidean, of red, green and blue from 0 to 1."""
    sends = np.array([to_rgb(COLOURS["send-forward"]), to_rgb(COLOURS["send-backward"])])
    others = [np.array(to_rgb(COLOURS[kind])) for kind in LABELS if not kind.startswith("send")]
    shades = [(1 - shade) * colour + shade for colour in others for shade in np.linspace(0, LIGHTEST, 12)]
    for seen in (*shades, to_rgb(IDLE)):
        assert np.linalg.norm(sends - seen, axis=1).min() > 0.2
    assert np.linalg.norm(sends[0] - sends[1]) > 0.2


def test_a_page_escapes_names() -> None:
    text = make_page(CHART)
    assert "<h1>one &amp; &lt;two&gt;</h1>" in text
    assert "<two>" not in text


def test_a_limit_far_above_the_curves_is_stated_and_not_drawn() -> None:
    near = make_page(CHART)
    far = make_page(Chart(CHART.title, 4.0, CHART.rows, CHART.spans, CHART.curves, 1e9))
    assert near.count('class="limit"') == 1
    assert far.count('class="limit"') == 0
    assert "Memory of a device (it has 4 MB)" in near
    assert "Memory of a device (it has 1 GB)" in far


def size_of(path: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", chunks(path.read_bytes())[0][1][:8])
    return width, height


def test_a_png_is_larger_where_more_is_drawn(tmp_path: Path) -> None:
    bare = Chart("", 4.0, CHART.rows, CHART.spans)
    many = Chart("", 4.0, CHART.rows, tuple(Span(0, "x", "forward", i / 50, (i + 1) / 50, i) for i in range(200)))
    for name, chart in (("bare", bare), ("memory", CHART), ("many", many)):
        save_chart(chart, tmp_path / f"{name}.png")
    bare_size, memory_size, many_size = (size_of(tmp_path / f"{name}.png") for name in ("bare", "memory", "many"))
    assert memory_size[0] == bare_size[0]
    assert memory_size[1] > bare_size[1] + 200
    assert 1.5 * bare_size[0] < many_size[0] < 2800  # two screens at most


def test_a_legend_of_all_kinds_does_not_narrow_the_rows(tmp_path: Path) -> None:
    kinds = tuple(LABELS)
    spans = tuple(Span(0, kind, kind, float(i), i + 1.0, critical=True) for i, kind in enumerate(kinds))
    save_chart(Chart("all", float(len(kinds)), (Row("stage 0", until=8.0),), spans), tmp_path / "t.png")
    picture = imread(tmp_path / "t.png")
    coloured = np.abs(picture[:, :, :3] - to_rgb(COLOURS[kinds[-1]])).max(2) < 0.01
    middle = picture.shape[0] // 2  # below the legend
    assert np.flatnonzero(coloured[middle:].any(0)).max() > 0.95 * picture.shape[1]


@pytest.mark.parametrize("suffix", ["png", "html", "json"])
@pytest.mark.parametrize("curves", [(), (Curve("stage 0", (0.0,), (0.0,)),)])
def test_a_step_that_takes_no_time_can_be_drawn(tmp_path: Path, suffix: str, curves: tuple[Curve, ...]) -> None:
    chart = Chart("nothing", 0.0, (Row("stage 0"),), (Span(0, "0F0", "forward", 0.0, 0.0, 0),), curves, 0.0)
    save_chart(chart, tmp_path / f"t.{suffix}")
    assert (tmp_path / f"t.{suffix}").stat().st_size > 0
    assert "NaN" not in json.dumps(trace_events(chart))
