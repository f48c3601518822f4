"""Sums of gradients to which the backward calls add themselves."""

from __future__ import annotations

import dataclasses

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.text import print_graph
from dapple_tf.graph_passes.passes.add_in_place import AddInPlace
from dapple_tf.graph_passes.passes.verify_pipeline import verify_sums_in_place
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from tests.graph_passes.builders import assert_graph, call_graph, function, functions_of, graph, refused
from tests.graph_passes.whole import Kind, whole_graph

BACKWARD = """
    function stage1/backward
    takes gradient float32[?,4] 'h' as %dh
    takes variable resource[] 'w' as %w
    gives gradient float32[?,4] 'x' from %dx:0
    gives variable float32[4] 'w' from %dw:0
    gives variable float32[2] 'v' from %dv:0
    gives slices float32[?,4] 'e' from %dh:0
      %r = ReadVariableOp(%w:0) -> (float32[4]) !read
      %dx = Mul(%dh:0, %r:0) -> (float32[?,4])
      %dw = Sum(%dh:0) -> (float32[4])
      %dv = Sum(%dx:0) -> (float32[2])
      end
"""

ADDING = """
    function stage1/backward
    takes gradient float32[?,4] 'h'
    takes variable resource[] 'w'
    takes sum resource[] 'w'
    takes sum resource[] 'v'
    gives gradient float32[?,4] 'x'
    gives slices float32[?,4] 'e'
      graph stage1/backward
      inputs %dh %w %sum/0 %sum/1
      %sum/0 = sum() {port='w'} -> (resource[])
      %sum/1 = sum() {port='v'} -> (resource[])
      %dh = gradient() {port='h'} -> (float32[?,4])
      %w = variable() {port='w'} -> (resource[])
      %r = ReadVariableOp(%w:0) -> (float32[4]) !read
      %dx = Mul(%dh:0, %r:0) -> (float32[?,4])
      %dw = Sum(%dh:0) -> (float32[4])
      %dv = Sum(%dx:0) -> (float32[2])
      %sum/0/add = AssignAddVariableOp(%sum/0:0, %dw:0) {dtype=dtype('float32'), writes=[]} !write
      %sum/1/add = AssignAddVariableOp(%sum/1:0, %dv:0) {dtype=dtype('float32'), writes=[]} !write
      outputs %dx:0 %dh:0
      end
"""

CALLS = """
    %a = forward() {micro_batch=0, replica=0, stage=0} -> (float32[?,4])
    %stage1/replica0/mbM/backward = backward(%a:0) {call} -> (float32[?,4], float32[4], float32[2], float32[?,4])
"""
SECOND = """
    %stage1/replica0/mb1/backward = backward(%a:0) {call} -> (float32[?,4], float32[4], float32[2], float32[?,4])
    | ^%stage1/replica0/mb0/backward 'order' ^%stage1/replica0/mb0/accumulate 'order, whose gradients are added up'
"""
SUMS = """
    %stage1/replica0/mb0/accumulate = accumulate(%stage1/replica0/mb0/backward:1, %stage1/replica0/mb0/backward:2)
    | {place, first=True, variables=['w', 'v']}
    %stage1/replica0/mb1/accumulate = accumulate(%stage1/replica0/mb1/backward:1, %stage1/replica0/mb1/backward:2)
    | {place, first=False, variables=['w', 'v']} ^%stage1/replica0/mb0/accumulate 'accumulate: micro-batch 1 after 0'
"""
END = """
    %stage1/replica0/gradients = gradients() {place, variables=['w', 'v']} -> (float32[4], float32[2])
    | ^%stage1/replica0/mb1/accumulate 'accumulate: all micro-batches are summed'
    %rows = gather_slices(%stage1/replica0/mb0/backward:3, %stage1/replica0/mb1/backward:3) -> (float32[?,4])
"""
BEFORE = CALLS.replace("M", "0") + SUMS.split("%stage1/replica0/mb1")[0] + SECOND
BEFORE += "    %stage1/replica0/mb1" + SUMS.split("%stage1/replica0/mb1", 1)[1] + END

AFTER = """
    %a = forward() {micro_batch=0, replica=0, stage=0} -> (float32[?,4])
    %stage1/replica0/clear_sums = clear_sums() {place, variables=['w', 'v']}
    %stage1/replica0/mb0/backward = backward(%a:0) {call} -> (float32[?,4], float32[?,4])
    | ^%stage1/replica0/clear_sums 'sum: it is cleared before'
    %stage1/replica0/mb1/backward = backward(%a:0) {call} -> (float32[?,4], float32[?,4])
    | ^%stage1/replica0/mb0/backward 'order'
    %stage1/replica0/gradients = gradients() {place, variables=['w', 'v']} -> (float32[4], float32[2])
    | ^%stage1/replica0/mb1/backward 'accumulate: all micro-batches are summed'
    %rows = gather_slices(%stage1/replica0/mb0/backward:1, %stage1/replica0/mb1/backward:1) -> (float32[?,4])
"""


