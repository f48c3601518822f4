"""The function of a model's loss head, cut from the differentiated graph."""

from __future__ import annotations

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput, mark_loss_head
from dapple_tf.graph_passes.ir.graph import Function, Graph, Value
from dapple_tf.graph_passes.passes.backward import StageGradients, build_loss_head, prune_gradients, split_backward
from dapple_tf.graph_passes.passes.partition import partition
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
LOSS_HEAD = {"y", "p", "scores", "scaled", "loss"}
OF_STAGE = StageGradients(((value("z"), "seed"),), (), (("w", value("dw")),))
OF_LOSS_HEAD = StageGradients((), ((value("z"), value("dz")),), (("t", value("dp")),))


def model(text: str = MODEL) -> Graph:
    return mark_loss_head(graph(text), LOSS_HEAD, [LossHeadInput(Value("z"))])


def split(
    joint: str = MODEL + GRADIENTS, of_loss_head: StageGradients = OF_LOSS_HEAD
) -> tuple[Function, Function, Function]:
    stages = partition(find_layers(model()), [])
    gradients = prune_gradients(graph(joint), (OF_STAGE, of_loss_head))
    ((forward, backward),) = split_backward(stages, graph(joint), gradients)
    loss_head = build_loss_head(stages, graph(joint), gradients[-1])
    assert loss_head is not None
    return forward, backward, loss_head


def inputs(function: Function) -> set[tuple[str, str]]:
    return {(port.role, port.name) for port in function.inputs}


def outputs(function: Function) -> list[tuple[str, str]]:
    return [(port.role, port.name) for port in function.outputs]


def test_the_loss_head_has_the_loss_its_aux_outputs_and_all_its_gradients() -> None:
    _, _, loss_head = split()
    assert loss_head.name == "stage0/loss_head"
    assert inputs(loss_head) == {("arg", "labels"), ("boundary", "%z:0"), ("variable", "t")}
    assert outputs(loss_head) == [("loss", "loss"), ("aux", "0"), ("gradient", "%z:0"), ("variable", "t")]
    assert "r" not in loss_head.graph.by_name


def test_the_stage_gives_rows_and_takes_their_gradients() -> None:
    forward, backward, _ = split()
    assert outputs(forward) == [("boundary", "%z:0")]
    assert ("gradient", "%z:0") in inputs(backward)
    assert outputs(backward) == [("variable", "w")]


def test_what_a_custom_gradient_takes_of_the_stage_is_computed_again_from_the_whole_batch() -> None:
    joint = (MODEL + GRADIENTS).replace("%dz = MatMulGrad(%dscaled:0, %y:0, %z:0)", "%dz = Custom(%dscaled:0, %r:0)")
    _, _, loss_head = split(joint)
    assert ("variable", "w") in inputs(loss_head)


def test_a_node_that_gives_a_head_input_gives_the_loss_head_no_other_output() -> None:
    text = (MODEL + GRADIENTS).replace(
        "%z = MatMul(%x:0, %r:0) -> (float32[?,4])", "%z = Two(%x:0, %r:0) -> (float32[?,4], float32[?,4])"
    )
    joint = text.replace("MatMulGrad(%dscaled:0, %y:0, %z:0)", "MatMulGrad(%dscaled:0, %y:0, %z:1)")
    with refused(PartitionError, "stage0/loss_head needs %z:1", "not an output of the last stage"):
        split(joint)


def test_a_model_without_a_loss_head_has_no_such_function() -> None:
    stages = partition(find_layers(graph(MODEL)), [])
    assert build_loss_head(stages, graph(MODEL), StageGradients()) is None


def test_the_loss_head_of_a_scaled_loss_takes_the_gradient_of_the_loss() -> None:
    joint = (MODEL + GRADIENTS).replace("MeanGrad(%scaled:0)", "MeanGrad(%scaled:0, %factor:0)")
    joint = joint.replace("%dscaled =", "%factor = Placeholder() -> (float32[])\n%dscaled =")
    of_loss_head = StageGradients(((value("loss"), "factor"),), OF_LOSS_HEAD.boundary, OF_LOSS_HEAD.variables)
    _, _, loss_head = split(joint, of_loss_head)
    assert ("seed", "loss") in inputs(loss_head)
    assert "factor" not in loss_head.graph.by_name
