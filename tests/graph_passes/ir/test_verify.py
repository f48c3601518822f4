"""What must hold of every graph: each invariant, and what the error names."""

from __future__ import annotations

import dataclasses

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Function, Node, tensor
from dapple_tf.graph_passes.ir.verify import verify
from tests.graph_passes.builders import call_graph, function, graph, refused

GOOD = """
    inputs %x
    %x = input() -> (float32[?,4])
    %f = forward(%x:0) {function='stage0/forward', micro_batch=0, replica=0, stage=0} -> (float32[]) ^%x 'order'
    outputs %f:0
"""
FORWARD = function("stage0/forward", "arg x, variable w", "loss loss")


def test_a_good_graph_passes() -> None:
    verify(call_graph(GOOD, FORWARD))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("%f = ", "%x = ", "graph 'f' has two nodes called 'x'"),
        ("inputs %x", "inputs %y", "input 'y' of graph 'f' is not one of its nodes"),
        ("forward(%x:0)", "forward(%y:0)", "node 'f' takes %y:0, but there is no such node"),
        ("forward(%x:0)", "forward(%x:1)", "%x:1 does not exist: input has 1 output"),
        ("^%x", "^%y", "node 'f' runs after 'y', but there is no such node"),
        ("'order'", "''", "the control edge 'x' -> 'f' gives no reason"),
        ("outputs %f:0", "outputs %f:1", "%f:1 does not exist: forward has 1 output"),
        ("outputs %f:0", "outputs %y:0", "graph 'f' has no node 'y'"),
        ("-> (float32[?,4])", "-> (float32[?,4]) ^%f 'order'", "the graph has a cycle: x <- f <- x"),
        ("'stage0/forward'", "'stage1/forward'", "graph 'f' has no function 'stage1/forward'"),
        ("'stage0/forward'", "3", "attribute 'function' of 'f' (forward) is 3, not of type str"),
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
    broken, good = call_graph(GOOD.replace(old, new, 1), FORWARD), call_graph(GOOD, FORWARD)
    with refused(GraphError, said):
        verify(broken)
    # Beside nodes that were verified before, too.
    shared = (good.by_name[node.name] if node == good.by_name.get(node.name) else node for node in broken.nodes)
    with refused(GraphError, said):
        verify(broken.replace(nodes=tuple(shared)), good)


def test_a_call_of_a_function_that_is_gone_or_another_is_named() -> None:
    good = call_graph(GOOD, FORWARD)
    other = function("stage0/forward", "arg x, arg y", "loss loss")
    with refused(GraphError, "has no function 'stage0/forward'"):
        verify(good.replace(functions=()), good)
    with refused(GraphError, "passes 1 value to 'stage0/forward', which takes 2"):
        verify(good.replace(functions=(other,)), good)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("= forward(", "= forwards(", "node 'f' of graph 'f' has the op 'forwards', but no op of the call level"),
        ("= forward(", "= arg(", "node 'f' of graph 'f' has the op 'arg', but no op of the call level"),
        ("= forward(", "= MatMul(", "node 'f' of graph 'f' has the op 'MatMul', but no op of the call level"),
        ("stage=0", "stages=0", "node 'f' (forward) lacks the attribute 'stage'"),
        (
            "stage=0",
            "stage=0, home=1",
            "node 'f' (forward) has the unknown attribute 'home'; known are: stage, replica",
        ),
        ("stage=0", "stage='0'", "attribute 'stage' of 'f' (forward) is '0', not of type int"),
        ("stage=0", "stage=False", "attribute 'stage' of 'f' (forward) is False, not of type int"),
        ("input()", "input(%f:0)", "the graph has a cycle"),
    ],
)
def test_a_call_level_node_must_fit_its_entry_of_the_op_table(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with refused(GraphError, said):
        verify(call_graph(GOOD.replace(old, new, 1), FORWARD))


PLACE = "replica=0, stage=0"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%n = input(%x:0) -> (float32[])", "node 'n' (input) has 1 inputs, not 0: none"),
        ("%n = input()", "node 'n' (input) has 0 outputs, not 1: the tensor, batched on axis 0"),
        ("%n = batch_size(%x:0) -> (int32[])", "outputs[0] of 'n' (batch_size) is int32, not int64"),
        (
            f"%n = slice(%x:0) {{micro_batch=0, micro_batches=1, replicas=1, {PLACE}}} -> (float64[])",
            "inputs[0] of 'n' (slice) is float32, not int64: the batch size, then tensors of the batch",
        ),
        (
            f"%n = slice() {{micro_batch=0, micro_batches=1, replicas=1, {PLACE}}} -> (float64[])",
            "inputs[0] of 'n' (slice) is missing, not int64",
        ),
        (
            f"%n = reduced_gradients(%x:0) {{variables=['v', 'w'], {PLACE}}} -> (float32[])",
            "node 'n' (reduced_gradients) has 1 inputs, not 2: the gradients of `variables`, one for each item of",
        ),
        (
            f"%n = reduced_gradients(%x:0) {{variables=['w'], {PLACE}}}",
            "node 'n' (reduced_gradients) has 0 outputs, not 1",
        ),
        (
            f"%n = gradients() {{variables=[3], {PLACE}}}",
            "attribute 'variables' of 'n' (gradients) is (3,), not of type tuple",
        ),
        (
            f"%n = gradients() {{variables='w', {PLACE}}}",
            "attribute 'variables' of 'n' (gradients) is 'w', not of type tuple",
        ),
        ("%n = barrier() {ranks=[True]}", "attribute 'ranks' of 'n' (barrier) is (True,), not of type tuple[int, ...]"),
        ("%n = set_updating() {updating=1}", "attribute 'updating' of 'n' (set_updating) is 1, not of type bool"),
        (f"%n = clip(%d:0) {{limit=3, {PLACE}}}", "attribute 'limit' of 'n' (clip) is 3, not of type float"),
    ],
)
def test_operands_and_attributes_of_the_wrong_number_or_type_are_refused(line: str, said: str) -> None:
    before = "%x = input() -> (float32[?])\n%d = timestamp() -> (float64[])\n"
    with refused(GraphError, said):
        verify(graph(before + line))


