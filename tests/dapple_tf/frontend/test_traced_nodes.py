"""Nodes replaced by the ops of a function: their names, places and types."""

from __future__ import annotations

import pytest
import tensorflow as tf

from dapple_tf.frontend.traced_nodes import replacement_nodes
from dapple_tf.graph_passes.ir.graph import OTHER, Control, Node, Value, attributes, tensor

NODE = Node(
    "net/noise",
    "Noise",
    (Value("a", 1), Value("b")),
    (tensor("float32", None, 2),),
    attributes({"layer": "net/drop", "kind": "uniform"}),
    (Control("say", "effect"),),
    device="/device:CPU:1",
)
INPUTS = [(Value("a", 1), tensor("float32", None, 2)), (Value("b"), tensor("float32", OTHER, 2))]


def replaced(taken: set[str]) -> dict[str, Node]:
    nodes = replacement_nodes(NODE, lambda a, b: tf.exp(a) * tf.tanh(tf.exp(b)), INPUTS, taken)
    assert nodes[-1].name == "net/noise"
    return {node.name: node for node in nodes}


def test_the_last_node_takes_over_the_name_and_the_type_and_all_have_the_place() -> None:
    nodes = replaced({"net/noise"})
    assert {name: (node.op, node.inputs) for name, node in nodes.items()} == {
        "net/noise/Exp": ("Exp", (Value("a", 1),)),
        "net/noise/Exp_1": ("Exp", (Value("b"),)),
        "net/noise/Tanh": ("Tanh", (Value("net/noise/Exp_1"),)),
        "net/noise": ("Mul", (Value("net/noise/Exp"), Value("net/noise/Tanh"))),
    }
    assert nodes["net/noise"].outputs == NODE.outputs
    for node in nodes.values():
        assert node.attr("layer") == "net/drop"
        assert not node.has("kind")
        assert (node.controls, node.device) == (NODE.controls, NODE.device)


def test_unknown_dimensions_inside_are_not_the_batch() -> None:
    assert replaced(set())["net/noise/Tanh"].outputs == (tensor("float32", OTHER, 2),)


@pytest.mark.parametrize("taken", [{"net/noise/Exp"}, {"net/noise/Exp_1"}, {"net/noise/Exp", "net/noise/Exp_1"}])
def test_no_name_is_given_twice(taken: set[str]) -> None:
    nodes = replaced(taken)
    assert len(nodes) == 4
    assert not nodes.keys() & taken
