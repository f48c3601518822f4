"""Calls in parts, with a join of all replicas between them."""

from __future__ import annotations

import pytest
from hypothesis import given

from dapple_tf.graph_passes.ir.graph import Graph, Value
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.instrument import Instrument
from dapple_tf.graph_passes.passes.join_replicas import JoinReplicas
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.place import Place
from dapple_tf.graph_passes.passes.project import parse_exchange_name
from dapple_tf.graph_passes.passes.split_concat import SplitConcat
from dapple_tf.graph_passes.passes.verify_ranks import verify_ranks
from tests.graph_passes.builders import assert_graph, call_graph, function, two_stages, with_join
from tests.graph_passes.whole import Kind, X, kinds, passes_of, ranks_of, whole_graph

ONE = """
    inputs %x
    %x = input() -> (float32[?,4])
    %refresh = refresh() {replica=0, stage=0, variables=[]}
    %stage0/replica0/mb0/forward = forward(%x:0) {call} -> (float32[]) @'gpu:0' ^%refresh 'refresh'
    %stage0/replica1/mb0/forward = forward(%x:0) {call} -> (float32[]) @'gpu:1'
    %loss = merge(%stage0/replica0/mb0/forward:0, %stage0/replica1/mb0/forward:0) {kind='sum'} -> (float32[])
    %after = barrier() ^%stage0/replica0/mb0/forward 'barrier'
    outputs %loss:0 %stage0/replica1/mb0/forward:0
"""


def test_a_call_becomes_a_node_for_each_part_and_takes_what_all_replicas_join() -> None:
    whole = with_join(function("stage0/forward", "arg x", "loss loss"))
    assert_graph(
        JoinReplicas()(call_graph(ONE, whole)),
        """
        inputs %x
        %x = input() -> (float32[?,4])
        %refresh = refresh() {replica=0, stage=0, variables=[]}
        %stage0/replica0/mb0/forward/part0 = part(%x:0) {place, function='stage0/forward/part0', of='forward'}
        | -> (float64[3,4]) @'gpu:0' ^%refresh 'refresh'
        %stage0/replica1/mb0/forward/part0 = part(%x:0) {place, function='stage0/forward/part0', of='forward'}
        | -> (float64[3,4]) @'gpu:1'
        %stage0/replica0/mb0/forward/join0 = join(%stage0/replica0/mb0/forward/part0:0,
        | %stage0/replica1/mb0/forward/part0:0) {place, kinds=['moments'], pieces=2} -> (float64[3,4]) @'gpu:0'
        %stage0/replica0/mb0/forward = forward(%x:0, %stage0/replica0/mb0/forward/join0:0)
        | {place, function='stage0/forward/part1'} -> (float32[]) @'gpu:0'
        | ^%stage0/replica0/mb0/forward/part0 'join: the parts of a call run in order'
        %stage0/replica1/mb0/forward/join0 = join(%stage0/replica0/mb0/forward/part0:0,
        | %stage0/replica1/mb0/forward/part0:0) {place, kinds=['moments'], pieces=2} -> (float64[3,4]) @'gpu:1'
        %stage0/replica1/mb0/forward = forward(%x:0, %stage0/replica1/mb0/forward/join0:0)
        | {place, function='stage0/forward/part1'} -> (float32[]) @'gpu:1'
        | ^%stage0/replica1/mb0/forward/part0 'join: the parts of a call run in order'
        %loss = merge(%stage0/replica0/mb0/forward:0, %stage0/replica1/mb0/forward:0) {kind='sum'} -> (float32[])
        %after = barrier() ^%stage0/replica0/mb0/forward 'barrier'
        outputs %loss:0 %stage0/replica1/mb0/forward:0
        """,
    )


def staged(*replicas: int) -> Graph:
    return SplitConcat(replicas)(Microbatch(2, 2)(call_graph(X, *map(with_join, two_stages()))))


def test_a_stage_with_one_replica_calls_whole_functions() -> None:
    assert JoinReplicas()(staged(1, 1)) == staged(1, 1).sorted()
    found = nodes_of(JoinReplicas()(staged(1, 2)), OpName.PART, OpName.JOIN)
    assert {node.integer("stage") for node in found} == {1}


def test_the_functions_of_whole_calls_stay_and_are_not_called() -> None:
    graph = JoinReplicas()(staged(2, 2))
    called = {node.string("function") for node in graph.nodes if node.has("function")}
    names = {function.name for function in two_stages()}
    assert called == {f"{name}/part{part}" for name in names for part in (0, 1)}
    assert {function.name for function in graph.functions} == names | called


def test_only_the_last_part_of_a_call_is_inlined() -> None:
    graph = whole_graph(Kind((2,), 1, overlap=True, joins=True))
    backward = nodes_of(graph, OpName.BACKWARD)
    assert all(node.has("inline") for node in backward)
    assert not any(node.has("inline") for node in nodes_of(graph, OpName.PART))


@pytest.mark.parametrize("replicas", [(2, 2), (3, 1)])
def test_a_call_in_parts_is_timed_from_its_first_to_its_last(replicas: tuple[int, ...]) -> None:
    graph = Instrument()(whole_graph(Kind(replicas, 2, joins=True)))
    call = "stage0/replica1/mb0/backward"
    starts = {control.source for control in graph.node(f"{call}/part0").controls}
    assert f"{call}/start" in starts
    assert f"{call}/start" not in {control.source for control in graph.node(call).controls}
    assert {control.source for control in graph.node(f"{call}/end").controls} == {call}
    waits = {control.source for control in graph.node(f"{call}/start").controls}
    assert {name.removesuffix("/end") for name in waits} == set(whole_graph_predecessors(replicas, f"{call}/part0"))


def whole_graph_predecessors(replicas: tuple[int, ...], name: str) -> list[str]:
    return list(whole_graph(Kind(replicas, 2, joins=True)).node(name).predecessors())


def test_the_parts_run_where_the_call_would() -> None:
    kind = Kind((2, 1), 1, joins=True)
    placed = run_passes(whole_graph(kind), [Place((("a", "b"), ("c",)), "home")])
    devices = {node.integer("replica"): node.device for node in nodes_of(placed, OpName.PART, OpName.JOIN)}
    assert devices == {0: "a", 1: "b"}


def test_ranks_exchange_what_they_join_all_with_all() -> None:
    kind = Kind((3, 1), 1, joins=True)
    for rank, graph in enumerate(ranks_of(kind)[:3]):
        exchange = graph.node("exchange/stage0/mb0/forward/join0")
        others = tuple(other for other in range(3) if other != rank)
        assert (exchange.integers("to"), exchange.integers("source")) == (others, others)
        assert exchange.integers("ranks") == (0, 1, 2)
        assert parse_exchange_name(exchange.name) is None
        (join,) = (node for node in nodes_of(graph, OpName.JOIN) if node.name.endswith("/forward/join0"))
        own = Value(f"stage0/replica{rank}/mb0/forward/part0")
        pieces = list(exchange.values()[:2])
        pieces.insert(rank, own)
        assert join.inputs == tuple(pieces)


@given(kind=kinds())
def test_ranks_of_joining_stages_fit_together(kind: Kind) -> None:
    verify_ranks(ranks_of(kind))


def test_the_pass_comes_after_those_that_see_whole_calls() -> None:
    kind = Kind((2, 2), 2, joins=True)
    names = [step.name for step in passes_of(kind)]
    assert JoinReplicas().name not in names
    graph = whole_graph(kind)
    assert len(nodes_of(graph, OpName.FORWARD)) == 2 * 2 * 2  # one for each replica and micro-batch of each stage
