"""Open conditions are folded into ``If`` nodes whose branches are functions."""

from __future__ import annotations

from dapple_tf.graph_passes.ir.conditions import fold_conditions, guarded, is_marker
from dapple_tf.graph_passes.ir.graph import Effect, FunctionRef, Graph, Node, Value, attributes
from dapple_tf.graph_passes.ir.verify import verify
from tests.graph_passes.builders import assert_graph, graph

OPEN = """
    %gw = arg() {port='w'} -> (float32[4])
    %w = variable() -> (resource[])
    %s = variable() -> (resource[])
    %ok = Finite(%gw:0) -> (bool[])
    %if = If(%ok:0) {open=True}
    %r = ReadVariableOp(%s:0) {guard=['if', 'then_branch']} -> (float32[]) !read ^%if 'condition'
    %d = Div(%gw:0, %r:0) {guard=['if', 'then_branch']} -> (float32[4])
    %uw = AssignSubVariableOp(%w:0, %d:0) {guard=['if', 'then_branch'], writes=['w']} !write ^%if 'condition'
    %half = Const() {guard=['if', 'else_branch']} -> (float32[])
    %us = AssignVariableOp(%s:0, %half:0) {guard=['if', 'else_branch'], writes=['s']} !write ^%if 'c' ^%r 'order'
    %seen = ReadVariableOp(%w:0) -> (float32[4]) !read ^%uw 'order'
"""


def branch(folded: Graph, side: str) -> Graph:
    (node,) = (node for node in folded.nodes if node.op == "If")
    reference = node.attr(side)
    assert isinstance(reference, FunctionRef)
    function = folded.function(reference.name)
    verify(function.graph)
    return function.graph


def test_both_branches_take_the_same_values_and_what_comes_after_waits_for_the_condition() -> None:
    folded = fold_conditions(graph(OPEN))
    (node,) = (node for node in folded.nodes if node.op == "If")
    assert node.inputs == tuple(map(Value, ("ok", "s", "gw", "w")))
    assert (node.strings("writes"), node.effect, node.has("open")) == (("w", "s"), Effect.WRITE, False)
    assert list(folded.by_name) == ["gw", "w", "s", "ok", "if", "seen"]
    assert [control.source for control in folded.node("seen").controls] == ["if"]
    then, other = branch(folded, "then_branch"), branch(folded, "else_branch")
    assert len(then.inputs) == len(other.inputs) == 3
    assert_graph(
        then.replace(name="f", inputs=()),
        """
        %entering/0 = variable() {port='%s:0'} -> (resource[])
        %entering/1 = carry() {port='%gw:0'} -> (float32[4])
        %entering/2 = variable() {port='%w:0'} -> (resource[])
        %r = ReadVariableOp(%entering/0:0) -> (float32[]) !read
        %d = Div(%entering/1:0, %r:0) -> (float32[4])
        %uw = AssignSubVariableOp(%entering/2:0, %d:0) {writes=['w']} !write
        """,
    )
    assert [n.name for n in other.nodes if n.op[0].isupper()] == ["half", "us"]
    assert other.node("us").controls == ()  # of the other branch


def test_a_condition_inside_a_branch_stays_open_in_it() -> None:
    nested = OPEN + (
        """
        %in = If(%r:0) {guard=['if', 'then_branch'], open=True} ^%if 'condition'
        %uu = AssignVariableOp(%s:0, %r:0) {guard=['in', 'else_branch'], writes=['s']} !write ^%in 'condition'
        """
    )
    then = branch(fold_conditions(graph(nested)), "then_branch")
    assert [node.name for node in then.nodes if is_marker(node)] == ["in"]
    assert then.node("uu").strings("guard") == ("in", "else_branch")
    again = fold_conditions(then)
    assert [node.op for node in again.nodes if node.op == "If"] == ["If"]
    assert len(again.functions) == 2


def test_a_graph_without_open_conditions_is_left_alone() -> None:
    plain = graph("%p = Const() -> (bool[])\n%if = If(%p:0) {then_branch=function('a')} -> (float32[])")
    assert fold_conditions(plain) is plain


def test_only_guarded_nodes_with_effects_need_an_edge_from_the_marker() -> None:
    pure, write = Node("p", "Add"), Node("w", "AssignVariableOp", effect=Effect.WRITE)
    marker = Node("m", "If", attrs=attributes({"open": True}))
    assert guarded(pure, "if", "then_branch").controls == ()
    for node in (write, marker):
        found = guarded(node, "if", "then_branch")
        assert [control.source for control in found.controls] == ["if"]
        assert found.strings("guard") == ("if", "then_branch")
