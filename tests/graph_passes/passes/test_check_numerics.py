"""A checked step checks the loss and the complete gradients of each stage."""

from __future__ import annotations

from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, attributes, tensor
from dapple_tf.graph_passes.passes.check_numerics import CheckNumerics

KIND = tensor("float64", 4)


def test_only_the_loss_and_the_complete_gradients_are_checked() -> None:
    graph = Graph(
        "g",
        (
            Node("x", "input", (), (KIND,), attributes({"index": 0})),
            Node(
                "stage0/reduced_gradients",
                "reduced_gradients",
                (Value("x"),),
                (KIND,),
                attributes({"stage": 0, "variables": ("w",)}),
            ),
            Node(
                "stage0/gather_slices/t",
                "gather_slices",
                (Value("x"),),
                (KIND,),
                attributes({"stage": 0, "variable": "t"}),
            ),
            Node("out/0", "merge", (Value("x"),), (KIND,), attributes({"kind": "concat"})),
            Node("loss", "merge", (Value("x"),), (KIND,), attributes({"kind": "mean"})),
        ),
        ("x",),
        (Value("loss"), Value("out/0")),
    )
    checked = CheckNumerics()(graph)
    assert [node.name for node in checked.nodes if node.has("check")] == [
        "stage0/reduced_gradients",
        "stage0/gather_slices/t",
        "loss",
    ]
    assert [node.inputs for node in checked.nodes] == [node.inputs for node in graph.nodes]
    assert [node.name for node in CheckNumerics(gradients=False)(graph).nodes if node.has("check")] == ["loss"]