def two(schedule: str = "dapple-a") -> AddInPlace:
    """The pass for two stages and two micro-batches."""
    return AddInPlace(ScheduleSpec.parse(schedule).build(2, 2))


def test_calls_add_their_gradients_and_return_the_rest() -> None:
    result = two()(call_graph(BEFORE, *functions_of(BACKWARD)))
    assert_graph(result, AFTER)
    (wanted,) = functions_of(ADDING)
    (found,) = result.functions
    assert (found.inputs, found.outputs) == (wanted.inputs, wanted.outputs)
    assert print_graph(found.graph) == print_graph(wanted.graph)


def test_a_stage_that_runs_backwards_in_another_order_keeps_its_sums() -> None:
    """Sums are added in micro-batch order, whatever the schedule is."""
    schedule = parse_schedule("0F0 0F1 0B0 0B1; 1F0 1F1 1B1 1B0")
    before = call_graph(BEFORE, *functions_of(BACKWARD))
    assert AddInPlace(schedule)(before) == before.sorted()


def test_sums_in_buckets_stay() -> None:
    """The last call gives its gradients one by one, so that AllReduce can start."""
    before = call_graph(BEFORE.replace(", first=", ", bucket=0, first="), *functions_of(BACKWARD))
    assert two()(before) == before.sorted()


def test_a_function_without_gradients_of_weights_is_unchanged() -> None:
    before = call_graph(CALLS.replace("M", "0"), function("stage1/backward", "gradient h", "gradient x"))
    assert two()(before) == before.sorted()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (" ^%stage1/replica0/clear_sums 'sum: it is cleared before'", "", "run after 'stage1/replica0/clear_sums'"),
        (
            "    | ^%stage1/replica0/mb1/backward 'accumulate: all micro-batches are summed'\n",
            "",
            "'stage1/replica0/gradients' run after 'stage1/replica0/mb1/backward', which adds to its sums",
        ),
    ],
)
def test_sums_that_are_cleared_or_read_at_any_time_are_refused(old: str, new: str, said: str) -> None:
    schedule = parse_schedule("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1")
    text = AFTER + "%b = forward() {micro_batch=0, replica=0, stage=1}\n"
    idle = (
        "%stage0/replica0/mbM/backward = backward() {function='stage0/backward', micro_batch=M, replica=0, stage=0}\n"
    )
    text += idle.replace("M", "0") + idle.replace("M", "1")
    functions = (*functions_of(ADDING), function("stage0/backward"))
    verify_sums_in_place(call_graph(text, *functions), schedule)
    assert text.count(old) == 1
    with refused(GraphError, said):
        verify_sums_in_place(call_graph(text.replace(old, new), *functions), schedule)
    with refused(GraphError, "the calls of stage 1 add their gradients in the order [1, 0]"):
        verify_sums_in_place(call_graph(text, *functions), parse_schedule("0F0 0F1 0B0 0B1; 1F0 1F1 1B1 1B0"))


@pytest.mark.parametrize("kind", [Kind((2, 1), 2, overlap=True), Kind((2, 2), 3, overlap=True)])
def test_buckets_of_the_last_micro_batch_follow_the_sums_of_the_others(kind: Kind) -> None:
    result = AddInPlace(kind.build_schedule())(whole_graph(kind))
    last = kind.micro_batches - 1
    buckets = [node for node in result.nodes if node.op == "accumulate"]
    assert {(node.integer("stage"), node.integer("micro_batch")) for node in buckets} == {
        (stage, last) for stage, count in enumerate(kind.replicas) if count > 1
    }
    verify_sums_in_place(result, kind.build_schedule())
    for node in buckets:
        call = f"stage{node.integer('stage')}/replica{node.integer('replica')}/mb{last - 1}/backward"
        edges = tuple(control for control in node.controls if control.source != call)
        early = [dataclasses.replace(n, controls=edges) if n is node else n for n in result.nodes]
        with refused(GraphError, f"no edge makes {node.name!r} run after {call!r}, which adds to its sums"):
            verify_sums_in_place(result.replace(nodes=tuple(early)), kind.build_schedule())


@pytest.mark.parametrize("kind", [Kind((2, 1), 3), Kind((1, 2), 2, schedule="zb-h1", state=True, sparse=True)])
def test_whole_pipelines_have_no_accumulation_left(kind: Kind) -> None:
    result = AddInPlace(kind.build_schedule())(whole_graph(kind))
    assert not [node.name for node in result.nodes if node.op == "accumulate"]
    verify_sums_in_place(result, kind.build_schedule())


def test_the_sums_are_printed_and_read_as_other_inputs() -> None:
    (adding,) = functions_of(ADDING)
    assert graph(ADDING).functions == (adding,)
