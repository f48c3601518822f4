"""Each replica of a stage computes partial statistics of its own rows; all combine them to those of the batch."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.combine_statistics import CombineStatistics
from dapple_tf.graph_passes.passes.project import Project
from dapple_tf.graph_passes.passes.share_statistics import ShareStatistics
from dapple_tf.graph_passes.passes.verify_ranks import verify_ranks
from tests.graph_passes.builders import assert_graph, call_graph, functions_of
from tests.graph_passes.passes.test_share_statistics import COUNT as OF_SUM
from tests.graph_passes.passes.test_share_statistics import FORWARD
from tests.graph_passes.passes.test_share_statistics import TWO as WITHOUT_SIZE

COUNT = OF_SUM.replace(
    """
      %sum = Sum(%arg/0:0) -> (float32[])
      %count = Mul(%sum:0, %scale:0) -> (float32[])""",
    """
      %weighted = Mul(%arg/0:0, %scale:0) -> (float32[?,4])
      %sum = Sum(%weighted:0) {combines='sum'} -> (float32[])
      %most = Max(%arg/0:0) {combines='max'} -> (float32[])
      %count = Div(%sum:0, %most:0) -> (float32[])""",
)
SIZE = "    %batch/size = batch_size(%x:0) -> (int64[])\n"
TWO = WITHOUT_SIZE.replace("    %stage0/replica0/run_once", f"{SIZE}    %stage0/replica0/run_once", 1)


def two_replicas(once: str = COUNT) -> Graph:
    return call_graph(TWO, FORWARD, *functions_of(once))


def own_partials(r: int) -> str:
    """Return the nodes of a replica's own partial statistics."""
    rows = "%batch/size:0, %mask:0"
    return f"""
        %stage0/replica{r}/mb0/rows_for_partials = slice({rows})
        | {{micro_batch=0, micro_batches=1, replica={r}, replicas=2, stage=0}} -> (float64[], float32[?,4])
        %stage0/replica{r}/mb0/partials = partials(%stage0/replica{r}/mb0/rows_for_partials:1)
        | {{function='stage0/partials', micro_batch=0, replica={r}, stage=0}} -> (float32[], float32[])
        %stage0/replica{r}/own_partials = combine_partials(%stage0/replica{r}/mb0/partials:0,
        | %stage0/replica{r}/mb0/partials:1)
        | {{operations=['sum', 'max'], pieces=1, replica={r}, stage=0}} -> (float32[], float32[])
    """


def statistics(r: int) -> str:
    """Return the nodes of a replica that take the partial statistics of all."""
    return f"""
        %stage0/replica{r}/all_partials = combine_partials(%stage0/replica0/own_partials:0,
        | %stage0/replica1/own_partials:0, %stage0/replica0/own_partials:1, %stage0/replica1/own_partials:1)
        | {{operations=['sum', 'max'], pieces=2, replica={r}, stage=0}} -> (float32[], float32[])
        %stage0/replica{r}/run_once = run_once(%stage0/replica{r}/all_partials:0, %stage0/replica{r}/all_partials:1)
        | {{function='stage0/run_once', replica={r}, stage=0}} -> (float32[], int64[])
        %stage0/replica{r}/mb0/forward = forward(%x:0, %stage0/replica{r}/run_once:0, %stage0/replica{r}/run_once:1)
        | {{function='stage0/forward', micro_batch=0, replica={r}, stage=0}} -> (float32[])
        | ^%stage0/replica{r}/run_once 'once'
    """


