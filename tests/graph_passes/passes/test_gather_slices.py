"""Slices of sparse gradients from all micro-batches, replicas and stages, in the order of one device."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Function
from dapple_tf.graph_passes.passes.gather_slices import GatherSlices, SparsePart, slice_ports
from tests.graph_passes.builders import assert_graph, call_graph, function, refused

ROWS = "slices table float32[_,4], indices table int64[_]"
FIRST = (
    function("stage0/forward", "arg x, variable table, variable w", "boundary h"),
    function("stage0/backward", "gradient h", f"variable w, {ROWS}"),
)
LAST = (
    function("stage1/forward", "boundary h, variable table", "loss loss"),
    function("stage1/backward", "seed loss", f"gradient h, {ROWS.replace('int64', 'int32')}"),
)

CALLS = """
    %loss = merge() -> (float32[])
    %stage0/replica0/mb0/forward = forward() {place}
    %stage0/replica1/mb0/forward = forward() {place}
    %stage0/replica0/mb1/forward = forward() {place}
    %stage0/replica1/mb1/forward = forward() {place}
    %stage1/replica0/mb0/forward = forward() {place}
    %stage1/replica0/mb0/backward = backward() -> (float32[?,4], float32[_,4], int32[_])
    %stage1/replica0/mb1/backward = backward() -> (float32[?,4], float32[_,4], int32[_])
    %stage0/replica0/mb0/backward = backward() -> (float32[4], float32[_,4], int64[_])
    %stage0/replica1/mb0/backward = backward() -> (float32[4], float32[_,4], int64[_])
    %stage0/replica0/mb1/backward = backward() -> (float32[4], float32[_,4], int64[_])
    %stage0/replica1/mb1/backward = backward() -> (float32[4], float32[_,4], int64[_])
    outputs %loss:0
"""
CALLED = CALLS.replace("    outputs %loss:0\n", "")

STAGE0 = SparsePart("table", 9, 1, stage=0, pair=0, combine="concat")
STAGE1 = SparsePart("table", 9, 0, stage=1, pair=0, combine="concat")


def test_slices_come_use_by_use_and_in_sample_order_inside_a_use() -> None:
    """The last stage's use is the first on one device. Its indices are int32, so all become int64."""
    assert_graph(
        GatherSlices((STAGE0, STAGE1))(call_graph(CALLS, *FIRST, *LAST)),
        f"""
        {CALLED}
        %stage0/gather_slices/table = gather_slices(
        |%stage1/replica0/mb0/backward:1, %stage1/replica0/mb0/backward:2,
        | %stage1/replica0/mb1/backward:1, %stage1/replica0/mb1/backward:2,
        | %stage0/replica0/mb0/backward:1, %stage0/replica0/mb0/backward:2,
        | %stage0/replica1/mb0/backward:1, %stage0/replica1/mb0/backward:2,
        | %stage0/replica0/mb1/backward:1, %stage0/replica0/mb1/backward:2,
        | %stage0/replica1/mb1/backward:1, %stage0/replica1/mb1/backward:2)
        | {{pieces=[2, 4], replica=0, rows=9, stage=0, uses=['concat', 'concat'], variable='table'}}
        | -> (float32[_,4], int64[_])
        outputs %loss:0
        """.replace("(\n        |%", "(%"),
    )


def test_stages_that_look_up_the_same_rows_give_one_use() -> None:
    parts = (
        SparsePart("table", 9, 0, stage=0, pair=0, combine="sum"),
        SparsePart("table", 9, 0, stage=1, pair=0, combine="sum"),
    )
    node = GatherSlices(parts)(call_graph(CALLS, *FIRST, *LAST)).node("stage0/gather_slices/table")
    assert node.strings("uses") == ("sum",)
    assert node.integers("pieces") == (6,)


