"""DAPPLE's Fig. 3 and Fig. 11, typed in by hand from what sections III and V.C say of them.

The text gives Fig. 3 no size; here it has three stages and five micro-batches.
"""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.passes.order import Order
from dapple_tf.graph_passes.schedules.schedule import Schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.graph_passes.builders import graph

# III.A: "injects them into the pipeline concurrently".
FIGURE_3_A = """
0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4
1F0 1F1 1F2 1F3 1F4 1B0 1B1 1B2 1B3 1B4
2F0 2F1 2F2 2F3 2F4 2B0 2B1 2B2 2B3 2B4
"""

# III.B: "inject K micro-batches (K < M) at the beginning", then "one FW of a micro-batch followed by one BW strictly".
FIGURE_3_B = """
0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4
"""


@pytest.mark.parametrize(("name", "table"), [("gpipe", FIGURE_3_A), ("dapple-a", FIGURE_3_B)])
def test_figure_3_in_the_order_of_each_stage(name: str, table: str) -> None:
    assert str(ScheduleSpec.parse(name).build(3, 5)) == table.strip()


# III.B: in DAPPLE the memory grows "until K micro-batches are injected", and what a backward frees "can be reused by
# the next injected micro-batch"; GPipe's "increases continuously".
@pytest.mark.parametrize(
    ("name", "stashed"),
    [
        ("gpipe", ["1 2 3 4 5 4 3 2 1 0"] * 3),
        ("dapple-a", ["1 2 3 2 3 2 3 2 1 0", "1 2 1 2 1 2 1 2 1 0", "1 0 1 0 1 0 1 0 1 0"]),
        # V.C: policy B has K_i = 2 (S - i) - 1.
        ("dapple-b", ["1 2 3 4 5 4 3 2 1 0", "1 2 3 2 3 2 3 2 1 0", "1 0 1 0 1 0 1 0 1 0"]),
        # And never more than D: the memory of three micro-batches.
        ("dapple-b:D=3", ["1 2 3 2 3 2 3 2 1 0", "1 2 3 2 3 2 3 2 1 0", "1 0 1 0 1 0 1 0 1 0"]),
    ],
)
def test_the_micro_batches_in_flight_after_each_action(name: str, stashed: list[str]) -> None:
    assert count_stashes(ScheduleSpec.parse(name).build(3, 5)) == stashed


def test_only_the_stash_of_gpipe_grows_with_the_micro_batches() -> None:
    most = {name: [] for name in ("gpipe", "dapple-a", "dapple-b")}
    for name, found in most.items():
        for micro_batches in (5, 16):
            counts = count_stashes(ScheduleSpec.parse(name).build(3, micro_batches))
            found.append([max(map(int, line.split())) for line in counts])
    assert most["gpipe"] == [[5, 5, 5], [16, 16, 16]]
    assert most["dapple-a"] == [[3, 2, 1], [3, 2, 1]]
    assert most["dapple-b"] == [[5, 3, 1], [5, 3, 1]]


def count_stashes(schedule: Schedule) -> list[str]:
    """A line for each stage: the micro-batches in flight after each action."""
    lines = []
    for actions in schedule.stages:
        held, counts = 0, []
        for action in actions:
            held += 1 if action.kind == "F" else -1
            counts.append(str(held))
        lines.append(" ".join(counts))
    return lines


# The solid arrows of Fig. 11: what a micro-batch (M) takes from its neighbour stage, and from its own forward.
DATA = """
    %stage0/replica0/mbM/forward = forward() {micro_batch=M, replica=0, stage=0} -> (float32[], float32[])
    %stage1/replica0/mbM/forward = forward(%stage0/replica0/mbM/forward:0)
    | {micro_batch=M, replica=0, stage=1} -> (float32[])
    %stage1/replica0/mbM/backward = backward(%stage1/replica0/mbM/forward:0)
    | {micro_batch=M, replica=0, stage=1} -> (float32[])
    %stage0/replica0/mbM/backward = backward(%stage1/replica0/mbM/backward:0, %stage0/replica0/mbM/forward:1)
    | {micro_batch=M, replica=0, stage=0} -> (float32[])
"""


# Fig. 11, the dotted arrows. V.C: (a) "is not necessary when there is only one micro-batch"; (b) "between B0 and F1 in
# stage 1" and "between F0 and F1 in stage 0"; (c) "is the same". Where the figure trusts to chance on stage 0, whose
# B0 may come before F1 and B1 before B0, there is an edge here too.
@pytest.mark.parametrize(
    ("micro_batches", "drawn", "more"),
    [
        (1, set(), set()),
        (2, {"0F1 after 0F0", "1F1 after 1B0"}, {"0B0 after 0F1", "0B1 after 0B0"}),
        (
            3,
            {"0F1 after 0F0", "1F1 after 1B0", "0F2 after 0B0", "1F2 after 1B1"},
            {"0B0 after 0F1", "0B1 after 0F2", "0B2 after 0B1"},
        ),
    ],
)
def test_figure_11(micro_batches: int, drawn: set[str], more: set[str]) -> None:
    data = graph("".join(DATA.replace("M", str(m)) for m in range(micro_batches)))
    ordered = Order(ScheduleSpec.parse("dapple-a").build(2, micro_batches))(data)
    edges = [control.reason.removeprefix("order: ") for node in ordered.nodes for control in node.controls]
    assert set(edges) == drawn | more
    assert len(edges) == len(drawn | more)
