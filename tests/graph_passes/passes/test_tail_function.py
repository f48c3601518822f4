"""The function of a model's tail, cut from the differentiated graph."""

from __future__ import annotations

from graph_passes.analysis.layers import find_layers
from graph_passes.analysis.tail import TailInput, mark_tail
from graph_passes.errors import PartitionError
from graph_passes.ir.graph import Function, Graph, Value
from graph_passes.passes.backward import StageGradients, prune_gradients, split_backward
from graph_passes.passes.partition import partition
from graph_passes.passes.tail_function import build_tail
from tests.graph_passes.builders import graph, refused, value

MODEL = """
    inputs %x %labels
    %x = arg() -> (float32[?,4])
    %labels = arg() -> (float32[?,4])
    %w = variable() -> (resource[])
    %t = variable() -> (resource[])
    %r = ReadVariableOp(%w:0) -> (float32[4,4]) !read
    %z = MatMul(%x:0, %r:0) -> (float32[?,4])
    %y = Mul(%labels:0, %labels:0) -> (float32[?,4])
    %p = ReadVariableOp(%t:0) -> (float32[]) !read
    %scores = MatMul(%z:0, %y:0) -> (float32[?,?])
    %scaled = Mul(%scores:0, %p:0) -> (float32[?,?])
    %loss = Mean(%scaled:0) -> (float32[])
    outputs %loss:0 %scores:0
"""
GRADIENTS = """
    %dscaled = MeanGrad(%scaled:0) -> (float32[?,?])
    %dp = MulGrad(%dscaled:0, %scores:0) -> (float32[])
    %dz = MatMulGrad(%dscaled:0, %y:0, %z:0) -> (float32[?,4])
    %seed = Placeholder() -> (float32[?,4])
    %dw = MatMul(%x:0, %seed:0) -> (float32[4,4])
"""
TAIL = {"y", "p", "scores", "scaled", "loss"}
OF_STAGE = StageGradients(((value("z"), "seed"),), (), (("w", value("dw")),))
OF_TAIL = StageGradients((), ((value("z"), value("dz")),), (("t", value("dp")),))


def model(text: str = MODEL) -> Graph:
    return mark_tail(graph(text), TAIL, [TailInput(Value("z"))])


def split(joint: str = MODEL + GRADIENTS, of_tail: StageGradients = OF_TAIL) -> tuple[Function, Function, Function]:
    stages = partition(find_layers(model()), [])
    gradients = prune_gradients(graph(joint), (OF_STAGE, of_tail))
    ((forward, backward),) = split_backward(stages, graph(joint), gradients)
    tail = build_tail(stages, graph(joint), gradients[-1])
    assert tail is not None
    return forward, backward, tail


def inputs(function: Function) -> set[tuple[str, str]]:
    return {(port.role, port.name) for port in function.inputs}


def outputs(function: Function) -> list[tuple[str, str]]:
    return [(port.role, port.name) for port in function.outputs]


def test_the_tail_has_the_loss_its_aux_outputs_and_all_its_gradients() -> None:
    _, _, tail = split()
    assert tail.name == "stage0/tail"
    assert inputs(tail) == {("arg", "labels"), ("boundary", "%z:0"), ("variable", "t")}
    assert outputs(tail) == [("loss", "loss"), ("aux", "0"), ("gradient", "%z:0"), ("variable", "t")]
    assert "r" not in tail.graph.by_name


def test_the_stage_gives_rows_and_takes_their_gradients() -> None:
    forward, backward, _ = split()
    assert outputs(forward) == [("boundary", "%z:0")]
    assert ("gradient", "%z:0") in inputs(backward)
    assert outputs(backward) == [("variable", "w")]


def test_what_a_custom_gradient_takes_of_the_stage_is_computed_again_from_the_whole_batch() -> None:
    joint = (MODEL + GRADIENTS).replace("%dz = MatMulGrad(%dscaled:0, %y:0, %z:0)", "%dz = Custom(%dscaled:0, %r:0)")
    _, _, tail = split(joint)
    assert ("variable", "w") in inputs(tail)


def test_a_node_of_the_frontier_gives_the_tail_no_other_output() -> None:
    text = (MODEL + GRADIENTS).replace(
        "%z = MatMul(%x:0, %r:0) -> (float32[?,4])", "%z = Two(%x:0, %r:0) -> (float32[?,4], float32[?,4])"
    )
    joint = text.replace("MatMulGrad(%dscaled:0, %y:0, %z:0)", "MatMulGrad(%dscaled:0, %y:0, %z:1)")
    with refused(PartitionError, "stage0/tail needs %z:1", "not an output of the last stage"):
        split(joint)


def test_a_model_without_a_tail_has_no_such_function() -> None:
    stages = partition(find_layers(graph(MODEL)), [])
    assert build_tail(stages, graph(MODEL), StageGradients()) is None


def test_the_tail_of_a_scaled_loss_takes_the_gradient_of_the_loss() -> None:
    joint = (MODEL + GRADIENTS).replace("MeanGrad(%scaled:0)", "MeanGrad(%scaled:0, %factor:0)")
    joint = joint.replace("%dscaled =", "%factor = Placeholder() -> (float32[])\n%dscaled =")
    of_tail = StageGradients(((value("loss"), "factor"),), OF_TAIL.boundary, OF_TAIL.variables)
    _, _, tail = split(joint, of_tail)
    assert ("seed", "loss") in inputs(tail)
    assert "factor" not in tail.graph.by_name
