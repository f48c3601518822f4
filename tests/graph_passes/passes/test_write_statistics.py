"""Statistics are summed over micro-batches and replicas, and written at the end of the step."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import Function, Graph, Value
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.copy_variables import CopyVariables
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.split_concat import SplitConcat
from dapple_tf.graph_passes.passes.write_statistics import WriteStatistics
from tests.graph_passes.builders import call_graph, function, refused, two_stages
from tests.graph_passes.whole import Kind, X, ranks_of, whole_graph

SUMS = "float64[3,4]"


def functions(*ends: Function) -> tuple[Function, ...]:
    """Two stages; the first normalises once, the second twice."""
    first, first_back, last, last_back = two_stages()
    given = (f"statistic a {SUMS}", f"statistic b {SUMS}, statistic c {SUMS}")
    return (
        function(first.name, "arg x, variable w", f"boundary h, {given[0]}, stash a"),
        first_back,
        function(last.name, "boundary h, variable v", f"loss loss, {given[1]}, stash b"),
        last_back,
        *ends,
    )


def end(stage: int, *names: str) -> Function:
    taken = ", ".join(f"statistic {name} {SUMS}" for name in names)
    return function(f"stage{stage}/write_statistics", f"variable m{stage}, {taken}", "", [f"m{stage}"])


def written(*ends: Function, replicas: tuple[int, int] = (1, 1)) -> Graph:
    graph = Microbatch(2, 2)(call_graph(X, *functions(*ends)))
    return WriteStatistics()(SplitConcat(replicas)(graph))


def test_statistics_are_summed_over_the_micro_batches_in_order() -> None:
    graph = written(end(0, "a"), end(1, "b", "c"))
    first, last = nodes_of(graph, OpName.SUM_STATISTICS)
    assert first.inputs == (Value("stage0/replica0/mb0/forward", 1), Value("stage0/replica0/mb1/forward", 1))
    forwards = ("stage1/replica0/mb0/forward", "stage1/replica0/mb1/forward")
    assert last.inputs == tuple(Value(name, i) for name in forwards for i in (1, 2))
    assert last.strings("variables") == ("b", "c")
    assert not nodes_of(graph, OpName.ALLREDUCE)
    writes = {node.name: node.inputs for node in nodes_of(graph, OpName.WRITE_STATISTICS)}
    assert writes == {"stage0/write_statistics": first.values(), "stage1/write_statistics": last.values()}


def test_the_sums_of_replicas_are_all_reduced() -> None:
    graph = written(end(0, "a"), end(1, "b", "c"), replicas=(1, 2))
    (reduce,) = nodes_of(graph, OpName.ALLREDUCE)
    sums = [node for node in nodes_of(graph, OpName.SUM_STATISTICS) if node.integer("stage") == 1]
    assert reduce.inputs == (*sums[0].values(), *sums[1].values())
    assert (reduce.name, reduce.integer("replicas")) == ("stage1/allreduce_statistics", 2)
    assert graph.node("stage1/write_statistics").inputs == reduce.values()


def test_a_stage_may_write_from_the_sums_of_another() -> None:
    graph = written(end(0, "a", "c"))
    sums = nodes_of(graph, OpName.SUM_STATISTICS)
    assert graph.node("stage0/write_statistics").inputs == (Value(sums[0].name), Value(sums[1].name, 1))


def test_a_statistic_that_no_forward_gives_is_refused() -> None:
    with refused(GraphError, "'stage0/write_statistics' takes the statistic 'z', but no forward gives it"):
        written(end(0, "z"))


def test_what_is_written_waits_for_all_calls_of_its_stage() -> None:
    waits = {control.source for control in written(end(0, "a")).node("stage0/write_statistics").controls}
    assert waits == {f"stage0/replica0/mb{m}/{what}" for m in range(2) for what in ("forward", "backward")}


def test_moving_statistics_have_no_copies_and_belong_to_the_stage_that_writes_them() -> None:
    graph = SplitConcat((2, 1))(Microbatch(2, 2)(call_graph(X, *functions(end(0, "a"), end(1, "b")))))
    variables = find_variables(graph)
    assert (variables.owner("m0"), variables.owner("m1"), variables.at_end) == (0, 1, {"m0", "m1"})
    assert variables.state == frozenset()
    copied = {name for node in nodes_of(CopyVariables()(graph), OpName.REFRESH) for name in node.strings("variables")}
    assert copied == {"w"}


@pytest.mark.parametrize("name", ["stage0/write_statistics", "stage1/write_statistics"])
def test_nothing_is_written_before_the_barrier(name: str) -> None:
    graph = whole_graph(Kind((1, 2), 2, statistics=True))
    barrier = {control.source for control in graph.node("update/barrier").controls}
    assert {value.node for value in graph.node(name).inputs} <= barrier
    assert "update/begin" in {control.source for control in graph.node(name).controls}
    assert name in {control.source for control in graph.node("update/done").controls}


def test_every_rank_of_a_stage_writes_and_other_ranks_send_what_it_takes() -> None:
    first, *last = ranks_of(Kind((1, 2), 2, statistics=True))
    assert [node.name for node in nodes_of(first, OpName.WRITE_STATISTICS)] == ["stage0/write_statistics"]
    for graph in last:
        (write,) = nodes_of(graph, OpName.WRITE_STATISTICS)
        sources = {graph.node(value.node).op for value in write.inputs}
        assert sources == {OpName.ALLREDUCE, OpName.EXCHANGE}