def test_replicas_exchange_partial_statistics_and_compute_those_of_the_batch_from_them() -> None:
    result = run_passes(two_replicas(), [CombineStatistics()])
    assert_graph(
        result,
        f"""
        inputs %x %mask
        %x = input() -> (float32[?,4])
        %mask = input() -> (float32[?,4])
        %batch/size = batch_size(%x:0) -> (int64[])
        {own_partials(0)}
        {own_partials(1)}
        {statistics(0)}
        {statistics(1)}
        %loss = merge(%stage0/replica0/mb0/forward:0, %stage0/replica1/mb0/forward:0) {{kind='sum'}} -> (float32[])
        outputs %loss:0
        """,
    )
    assert [f for f in result.functions if f.name != "stage0/forward"] == list(
        functions_of("""
    function stage0/run_once
    takes once float32[] '%sum:0' as %once/0
    takes once float32[] '%most:0' as %once/1
    takes variable resource[] 'seed' as %variable/2
    gives once float32[] '%count:0' from %count:0
    gives once int64[] '%draw:0' from %draw:0
      %count = Div(%once/0:0, %once/1:0) -> (float32[])
      %draw = ReadVariableOp(%variable/2:0) -> (int64[]) !read
      %next = Add(%draw:0) -> (int64[])
      %write = AssignVariableOp(%variable/2:0, %next:0) {writes=['seed']} !write
      end
    function stage0/partials
    takes arg float32[?,4] 'mask' as %arg/1
    takes variable resource[] 'v' as %variable/0
    gives once float32[] '%sum:0' from %sum:0
    gives once float32[] '%most:0' from %most:0
      %scale = ReadVariableOp(%variable/0:0) -> (float32[]) !read
      %weighted = Mul(%arg/1:0, %scale:0) -> (float32[?,4])
      %sum = Sum(%weighted:0) {combines='sum'} -> (float32[])
      %most = Max(%arg/1:0) {combines='max'} -> (float32[])
      end
    """)
    )
    assert ShareStatistics()(result) == result


def test_partial_statistics_wait_for_what_run_once_waits_for() -> None:
    text = TWO.replace("{call} -> (float32[], int64[])", "{call} -> (float32[], int64[]) ^%x 'a'", 1)
    result = CombineStatistics()(call_graph(text, FORWARD, *functions_of(COUNT)))
    assert [control.source for control in result.node("stage0/replica0/mb0/partials").controls] == ["x"]


def test_ranks_send_each_other_partial_statistics_and_take_only_their_own_rows() -> None:
    combined = CombineStatistics()(two_replicas())
    graphs = [Project(((0, 1),), rank)(combined) for rank in (0, 1)]
    verify_ranks(graphs)
    for rank, graph in enumerate(graphs):
        node = graph.node("exchange/combine_partials/stage0")
        assert (node.integers("to"), node.integers("source")) == ((1 - rank,) * 2, (1 - rank,) * 2)
        assert {node.op for node in graph.consumers()["mask"]} == {"slice"}


@pytest.mark.parametrize(
    "once",
    [
        COUNT.replace("%count = Div(%sum:0, %most:0)", "%count = Div(%sum:0, %weighted:0)"),
        COUNT.replace(" {combines='sum'}", "").replace(" {combines='max'}", ""),
        COUNT.replace("%next = Add(%draw:0)", "%next = Add(%draw:0, %weighted:0)"),
        COUNT.replace("ReadVariableOp(%variable/1:0)", "ReadVariableOp(%variable/2:0)"),
        COUNT.replace("%arg/0 = arg() {port='mask'}", "%arg/0 = rows() {port='mask'}").replace(
            "takes arg", "takes rows"
        ),
        COUNT.replace("%weighted = Mul(%arg/0:0, %scale:0) -> (float32[?,4])",
                      "%weighted = Mul(%arg/0:0, %scale:0) -> (float32[?,4]) !random"),
    ],
    ids=[
        "an output needs the rows",
        "nothing is marked",
        "rows decide what is written",
        "a variable that is written is needed",
        "no rows of the batch are taken",
        "a draw is needed",
    ],
)  # fmt: skip
def test_a_function_that_does_not_reduce_stays_whole(once: str) -> None:
    before = two_replicas(once)
    assert CombineStatistics()(before) == before


def test_a_stage_of_one_replica_stays_as_it_is() -> None:
    text = TWO[: TWO.index("    %stage0/replica1/run_once")] + "    outputs %stage0/replica0/mb0/forward:0\n"
    before = call_graph(text, FORWARD, *functions_of(COUNT))
    assert CombineStatistics()(before) == before


def test_partial_statistics_are_of_micro_batches_of_the_given_sizes() -> None:
    """The batch is cut as for forward, whose slices say how."""
    text = TWO + "".join(
        f"""
    %stage0/replica{r}/mb0/slice = slice(%batch/size:0, %x:0)
    | {{micro_batch=0, micro_batches=1, replica={r}, replicas=2, sizes=[7], stage=0}} -> (float64[], float32[?,4])
    """
        for r in range(2)
    )
    result = CombineStatistics()(call_graph(text, FORWARD, *functions_of(COUNT)))
    rows = [node for node in result.nodes if node.name.endswith("rows_for_partials")]
    assert [node.integers("sizes") for node in rows] == [(7,), (7,)]
