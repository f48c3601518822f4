"""What must hold of every graph: each guard, and what it names."""

from __future__ import annotations

import pytest

from graph_passes.errors import GraphError
from graph_passes.ir.graph import Function, Node
from graph_passes.ir.verify import verify
from tests.graph_passes.builders import calls, function, graph, refused

GOOD = """
    inputs %x
    %x = input() -> (float32[?,4])
    %f = forward(%x:0) {function='stage0/forward'} -> (float32[]) ^%x 'order'
    outputs %f:0
"""
FORWARD = function("stage0/forward", "arg x, variable w", "loss loss")


def test_a_good_graph_passes() -> None:
    verify(calls(GOOD, FORWARD))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("%f = ", "%x = ", "graph 'f' has two nodes called 'x'"),
        ("^%x 'order'", "!loud", "node 'f' has the unknown effect 'loud'"),
        ("inputs %x", "inputs %y", "input 'y' of graph 'f' is not one of its nodes"),
        ("forward(%x:0)", "forward(%y:0)", "node 'f' takes %y:0, but there is no such node"),
        ("forward(%x:0)", "forward(%x:1)", "%x:1 does not exist: input has 1 outputs"),
        ("^%x", "^%y", "node 'f' runs after 'y', but there is no such node"),
        ("'order'", "''", "the control edge 'x' -> 'f' gives no reason"),
        ("outputs %f:0", "outputs %f:1", "%f:1 does not exist: forward has 1 outputs"),
        ("outputs %f:0", "outputs %y:0", "graph 'f' has no node 'y'"),
        ("-> (float32[?,4])", "-> (float32[?,4]) ^%f 'order'", "the graph has a cycle: x <- f <- x"),
        ("'stage0/forward'", "'stage1/forward'", "graph 'f' has no function 'stage1/forward'"),
        ("'stage0/forward'", "3", "attribute 'function' of 'f' is 3, not a string"),
        (
            "forward(%x:0)",
            "forward(%x:0, %x:0)",
            "call 'f' passes 2 values to 'stage0/forward', which takes 1",
        ),
        (
            "(float32[?,4])",
            "(int32[?,4])",
            "call 'f' passes int32 as arg 'x' of 'stage0/forward', which takes float32",
        ),
        ("(float32[])", "(float64[])", "call 'f' does not have the outputs of 'stage0/forward'"),
        ("(float32[])", "(float32[], float32[])", "call 'f' does not have the outputs of 'stage0/forward'"),
    ],
)
def test_a_broken_invariant_is_named(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with refused(GraphError, said):
        verify(calls(GOOD.replace(old, new, 1), FORWARD))


def test_nodes_that_do_not_stand_in_a_topological_order_are_refused() -> None:
    with refused(GraphError, "'b'"):
        verify(graph("%b = Neg(%a:0) -> (float32[])\n%a = Const() -> (float32[])"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("%a = Op()\n%a = Op()", "graph 'f' has two nodes called 'a'"),
        ("%a = Op(%b:0)", "node 'a' takes %b:0, but there is no such node"),
        ("%a = Op() ^%b 'x'\n%b = Op() ^%a 'x'", "the graph has a cycle: a <- b <- a"),
    ],
)
def test_the_bodies_of_stage_functions_are_verified(body: str, said: str) -> None:
    broken = Function("stage0/forward", graph(body), (), ())
    with refused(GraphError, said):
        verify(calls("", broken))


def test_an_effect_is_one_of_the_known() -> None:
    with refused(GraphError, "node 'a' has the unknown effect 'Pure'"):
        verify(graph("").replace(nodes=(Node("a", "Op", effect="Pure"),)))
