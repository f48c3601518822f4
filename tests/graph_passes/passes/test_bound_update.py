"""The order of a stage's weight update: groups of variables, one after the other."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Node, Value, ancestors, attributes, tensor
from dapple_tf.graph_passes.ir.text import print_graph
from dapple_tf.graph_passes.passes.bound_update import bound_update
from dapple_tf.memory.liveness import peak_bytes
from tests.graph_passes.builders import functions_of

MOMENTUM = """
    function stage0/update
    takes gradient float32[4] 'w' as %gw
    takes gradient float32[4] 'v' as %gv
    takes variable resource[] 'w' as %w
    takes variable resource[] 'v' as %v
    takes variable resource[] 'm' as %m
    takes variable resource[] 'rate' as %rate
      %half = Const() -> (float32[])
      %r = ReadVariableOp(%rate:0) -> (float32[]) !read
      %um = AssignAddVariableOp(%m:0, %gw:0) {writes=['m']} !write
      %rm = ReadVariableOp(%m:0) -> (float32[4]) !read ^%um 'order'
      %dw = Mul(%rm:0, %r:0) -> (float32[4])
      %uw = AssignSubVariableOp(%w:0, %dw:0) {writes=['w']} !write
      %rv = ReadVariableOp(%v:0) -> (float32[4]) !read
      %hv = Mul(%rv:0, %half:0) -> (float32[4])
      %dv = AddN(%gv:0, %hv:0) -> (float32[4])
      %sv = Mul(%dv:0, %r:0) -> (float32[4])
      %uv = AssignSubVariableOp(%v:0, %sv:0) {writes=['v']} !write
      end
