"""The functions that run once a step: which stage computes what, and which writes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.ir.graph import Function, Graph
from dapple_tf.graph_passes.passes.once import build_once
from dapple_tf.graph_passes.passes.partition import Stage, StageGraph
from tests.graph_passes.builders import assert_graph, function, graph

JOINT = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %v = variable() -> (resource[])
    %w = variable() -> (resource[])
    %count = Sum(%x:0) -> (float32[])
    %scaled = Mul(%count:0) -> (float32[])
    %h = Forward(%x:0, %scaled:0, %v:0) -> (float32[?,4])
    %loss = Loss(%h:0, %scaled:0, %w:0) -> (float32[])
    outputs %loss:0
"""


def once(
    text: str, names: Iterable[str], *functions: tuple[Function, ...], repeated: bool = False
) -> tuple[Graph, tuple[Function | None, ...]]:
    """The graph, and each stage's function of the nodes ``names``, which run once."""
    joint = graph(text)
    stages = tuple(Stage(i, i, i, (), (), ()) for i in range(len(functions)))
    staged = StageGraph(Layers(joint, (), (), frozenset(), frozenset(), frozenset(names)), stages)
    return joint, build_once(staged, joint, functions, repeated=repeated)


def nodes_of(built: Function | None) -> list[str]:
    """The nodes of a function but its inputs."""
    return [node.name for node in built.graph.nodes if node.name not in built.graph.inputs]


def takes(stage: int, what: str) -> tuple[Function, ...]:
    return (function(f"stage{stage}/forward", what, "boundary h"),)


def test_a_statistic_becomes_the_function_of_the_stage_that_uses_it() -> None:
    _, (first, second) = once(
        JOINT, ["count", "scaled"], takes(0, "arg x, variable v"), takes(1, "once %scaled:0 float32[], variable w")
    )
    assert first is None
    assert second.name == "stage1/run_once"
    assert_graph(
        second.graph.replace(name="f"),
        """
        inputs %arg/0
        %arg/0 = arg() {port='x'} -> (float32[?,4])
        %count = Sum(%arg/0:0) -> (float32[])
        %scaled = Mul(%count:0) -> (float32[])
        outputs %scaled:0
        """,
    )
    assert [(port.role, port.name) for port in second.inputs] == [("arg", "x")]
    assert [(port.role, port.name) for port in second.outputs] == [("once", "%scaled:0")]


def test_each_stage_that_uses_a_statistic_computes_it() -> None:
    """No rank waits for another."""
    taken = "once %scaled:0 float32[]"
    _, built = once(JOINT, ["count", "scaled"], takes(0, taken), takes(1, taken))
    assert [nodes_of(found) for found in built] == [["count", "scaled"]] * 2


def test_a_value_that_several_functions_of_a_stage_take_is_given_once() -> None:
    taken = "once %scaled:0 float32[]"
    pair = (function("stage0/forward", taken), function("stage0/backward", f"{taken}, once %count:0 float32[]"))
    _, (built,) = once(JOINT, ["count", "scaled"], pair)
    assert [port.name for port in built.outputs] == ["%scaled:0", "%count:0"]


def test_stages_without_any_of_it_have_no_function() -> None:
    _, built = once(JOINT, ["count"], takes(0, "arg x"), takes(1, ""))
    assert built == (None, None)


WRITES = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %average = variable() -> (resource[])
    %w = variable() -> (resource[])
    %read = ReadVariableOp(%w:0) -> (float32[4]) !read
    %assign = AssignVariableOp(%average:0, %read:0) {writes=['average']} !write
    %loss = Loss(%x:0) -> (float32[])
    outputs %loss:0
"""


def writers(
    text: str, names: Iterable[str], *functions: tuple[Function, ...], repeated: bool = False
) -> list[list[str]]:
    """The nodes of each stage's function."""
    _, built = once(text, names, *functions, repeated=repeated)
    return [[] if found is None else nodes_of(found) for found in built]


def test_each_stage_that_reads_a_variable_itself_writes_its_copy() -> None:
    found = writers(WRITES, ["assign"], takes(0, "arg x"), takes(1, "variable average"), takes(2, "variable average"))
    assert found == [[], ["read", "assign"], ["read", "assign"]]


