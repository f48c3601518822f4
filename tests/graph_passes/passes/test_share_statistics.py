"""The first replica of a stage computes statistics of the whole batch, and its other replicas take them."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.project import Project
from dapple_tf.graph_passes.passes.share_statistics import ShareStatistics
from dapple_tf.graph_passes.passes.verify_ranks import verify_ranks
from tests.graph_passes.builders import assert_graph, call_graph, function, functions_of

FORWARD = function("stage0/forward", "arg x, once %count:0 float32[], once %draw:0 int64[]", "loss loss")
COUNT = """
    function stage0/run_once
    takes arg float32[?,4] 'mask' as %arg/0
    takes variable resource[] 'v' as %variable/1
    takes variable resource[] 'seed' as %variable/2
    gives once float32[] '%count:0' from %count:0
    gives once int64[] '%draw:0' from %draw:0
      %scale = ReadVariableOp(%variable/1:0) -> (float32[]) !read
      %sum = Sum(%arg/0:0) -> (float32[])
      %count = Mul(%sum:0, %scale:0) -> (float32[])
      %draw = ReadVariableOp(%variable/2:0) -> (int64[]) !read
      %next = Add(%draw:0) -> (int64[])
      %write = AssignVariableOp(%variable/2:0, %next:0) {writes=['seed']} !write
      end
"""
TWO = """
    inputs %x %mask
    %x = input() -> (float32[?,4])
    %mask = input() -> (float32[?,4])
    %stage0/replica0/run_once = run_once(%mask:0) {call} -> (float32[], int64[])
    %stage0/replica0/mb0/forward = forward(%x:0, %stage0/replica0/run_once:0, %stage0/replica0/run_once:1) {call}
    | -> (float32[]) ^%stage0/replica0/run_once 'once'
    %stage0/replica1/run_once = run_once(%mask:0) {call} -> (float32[], int64[])
    %stage0/replica1/mb0/forward = forward(%x:0, %stage0/replica1/run_once:0, %stage0/replica1/run_once:1) {call}
    | -> (float32[]) ^%stage0/replica1/run_once 'once'
    %loss = merge(%stage0/replica0/mb0/forward:0, %stage0/replica1/mb0/forward:0) {kind='sum'} -> (float32[])
    outputs %loss:0
"""


def two_replicas(once: str = COUNT) -> Graph:
    return call_graph(TWO, FORWARD, *functions_of(once))


def test_the_first_replica_computes_statistics_and_each_what_does_not_depend_on_rows() -> None:
    result = run_passes(two_replicas(), [ShareStatistics()])
    assert_graph(
        result,
        """
        inputs %x %mask
        %x = input() -> (float32[?,4])
        %mask = input() -> (float32[?,4])
        %stage0/replica0/batch_statistics = run_once(%mask:0) {place, function='stage0/batch_statistics'} -> (float32[])
        %stage0/replica0/run_once = run_once() {call} -> (int64[])
        %stage0/replica0/mb0/forward = forward(%x:0, %stage0/replica0/batch_statistics:0, %stage0/replica0/run_once:0)
        | {call} -> (float32[]) ^%stage0/replica0/batch_statistics 'once' ^%stage0/replica0/run_once 'once'
        %stage0/replica1/run_once = run_once() {call} -> (int64[])
        %stage0/replica1/mb0/forward = forward(%x:0, %stage0/replica0/batch_statistics:0, %stage0/replica1/run_once:0)
        | {call} -> (float32[]) ^%stage0/replica1/run_once 'once'
        %loss = merge(%stage0/replica0/mb0/forward:0, %stage0/replica1/mb0/forward:0) {kind='sum'} -> (float32[])
        outputs %loss:0
        """,
    )
    assert [f for f in result.functions if f.name != "stage0/forward"] == list(
        functions_of("""
    function stage0/run_once
    takes variable resource[] 'seed' as %variable/0
    gives once int64[] '%draw:0' from %draw:0
      %draw = ReadVariableOp(%variable/0:0) -> (int64[]) !read
      %next = Add(%draw:0) -> (int64[])
      %write = AssignVariableOp(%variable/0:0, %next:0) {writes=['seed']} !write
      end
    function stage0/batch_statistics
    takes arg float32[?,4] 'mask' as %arg/1
    takes variable resource[] 'v' as %variable/0
    gives once float32[] '%count:0' from %count:0
      %scale = ReadVariableOp(%variable/0:0) -> (float32[]) !read
      %sum = Sum(%arg/1:0) -> (float32[])
      %count = Mul(%sum:0, %scale:0) -> (float32[])
      end
    """)
    )


def test_a_rank_receives_statistics_in_an_exchange_of_their_own() -> None:
    shared = ShareStatistics()(two_replicas())
    graphs = [Project(((0, 1),), rank)(shared) for rank in (0, 1)]
    verify_ranks(graphs)
    name = "exchange/run_once/stage0"
    assert (graphs[0].node(name).integers("to"), graphs[1].node(name).integers("source")) == ((1,), (0,))
    assert "mask" in {value.node for node in graphs[0].nodes for value in node.inputs}
    assert "mask" not in {value.node for node in graphs[1].nodes for value in node.inputs}


@pytest.mark.parametrize(
    "once",
    [
        COUNT.replace("%next = Add(%draw:0)", "%next = Add(%draw:0, %count:0)"),
        COUNT.replace("ReadVariableOp(%variable/1:0)", "ReadVariableOp(%variable/2:0)"),
        COUNT.replace("%arg/0 = arg() {port='mask'}", "%arg/0 = rows() {port='mask'}").replace(
            "takes arg", "takes rows"
        ),
    ],
    ids=["the batch decides what is written", "a variable that is written", "no rows are taken"],
)
def test_a_function_that_cannot_be_cut_stays_whole(once: str) -> None:
    before = two_replicas(once)
    assert ShareStatistics()(before) == before


def test_a_stage_of_one_replica_stays_as_it_is() -> None:
    text = TWO[: TWO.index("    %stage0/replica1/run_once")] + "    outputs %stage0/replica0/mb0/forward:0\n"
    before = call_graph(text, FORWARD, *functions_of(COUNT))
    assert ShareStatistics()(before) == before