def test_stages_that_look_up_the_same_rows_must_add_them() -> None:
    parts = (
        SparsePart("table", 9, 0, stage=0, pair=0, combine="concat"),
        SparsePart("table", 9, 0, stage=1, pair=0, combine="sum"),
    )
    with refused(GraphError, "stages [0, 1] look up the same rows of 'table', but do not add them"):
        GatherSlices(parts)(call_graph(CALLS, *FIRST, *LAST))


def test_the_part_of_backward_for_weights_gives_the_slices_where_there_is_one() -> None:
    split: tuple[Function, ...] = (
        FIRST[0],
        function("stage0/inputs", "gradient h", "carry c"),
        function("stage0/weights", "carry c", ROWS),
    )
    before = """
        %stage0/replica0/mb0/forward = forward() {place}
        %stage0/replica0/mb0/inputs = inputs() -> (float32[?,4])
        %stage0/replica0/mb0/weights = weights() -> (float32[_,4], int64[_])
    """
    part = SparsePart("table", 9, 0, stage=0, pair=0, combine="concat")
    assert_graph(
        GatherSlices((part,))(call_graph(before, *split)),
        before
        + """
        %stage0/gather_slices/table = gather_slices(%stage0/replica0/mb0/weights:0, %stage0/replica0/mb0/weights:1)
        | {place, pieces=[1], rows=9, uses=['concat'], variable='table'} -> (float32[_,4], int64[_])
        """,
    )


@pytest.mark.parametrize("split", [0, 1])
def test_whole_and_split_backwards_give_their_slices_in_sample_order(split: int) -> None:
    """Of the whole backward the slices are outputs 1 and 2, and of the part for weights 0 and 1."""
    functions: tuple[Function, ...] = (
        FIRST[0],
        function("stage0/backward", "gradient h", f"gradient x, {ROWS}"),
        function("stage0/inputs", "gradient h", "gradient x, carry c"),
        function("stage0/weights", "carry c", ROWS),
    )
    forward = "%stage0/replicaR/mbM/forward = forward() {micro_batch=M, replica=R, stage=0}\n"
    whole = forward + "%stage0/replicaR/mbM/backward = backward() -> (float32[?,4], float32[_,4], int64[_])\n"
    halves = (
        forward
        + """
        %stage0/replicaR/mbM/inputs = inputs() -> (float32[?,4], float32[?,4])
        %stage0/replicaR/mbM/weights = weights() -> (float32[_,4], int64[_])
    """
    )
    calls_of = [halves if m == split else whole for m in (0, 1)]
    before = "".join(calls_of[m].replace("M", str(m)).replace("R", str(r)) for m in (0, 1) for r in (0, 1))
    part = SparsePart("table", 9, 0, stage=0, pair=0, combine="concat")
    gathered = GatherSlices((part,))(call_graph(before, *functions)).node("stage0/gather_slices/table")
    assert [str(value).removeprefix("%stage0/") for value in gathered.inputs] == [
        f"replica{r}/mb{m}/{'weights' if m == split else 'backward'}:{i + (m != split)}"
        for m in (0, 1)
        for r in (0, 1)
        for i in (0, 1)
    ]
    assert gathered.integers("pieces") == (4,)


@pytest.mark.parametrize(
    "parts", [(), (STAGE0,), (STAGE0, STAGE1, SparsePart("table", 9, 2, stage=1, pair=1, combine="sum"))]
)
def test_every_pair_of_slices_and_indices_is_gathered(parts: tuple[SparsePart, ...]) -> None:
    said = "the stages give slices [(0, 0, 'table'), (1, 0, 'table')] (stage, pair, variable), but the pass gathers ["
    with refused(GraphError, said):
        GatherSlices(parts)(call_graph(CALLS, *FIRST, *LAST))


def test_the_ports_of_slices_are_paired_with_those_of_their_indices() -> None:
    two = function("stage0/backward", "", "variable w, slices a, indices a int64[_], slices b, indices b int64[_]")
    assert slice_ports(two) == ((1, 2), (3, 4))