"""


def momentum() -> Function:
    (function,) = functions_of(MOMENTUM)
    return function


def test_a_group_begins_when_the_one_before_has_written_its_last_variable() -> None:
    """The learning rate, which both groups need, is read at once; the constant takes no memory and does not wait."""
    expected = MOMENTUM.replace(
        "%rv = ReadVariableOp(%v:0) -> (float32[4]) !read",
        "%updated/0 = NoOp() ^%uw 'memory: the group ends'\n"
        "%rv = ReadVariableOp(%v:0) -> (float32[4]) !read "
        "^%updated/0 'memory: the variables of the group before are updated'",
    )
    (wanted,) = functions_of(expected)
    assert print_graph(bound_update(momentum(), 16).graph) == print_graph(wanted.graph)


def test_a_variable_and_its_slots_are_one_group_whatever_they_take() -> None:
    assert print_graph(bound_update(momentum(), 1).graph) == print_graph(bound_update(momentum(), 47).graph)


def test_an_update_of_one_group_is_unchanged() -> None:
    assert bound_update(momentum(), 48) == momentum()
    assert bound_update(momentum()) == momentum()


def test_variables_that_are_updated_from_one_another_are_one_group() -> None:
    mixed = MOMENTUM.replace("%rv = ReadVariableOp(%v:0)", "%rv = ReadVariableOp(%w:0)").replace(
        "(float32[4]) !read\n      %hv", "(float32[4]) !read ^%uw 'order'\n      %hv"
    )
    (function,) = functions_of(mixed)
    assert bound_update(function, 1) == function


def guard(function: Function, markers: dict[str, str]) -> Function:
    """The function, in which the nodes named in ``markers`` are in a branch of a condition."""
    found = Node("finite", "Const", (), (tensor("bool"),))
    nodes = [found]
    for marker in dict.fromkeys(markers.values()):
        nodes.append(Node(marker, "If", (Value("finite"),), (), attributes({"open": True})))
    for node in function.graph.nodes:
        if node.name in markers:
            node = node.with_attrs(guard=(markers[node.name], "then_branch"))
            node = node.after(markers[node.name], "condition") if node.effect != Effect.PURE else node
        nodes.append(node)
    return dataclasses.replace(function, graph=function.graph.replace(nodes=tuple(nodes)).sorted())


def test_a_group_in_a_branch_ends_in_the_branch() -> None:
    """So does an update that is skipped where gradients are not finite (LossScaleOptimizer)."""
    inside = ["r", "um", "rm", "dw", "uw", "rv", "hv", "dv", "sv", "uv"]
    result = bound_update(guard(momentum(), dict.fromkeys(inside, "if")), 16).graph
    assert result.node("updated/0").strings("guard") == ("if", "then_branch")
    assert "updated/0" in set(result.node("rv").predecessors())


def test_what_is_outside_of_the_branch_does_not_wait_for_it() -> None:
    inside = ["r", "um", "rm", "dw", "uw", "sv", "uv"]
    result = bound_update(guard(momentum(), dict.fromkeys(inside, "if")), 16).graph
    assert [n.name for n in result.nodes if "updated/0" in set(n.predecessors())] == ["sv"]


def test_an_update_under_two_conditions_is_unchanged() -> None:
    markers = dict.fromkeys(["um", "rm", "dw", "uw"], "if") | dict.fromkeys(["rv", "hv", "dv", "sv", "uv"], "other")
    function = guard(momentum(), markers)
    assert bound_update(function, 1) == function


@st.composite
def updates(draw: st.DrawFn) -> Function:
    """Updates of variables of which each takes temporary tensors, and some take what others have written."""
    nodes: list[Node] = []
    written: list[str] = []
    for i in range(draw(st.integers(1, 8))):
        size = draw(st.integers(1, 64))
        kind = tensor("float32", size)
        nodes.append(Node(f"v{i}", "variable", (), (tensor("resource"),), attributes({"port": f"v{i}"})))
        value = Node(f"r{i}", "ReadVariableOp", (Value(f"v{i}"),), (kind,), effect=Effect.READ)
        if written and draw(st.booleans()):
            value = value.after(draw(st.sampled_from(written)), "order")
        nodes.append(value)
        for step in range(draw(st.integers(1, 4))):
            nodes.append(Node(f"t{i}/{step}", "Compute", (Value(nodes[-1].name),), (kind,)))
        inputs = (Value(f"v{i}"), Value(nodes[-1].name))
        write = Node(f"w{i}", "AssignVariableOp", inputs, (), attributes({"writes": (f"v{i}",)}), effect=Effect.WRITE)
        nodes.append(write)
        written.append(write.name)
    return Function("stage0/update", Graph("stage0/update", tuple(nodes)), (), ())


@given(updates(), st.integers(1, 600))
def test_groups_only_add_edges_and_leave_no_cycle(function: Function, group_bytes: int) -> None:
    """Whatever ran before a node still does, and of two groups that do not need each other one runs first."""
    result = bound_update(function, group_bytes).graph  # ``sorted`` refuses a cycle
    before = function.graph
    for node in before.nodes:
        found = result.node(node.name)
        assert dataclasses.replace(found, controls=()) == dataclasses.replace(node, controls=())
        assert set(node.controls) <= set(found.controls)
        assert ancestors(before, [node.name]) <= ancestors(result, [node.name])
    assert {node.name for node in result.nodes if node.name not in before.by_name} == {
        node.name for node in result.nodes if node.op == "NoOp"
    }


def test_groups_bound_the_memory_of_an_update() -> None:
    """Of Adam's update of 16 equal variables as much as of one group of them is there at once."""
    kind = tensor("float32", 1024)
    nodes: list[Node] = []
    for i in range(16):
        nodes += [
            Node(f"m{i}", "variable", (), (tensor("resource"),), attributes({"port": f"m{i}"})),
            Node(f"r{i}", "ReadVariableOp", (Value(f"m{i}"),), (kind,), effect=Effect.READ),
            Node(f"a{i}", "Compute", (Value(f"r{i}"),), (kind,)),
            Node(f"b{i}", "Compute", (Value(f"r{i}"),), (kind,)),
            Node(f"c{i}", "Compute", (Value(f"a{i}"), Value(f"b{i}")), (kind,)),
            Node(f"w{i}", "AssignVariableOp", (Value(f"m{i}"), Value(f"c{i}")), (), effect=Effect.WRITE).with_attrs(
                writes=(f"m{i}",)
            ),
        ]
    function = Function("stage0/update", Graph("stage0/update", tuple(nodes)), (), ())

    def peak(found: Function) -> int:
        return peak_bytes(found.graph, lambda value: found.graph.type_of(value).bytes())

    assert peak(function) > 32 * 4096
    assert peak(bound_update(function, 2 * 4096)) <= 2 * 3 * 4096
    assert peak(bound_update(function, 1)) == 3 * 4096
