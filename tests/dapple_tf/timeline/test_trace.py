"""Traces as viewers read them: threads whose spans do not overlap, and arrows that end inside of spans."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.drawing.chart import Chart, Row, Span, chain_charts
from dapple_tf.drawing.trace import trace_events
from dapple_tf.errors import TraceError
from dapple_tf.timeline.events import MemoryCurve, Transfer
from dapple_tf.timeline.figures import EarlierStep
from dapple_tf.timeline.picture import draw_trace, save_recording
from dapple_tf.timeline.recording import BY_TIMES, Prediction, Recording
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.timeline.trace_file import read_recording
from tests.dapple_tf.builders import X, chain, step_of
from tests.dapple_tf.simulator.builders import cost, make_timeline, stage_costs
from tests.dapple_tf.timeline.test_timeline import TWO, events


class Viewer:
    """A trace as Perfetto reads it: whole nanoseconds, spans of a thread without overlap, flows bound to spans."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = trace["traceEvents"]
        self.threads: dict[int, str] = {e["tid"]: e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        self.spans: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
        for e in self.of("X"):
            start = self.cut(e["ts"])
            self.spans[e["pid"], e["tid"]].append((start, start + self.cut(e["dur"]), e["name"]))
        for spans in self.spans.values():
            spans.sort()
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
        starts, finishes = self.by_id("s"), self.by_id("f")
        assert starts.keys() == finishes.keys()
        assert all(starts[flow]["ts"] <= finishes[flow]["ts"] for flow in starts)
        assert all(finish["bp"] == "e" for finish in finishes.values())
        self.flows = [(self.enclosing(starts[flow]), self.enclosing(finishes[flow])) for flow in starts]

    def of(self, phase: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["ph"] == phase]

    def by_id(self, phase: str) -> dict[int, dict[str, Any]]:
        found = {e["id"]: e for e in self.of(phase)}
        assert len(found) == len(self.of(phase))
        return found

    @staticmethod
    def cut(microseconds: float) -> int:
        return int(microseconds * 1000)

    def enclosing(self, flow: dict[str, Any]) -> str:
        """The one span of the flow's thread at its time."""
        time = self.cut(flow["ts"])
        (name,) = [name for a, b, name in self.spans[flow["pid"], flow["tid"]] if a <= time < b]
        return name


def view(recording: Recording) -> Viewer:
    return Viewer(trace_events(draw_trace(recording)))


def test_arrows_go_from_stage_to_stage_through_the_transfers() -> None:
    timeline = make_timeline("gpipe", 1, [cost(1, 2, 0.5, 0.5), cost(1, 2)])
    assert sorted(view(Recording("", timeline)).flows) == [
        ("0>1 F0", "1F0"),
        ("0F0", "0>1 F0"),
        ("1>0 B0", "0B0"),
        ("1B0", "1>0 B0"),
    ]


def test_without_transfers_arrows_go_from_action_to_action() -> None:
    assert sorted(view(Recording("", TWO)).flows) == [("0F0", "1F0"), ("1B0", "0B0")]


def test_a_transfer_too_short_to_be_drawn_does_not_interrupt_an_arrow() -> None:
    short = Timeline(TWO.events, (Transfer(0, 1, 0, 1.0, 1.0 + 1e-9),))
    assert sorted(view(Recording("", short)).flows) == [("0F0", "1F0"), ("1B0", "0B0")]


def test_by_clocks_that_differ_an_arrow_starts_when_the_second_action_does_or_is_left_out() -> None:
    skewed = events("0F0 0-2, 1F0 1-3, 1B0 5-6, 0B0 4-5")
    assert view(Recording("", Timeline(skewed))).flows == [("0F0", "1F0")]


def test_spans_that_overlap_are_on_threads_of_their_own() -> None:
    spans = (
        Span(0, "0B0", "backward", 0.0, 2.0, 0),
        Span(0, "AllReduce", "allreduce", 1.0, 3.0),
        Span(0, "0B1", "backward", 2.0, 4.0, 1),
        Span(1, "1F0", "forward", 0.0, 1.0, 0),
    )
    viewer = Viewer(trace_events(Chart("", 4.0, (Row("stage 0"), Row("stage 1")), spans)))
    assert viewer.threads == {2: "stage 0", 3: "stage 0 (2)", 4: "stage 1"}
    assert [[name for _, _, name in spans] for _, spans in sorted(viewer.spans.items())] == [
        ["0B0", "0B1"],
        ["AllReduce"],
        ["1F0"],
    ]


def test_processes_and_threads_are_in_the_order_of_the_chart_and_none_is_number_0() -> None:
    recording = Recording("", TWO, Prediction(make_timeline("gpipe", 2, [cost(1, 2, 0.5, 0.5)] * 2), BY_TIMES))
    trace = trace_events(draw_trace(recording))
    names = [(e["ph"], e["name"], e["pid"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "M"]
    assert [args["name"] for _, name, _, args in names if name == "process_name"] == [
        "predicted: stages",
        "predicted: network",
        "measured: stages",
    ]
    for what in ("process", "thread"):
        indices = [args["sort_index"] for _, name, _, args in names if name == f"{what}_sort_index"]
        assert indices == sorted(set(indices))
        assert indices[0] > 0


@given(st.sampled_from(["gpipe", "dapple-a", "dapple-b"]), st.integers(1, 5), st.data())
def test_any_simulated_step_can_be_viewed(name: str, m: int, data: st.DataObject) -> None:
    costs: tuple[StageCosts, ...] = data.draw(st.integers(1, 4).flatmap(stage_costs))
    viewer = view(Recording("", make_timeline(name, m, costs)))
    taken = {second for _, second in viewer.flows}
    forwards = [n for spans in viewer.spans.values() for a, b, n in spans if n[1] == "F" and n[0] != "0" and b > a]
    timed = all(c.forward_seconds >= 1e-9 for c in costs)  # a trace counts nanoseconds
    assert not timed or taken.issuperset(name for name in forwards if ">" not in name)


# --- several steps, and memory


STEPS = Timeline(
    TWO.events,
    earlier=[EarlierStep(20.0, TWO), EarlierStep(10.0, TWO)],
    memory_curves=[MemoryCurve("CPU", (0.0, 2.0), (5.0, -1.0))],
)


def test_steps_recorded_before_are_on_the_same_rows_at_their_own_times() -> None:
    viewer = view(Recording("", STEPS))
    assert list(viewer.threads.values()) == ["stage 0 (/device:CPU:0)", "stage 1 (/device:CPU:1)"]
    assert [(start / 1e9, name) for start, _, name in viewer.spans[1, 2]] == [
        (0, "0F0"),
        (4, "0B0"),
        (10, "0F0"),
        (14, "0B0"),
        (20, "0F0"),
        (24, "0B0"),
    ]
    assert len(viewer.flows) == 6
    counters = [(e["name"], e["ts"], e["args"]["bytes"]) for e in viewer.of("C")]
    assert counters == [("memory measured, CPU", 20e6, 5.0), ("memory measured, CPU", 22e6, -1.0)]


def test_the_prediction_stands_above_the_last_step() -> None:
    viewer = view(Recording("", STEPS, Prediction(TWO, BY_TIMES)))
    assert [start / 1e9 for start, _, _ in viewer.spans[1, 3]] == [20, 24]
    assert [start / 1e9 for start, _, _ in viewer.spans[2, 5]] == [0, 4, 10, 14, 20, 24]


def test_a_row_that_only_an_earlier_step_has_is_added() -> None:
    last = Chart("", 1.0, (Row("a"),), (Span(0, "0F0", "forward", 0.0, 1.0),))
    first = Chart("", 1.0, (Row("b"), Row("a")), (Span(0, "1F0", "forward", 0.0, 1.0),), arrows=((0, 0),))
    found = chain_charts(last, [(3.0, first)])
    assert [row.name for row in found.rows] == ["a", "b"]
    assert [(span.row, span.start) for span in found.spans] == [(1, 0), (0, 3)]
    assert (found.seconds, found.arrows) == (4, ((0, 0),))


def test_earlier_steps_and_memory_are_read_again(tmp_path: Path) -> None:
    save_recording(Recording("", STEPS), tmp_path / "t.json")
    measured = read_recording(tmp_path / "t.json").measured
    assert isinstance(measured, Timeline)
    assert measured == STEPS
    assert (measured.earlier, measured.memory_curves) == (STEPS.earlier, STEPS.memory_curves)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("earlier", [{"seconds": 1e10, "timeline": None}], r"earlier\[0\]\.timeline is None, not an object"),
        ("memory_curves", [{"device": "CPU", "times": [0.0], "values": []}], r"curves\[0\] has 1 time and 0 values"),
        ("memory_curves", [{"device": "CPU", "times": [1.0, 0.0], "values": [1, 2]}], r"times are not ascending, or"),
    ],
)
def test_the_error_for_damaged_steps_and_memory_names_the_field(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    save_recording(Recording("", STEPS), tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    data["dapple"][field] = value
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(TraceError, match=message):
        read_recording(tmp_path / "t.json")


def test_an_earlier_step_at_an_impossible_time_is_refused(tmp_path: Path) -> None:
    far = Timeline(TWO.events, earlier=[dataclasses.replace(STEPS.earlier[0], seconds=1e10)])
    save_recording(Recording("", far), tmp_path / "t.json")
    with pytest.raises(TraceError, match=r"earlier\[0\]\.seconds is 1e\+10, more than 1e\+09 seconds"):
        read_recording(tmp_path / "t.json")


def test_recorded_steps_follow_one_another_with_the_memory_that_was_measured(tmp_path: Path) -> None:
    _, loss = chain(3)
    step: dapple.PipelinedStep = step_of(loss)
    for _ in range(10):
        step.record(X)
    timeline = step.timeline
    assert len(timeline.earlier) == 7
    ends = [*(earlier.seconds for earlier in timeline.earlier), 0.0]
    for earlier, after in zip(timeline.earlier, ends[1:], strict=True):
        assert earlier.seconds - earlier.timeline.seconds >= after, "a step ends before the next one begins"
    (curve,) = timeline.memory_curves
    assert (curve.device, curve.times[0]) == ("CPU", 0.0)
    assert curve.times[-1] <= timeline.seconds
    timeline.save(tmp_path / "t.json")
    viewer = Viewer(json.loads((tmp_path / "t.json").read_text()))
    assert len([name for spans in viewer.spans.values() for _, _, name in spans if name == "1F0"]) == 8
    assert viewer.of("C")
