"""Results that travel together: one node between the calls of several micro-batches and the other stage."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError, ScheduleError
from dapple_tf.graph_passes.ir.text import parse_graph, print_graph
from dapple_tf.graph_passes.passes.send_together import SendTogether
from dapple_tf.graph_passes.passes.verify_pipeline import verify_together
from dapple_tf.graph_passes.schedules.spec import parse_schedule
from tests.graph_passes.builders import assert_graph, graph, refused
from tests.graph_passes.whole import Kind, whole_graph

SCHEDULE = parse_schedule("0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1")

# Stage 0 gives stage 1 a tensor, of which it keeps another one; the loss takes stage 1's forward.
BOTH = "".join(
    """
    %stage0/replica0/mbM/forward = forward() {place} -> (float32[], float32[2])
    %stage1/replica0/mbM/forward = forward(%stage0/replica0/mbM/forward:0) {place} -> (float32[])
    %stage1/replica0/mbM/backward = backward(%stage1/replica0/mbM/forward:0) {place} -> (float32[3])
    %stage0/replica0/mbM/backward = backward(%stage0/replica0/mbM/forward:1, %stage1/replica0/mbM/backward:0) {place}
    | -> (float32[])
    """.replace("M", m)
    for m in "01"
)


def test_activations_and_gradients_travel_together() -> None:
    assert_graph(
        SendTogether(SCHEDULE)(graph(BOTH)),
        """
        %stage0/replica0/mb0/forward = forward() {place} -> (float32[], float32[2])
        %stage0/replica0/mb1/forward = forward() {place} -> (float32[], float32[2])
        %stage0/replica0/mb1/together_forward = together(%stage0/replica0/mb0/forward:0,
        | %stage0/replica0/mb1/forward:0) {place} -> (float32[], float32[])
        %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb1/together_forward:0) {place} -> (float32[])
        %stage1/replica0/mb0/backward = backward(%stage1/replica0/mb0/forward:0) {place} -> (float32[3])
        %stage1/replica0/mb1/forward = forward(%stage0/replica0/mb1/together_forward:1) {place} -> (float32[])
        %stage1/replica0/mb1/backward = backward(%stage1/replica0/mb1/forward:0) {place} -> (float32[3])
        %stage1/replica0/mb1/together_backward = together(%stage1/replica0/mb0/backward:0,
        | %stage1/replica0/mb1/backward:0) {place} -> (float32[3], float32[3])
        %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/forward:1,
        | %stage1/replica0/mb1/together_backward:0) {place} -> (float32[])
        %stage0/replica0/mb1/backward = backward(%stage0/replica0/mb1/forward:1,
        | %stage1/replica0/mb1/together_backward:1) {place} -> (float32[])
        """,
    )


def test_where_no_gradient_leaves_a_stage_none_travel_together() -> None:
    """Stage 0 has no weights that are trained before the boundary, so its backward takes nothing of stage 1."""
    without = BOTH.replace(", %stage1/replica0/mb0/backward:0", "").replace(", %stage1/replica0/mb1/backward:0", "")
    sent = [node.name for node in SendTogether(SCHEDULE)(graph(without)).nodes if node.op == "together"]
    assert sent == ["stage0/replica0/mb1/together_forward"]


def test_a_schedule_of_another_shape_is_refused() -> None:
    with refused(ScheduleError, "the schedule is for (stages, micro-batches) (2, 2), the graph has (2, 1)"):
        SendTogether(SCHEDULE)(graph(BOTH[: len(BOTH) // 2]))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "%stage1/replica0/mb0/forward = forward(%stage0/replica0/mb1/together_forward:0)",
            "%stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0)",
            "'stage0/replica0/mb0/forward' gives 'stage1/replica0/mb0/forward' what leaves stage 0 forward for "
            "micro-batch 0 alone, but the schedule has micro-batches 0, 1 together",
        ),
        (
            "together(%stage1/replica0/mb0/backward:0, %stage1/replica0/mb1/backward:0)",
            "together(%stage1/replica0/mb0/backward:0, %stage1/replica0/mb0/backward:0)",
            "'stage1/replica0/mb1/together_backward' gives 'stage0/replica0/mb0/backward' what leaves stage 1 backward "
            "for micro-batch 0 alone, but the schedule has micro-batches 0, 1 together",
        ),
    ],
)
def test_what_does_not_travel_together_is_refused(old: str, new: str, said: str) -> None:
    whole = SendTogether(SCHEDULE)(graph(BOTH))
    verify_together(whole, SCHEDULE)
    damaged = print_graph(whole).replace(old, new)
    assert damaged != print_graph(whole)
    with refused(GraphError, said):
        verify_together(parse_graph(damaged), SCHEDULE)


@pytest.mark.parametrize(
    ("made_for", "verified", "said"),
    [
        (
            "0F0 0F1 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0+ 1B1 1B2; 2F0 2F1 2F2 2B0 2B1 2B2",
            "0F0 0F1 0F2 0B0 0B1 0B2; 1F0+ 1F1 1F2 1B0 1B1 1B2; 2F0 2F1 2F2 2B0 2B1 2B2",
            "what leaves stage 1 forward for micro-batch 0 alone, but the schedule has micro-batches 0, 1 together",
        ),
        (
            "0F0 0F1 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0+ 1B1 1B2; 2F0 2F1 2F2 2B0 2B1 2B2",
            "0F0 0F1 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0 1B1 1B2; 2F0 2F1 2F2 2B0 2B1 2B2",
            "what leaves stage 1 backward for micro-batches 0, 1 together, but the schedule has micro-batch 1 alone",
        ),
        (
            "0F0+ 0F1+ 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0 1B1 1B2; 2F0 2F1 2F2 2B0 2B1 2B2",
            "0F0 0F1+ 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0 1B1 1B2; 2F0 2F1 2F2 2B0 2B1 2B2",
            "for micro-batches 0, 1, 2 together, but the schedule has micro-batches 1, 2 together",
        ),
    ],
)
def test_a_graph_for_a_schedule_with_other_groups_is_refused(made_for: str, verified: str, said: str) -> None:
    whole = whole_graph(Kind((1, 1, 1), 3, made_for))
    verify_together(whole, parse_schedule(made_for))
    with refused(GraphError, said):
        verify_together(whole, parse_schedule(verified))
