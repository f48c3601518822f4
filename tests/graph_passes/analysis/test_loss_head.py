"""The marks of a model's loss head: which nodes run once on the whole batch, and which rows they take."""

from __future__ import annotations

from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput, find_head_inputs, find_loss_head, mark_loss_head
from dapple_tf.graph_passes.ir.graph import Graph, Value
from dapple_tf.graph_passes.passes.partition import partition
from tests.graph_passes.builders import graph

CONTRASTIVE = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %w = variable() -> (resource[])
    %v = variable() -> (resource[])
    %r = ReadVariableOp(%w:0) -> (float32[4,4]) !read
    %s = ReadVariableOp(%v:0) -> (float32[4,4]) !read
    %early = MatMul(%x:0, %r:0) -> (float32[?,4])
    %z = MatMul(%early:0, %s:0) -> (float32[?,4])
    %scores = MatMul(%z:0, %early:0) -> (float32[?,?])
    %loss = Mean(%scores:0) -> (float32[])
    outputs %loss:0 %z:0
"""
HEAD_INPUTS = (LossHeadInput(Value("early")), LossHeadInput(Value("z"), 0, 2))


def marked() -> Graph:
    return mark_loss_head(graph(CONTRASTIVE), {"scores", "loss"}, HEAD_INPUTS[::-1])


def test_marks_are_found_again_in_the_order_of_the_graph() -> None:
    assert find_loss_head(marked()) == {"scores", "loss"}
    assert find_head_inputs(marked()) == HEAD_INPUTS


def test_a_graph_without_marks_has_no_loss_head() -> None:
    assert (find_loss_head(graph(CONTRASTIVE)), find_head_inputs(graph(CONTRASTIVE))) == (frozenset(), ())


def test_several_outputs_of_one_node_can_be_taken() -> None:
    text = CONTRASTIVE.replace(
        "%z = MatMul(%early:0, %s:0) -> (float32[?,4])", "%z = TopKV2(%early:0) -> (float32[?,4], int32[?,4])"
    )
    both = (LossHeadInput(Value("z", 0)), LossHeadInput(Value("z", 1), 1))
    assert find_head_inputs(mark_loss_head(graph(text), {"loss"}, both)) == both


def test_the_loss_head_is_in_no_layer_and_its_rows_cross_to_the_last_stage() -> None:
    layers = find_layers(marked())
    assert [layer.name for layer in layers.layers] == ["early", "z"]
    assert layers.cut(1).crossing == (Value("early"),)
    stages = partition(layers, [1])
    assert [stage.outputs for stage in stages.stages] == [(Value("early"),), (Value("early"), Value("z"))]
    assert (layers.loss_head, layers.head_inputs) == ({"scores", "loss"}, HEAD_INPUTS)