def test_a_graph_of_the_op_level_has_tensorflow_s_ops_and_the_inputs_of_functions() -> None:
    verify(graph("%a = arg() -> (float32[])\n%c = capture() -> (float32[])\n%b = AddV2(%a:0, %c:0) -> (float32[])"))
    with refused(GraphError, "node 'a' of graph 'f' has the op 'argument', but no op has this name"):
        verify(graph("%a = argument() -> (float32[])"))


def test_nodes_that_do_not_stand_in_a_topological_order_are_refused() -> None:
    with refused(GraphError, "node 'b' stands before 'a', on which it depends"):
        verify(graph("%b = Neg(%a:0) -> (float32[])\n%a = Const() -> (float32[])"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("%a = Op()\n%a = Op()", "graph 'f' has two nodes called 'a'"),
        ("%a = Op(%b:0)", "node 'a' takes %b:0, but there is no such node"),
        ("%a = Op() ^%b 'x'\n%b = Op() ^%a 'x'", "the graph has a cycle: a <- b <- a"),
        ("%a = forward()", "node 'a' of graph 'f' has the op 'forward', but no op has this name"),
    ],
)
def test_the_bodies_of_stage_functions_are_verified(body: str, said: str) -> None:
    broken = Function("stage0/forward", graph(body), (), ())
    with refused(GraphError, said):
        verify(call_graph("", broken))


def test_the_ports_of_a_stage_function_are_those_of_its_graph() -> None:
    fewer = dataclasses.replace(FORWARD, inputs=FORWARD.inputs[:1])
    with refused(GraphError, "function 'stage0/forward' has inputs of the roles ('arg',), but its graph has inputs ("):
        verify(call_graph("", fewer))
    more = dataclasses.replace(FORWARD, outputs=FORWARD.outputs * 2)
    with refused(GraphError, "function 'stage0/forward' has 2 outputs, but its graph has 1"):
        verify(call_graph("", more))


def test_an_op_that_does_not_begin_in_lower_case_is_tensorflow_s() -> None:
    verify(graph("").replace(nodes=(Node("a", "_Arg", outputs=(tensor("float32"),)),)))


def test_functions_that_were_verified_before_are_not_checked_again() -> None:
    good = call_graph(GOOD, FORWARD)
    broken = dataclasses.replace(FORWARD, inputs=())
    verify(good.replace(functions=(broken,), nodes=(), outputs=(), inputs=()), good.replace(functions=(broken,)))
    with refused(GraphError, "has inputs of the roles ()"):
        verify(good.replace(functions=(broken,), nodes=(), outputs=(), inputs=()), good)
