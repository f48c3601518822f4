"""The chart of a simulated step: all events, each once."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.drawing.trace import trace_events
from dapple_tf.timeline.picture import make_chart
from dapple_tf.timeline.stage_costs import StageCosts
from tests.dapple_tf.simulator.builders import cost, make_timeline, stage_costs

# The times of test_policy_a_waits_for_the_network_by_hand, with AllReduces of stage 1 from 12 to 15.
TIMELINE = make_timeline("dapple-a", 4, [cost(1, 1, 1, stash_bytes=3), cost(1, 1, exposed_seconds=3)], replicas=(2, 1))


def test_rows_and_spans_by_hand() -> None:
    chart = make_chart(TIMELINE, f"{TIMELINE.title} · {TIMELINE.summary}")
    assert [(row.name, row.detail, row.network) for row in chart.rows] == [
        ("stage 0", "devices 0-1", False),
        ("0 to 1", "activations", True),
        ("1 to 0", "gradients", True),
        ("stage 1", "devices 2", False),
    ]
    rows = defaultdict(list)
    for span in sorted(chart.spans, key=lambda span: span.start):
        rows[span.row].append((span.name, span.start, span.end))
    assert [name for name, _, _ in rows[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert rows[1] == [("0>1 F0", 1, 2), ("0>1 F1", 2, 3), ("0>1 F2", 7, 8), ("0>1 F3", 9, 10)]
    assert [(start, end) for _, start, end in rows[2]] == [(4, 5), (6, 7), (10, 11), (12, 13)]
    assert rows[3][-1] == ("AllReduce", 12, 15)
    assert (chart.seconds, chart.limit) == (15, 1000)
    assert chart.title == "net: dapple-a, M = 4 · 15 s, bubble 46.7%, speed-up 6.67"
    assert chart.curves[0].values == (0, 3, 6, 3, 6, 3, 6, 3, 0)


def test_weight_gradients_of_a_simulated_step_have_spans_of_their_own() -> None:
    timeline = make_timeline("zb-h1", 2, [cost(1, 2, weights_seconds=1)] * 2)
    chart = make_chart(timeline)
    spans = sorted((span.start, span.name, span.kind) for span in chart.spans if span.row == 1)
    assert spans == [
        (1, "1F0", "forward"),
        (2, "1I0", "inputs"),
        (3, "1F1", "forward"),
        (4, "1I1", "inputs"),
        (5, "1W0", "weights"),
        (6, "1W1", "weights"),
    ]
    assert chart.kinds == ("forward", "inputs", "weights")
    assert timeline.actions(1) == "1F0 1I0 1F1 1I1 1W0 1W1"
    assert [stage["weights_seconds"] for stage in timeline.to_json()["stages"]] == [1, 1]


def test_a_mixed_schedule_has_spans_of_all_kinds() -> None:
    timeline = make_timeline("0F0 0F1 0B0 0B1; 1F0 1I0 1F1 1B1 1W0", 2, [cost(1, 2, weights_seconds=1)] * 2)
    chart = make_chart(timeline)
    spans = sorted((span.start, span.end, span.name, span.kind) for span in chart.spans if span.row == 1)
    assert spans == [
        (1, 2, "1F0", "forward"),
        (2, 3, "1I0", "inputs"),
        (3, 4, "1F1", "forward"),
        (4, 6, "1B1", "backward"),
        (6, 7, "1W0", "weights"),
    ]
    assert chart.kinds == ("forward", "backward", "inputs", "weights")
    stages = timeline.to_json()["stages"]
    assert [stage.get("weights_seconds") for stage in stages] == [None, 1]  # stage 0 splits no backward
    assert [stage["backward_seconds"] for stage in stages] == [2, 2]


def test_transfers_have_rows_only_where_they_take_time() -> None:
    chart = make_chart(make_timeline("gpipe", 2, [cost(1, 1), cost(1, 1, 0, 1), cost(1, 1)]))
    assert [row.name for row in chart.rows] == ["stage 0", "stage 1", "2 to 1", "stage 2"]


@given(st.sampled_from(["gpipe", "dapple-a", "dapple-b"]), st.integers(1, 6), st.data())
def test_spans_of_a_row_do_not_overlap_and_the_critical_ones_are_the_path(
    name: str, m: int, data: st.DataObject
) -> None:
    costs: tuple[StageCosts, ...] = data.draw(st.integers(1, 4).flatmap(stage_costs))
    timeline = make_timeline(name, m, costs)
    chart = make_chart(timeline)
    for row in range(len(chart.rows)):
        spans = sorted((span.start, span.end) for span in chart.spans if span.row == row)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert spans[-1][1] <= chart.seconds
    path = {str(part).removesuffix(f" of stage {part.stage}") for part in timeline.critical_path}
    assert {span.name for span in chart.spans if span.critical} == path
    events = [event for event in trace_events(chart)["traceEvents"] if event["ph"] == "X"]
    computed = [event for event in events if event["cat"] in ("forward", "backward")]
    assert len(computed) == 2 * m * len(costs)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