READ_BEFORE = WRITES.replace("%assign =", "%value = ReadVariableOp(%average:0) -> (float32[]) !read\n    %assign =")


@pytest.mark.parametrize("repeated", [False, True])
def test_a_write_after_a_read_belongs_to_the_first_stage_unless_minibatches_follow(repeated: bool) -> None:
    taken = [takes(stage, "once %value:0 float32[]") for stage in range(2)]
    first, second = writers(READ_BEFORE, ["value", "assign"], *taken, repeated=repeated)
    assert sorted(first) == ["assign", "read", "value"]
    assert sorted(second) == (["assign", "read", "value"] if repeated else ["value"])


def test_a_write_of_a_variable_that_no_stage_uses_follows_what_it_reads() -> None:
    """A moving average of weights belongs to the stage of the weights."""
    assert writers(WRITES, ["assign"], takes(0, "arg x"), takes(1, "variable w")) == [[], ["read", "assign"]]


def test_a_write_of_variables_that_no_stage_uses_belongs_to_the_last_stage() -> None:
    assert writers(WRITES, ["assign"], takes(0, "arg x"), takes(1, "")) == [[], ["read", "assign"]]


POINTER = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %bank = variable() -> (resource[])
    %pointer = variable() -> (resource[])
    %place = ReadVariableOp(%pointer:0) -> (int32[]) !read
    %keep = ResourceScatterUpdate(%bank:0, %place:0, %x:0) {writes=['bank']} !write
    %next = AddV2(%place:0, %place:0) -> (int32[])
    %move = AssignVariableOp(%pointer:0, %next:0) {writes=['pointer']} !write
    %loss = Loss(%x:0) -> (float32[])
    outputs %loss:0
"""


def test_a_variable_that_only_another_write_reads_is_written_by_the_stage_of_that_write() -> None:
    """That stage stores the variable: the write of another stage would change a copy only."""
    names = ["place", "keep", "next", "move"]
    assert writers(POINTER, names, takes(0, "variable bank"), takes(1, "")) == [names, []]


def test_writes_of_one_variable_stay_together_in_their_order() -> None:
    text = WRITES.replace(
        "%loss =",
        "%again = AssignVariableOp(%average:0, %read:0) {writes=['average']} !write ^%assign 'program: in order'\n"
        "    %loss =",
    )
    found = writers(text, ["assign", "again"], takes(0, "variable w"), takes(1, ""))
    assert found == [["read", "assign", "again"], []]


def test_control_edges_to_what_does_not_run_once_are_dropped() -> None:
    text = WRITES.replace("!write", "!write ^%other 'program: in order'").replace(
        "%read =", "%other = NoOp()\n    %read ="
    )
    _, (built,) = once(text, ["assign"], takes(0, "variable w"))
    assert nodes_of(built) == ["read", "assign"]
    assert all(not node.controls for node in built.graph.nodes)


def test_a_value_read_after_a_write_brings_that_write_along() -> None:
    text = WRITES.replace(
        "%loss =", "%after = ReadVariableOp(%average:0) -> (float32[4]) !read ^%assign 'program: in order'\n    %loss ="
    )
    found = writers(text, ["assign", "after"], takes(0, "variable w"), takes(1, "once %after:0 float32[4]"))
    assert found[1] == ["read", "assign", "after"]


def test_shapes_of_activations_are_those_of_the_whole_batch() -> None:
    """The node that stands for a shape takes its place, so that no activation is computed."""
    text = """
        inputs %x
        %x = arg() -> (float32[?,4])
        %rows = rows() -> (int64[3])
        %h = Forward(%x:0) -> (float32[?,4])
        %shape = Shape(%h:0) -> (int32[2])
        %of_batch = Cast(%rows:0) {stands_for='%shape:0'} -> (int32[2])
        %zeros = Fill(%shape:0) -> (float32[?,4])
        outputs %h:0
    """
    _, (built,) = once(text, ["zeros"], takes(0, "once %zeros:0 float32[?,4]"))
    assert nodes_of(built) == ["of_batch", "zeros"]
    assert [(port.role, port.name) for port in built.inputs] == [("rows", "rows")]
