"""Floating-point operations and bytes of an op, from hand-worked shapes."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.analysis.op_costs import flops, moved_bytes, value_bytes
from dapple_tf.graph_passes.ir.graph import Graph, Node, Shape, Value
from tests.graph_passes.builders import graph

Dims = tuple[int | None, ...]


def op(name: str, *inputs: str, attrs: str = "") -> Graph:
    """A node ``op`` of these inputs, which are nodes of unknown shape."""
    nodes = "\n".join(f"%{i} = arg() -> (float32[*])" for i in inputs)
    values = ", ".join(f"%{i}:0" for i in inputs)
    return graph(f"{nodes}\n%op = {name}({values}) {{{attrs}}} -> (float32[*])".replace(" {}", ""))


@pytest.mark.parametrize(
    ("name", "attrs", "dims", "out", "operations"),
    [
        ("MatMul", "transpose_a=False", [(2, 3), (3, 4)], (2, 4), 2 * 2 * 3 * 4),
        ("MatMul", "transpose_a=True", [(3, 2), (3, 4)], (2, 4), 2 * 2 * 3 * 4),
        ("MatMul", "transpose_a=False", [(2, None), (None, 4)], (2, 4), 2 * 2 * 1 * 4),  # unknown counts as 1
        ("BatchMatMulV2", "adj_x=False", [(5, 2, 3), (5, 3, 4)], (5, 2, 4), 2 * 5 * 2 * 3 * 4),
        ("BatchMatMulV2", "adj_x=True", [(5, 3, 2), (5, 3, 4)], (5, 2, 4), 2 * 5 * 2 * 3 * 4),
        ("Conv2D", "", [(1, 8, 8, 3), (5, 5, 3, 7)], (1, 4, 4, 7), 2 * (4 * 4 * 7) * (5 * 5 * 3)),
        ("DepthwiseConv2dNative", "", [(1, 8, 8, 3), (5, 5, 3, 2)], (1, 4, 4, 6), 2 * (4 * 4 * 6) * (5 * 5)),
        (
            "Conv2DBackpropInput",
            "",
            [(4,), (5, 5, 3, 7), (1, 4, 4, 7)],
            (1, 8, 8, 3),
            2 * (4 * 4 * 7) * (5 * 5 * 3),
        ),
        (
            "Conv2DBackpropFilter",
            "",
            [(1, 8, 8, 3), (4,), (1, 4, 4, 7)],
            (5, 5, 3, 7),
            2 * (4 * 4 * 7) * (5 * 5 * 3),
        ),
        (
            "DepthwiseConv2dNativeBackpropInput",
            "",
            [(4,), (5, 5, 3, 2), (1, 4, 4, 6)],
            (1, 8, 8, 3),
            2 * (4 * 4 * 6) * (5 * 5),
        ),
        (
            "DepthwiseConv2dNativeBackpropFilter",
            "",
            [(1, 8, 8, 3), (4,), (1, 4, 4, 6)],
            (5, 5, 3, 2),
            2 * (4 * 4 * 6) * (5 * 5),
        ),
        ("Einsum", "equation=b'abc,cd->abd'", [(2, 3, 4), (4, 5)], (2, 3, 5), 2 * (2 * 3 * 5) * 4),
        ("Einsum", "equation=b'...c,cd->...d'", [(2, 3, 4), (4, 5)], (2, 3, 5), 2 * (2 * 3 * 5) * 4),
        ("Exp", "", [(2, 3)], (2, 3), 0),
    ],
)
def test_floating_point_operations(name: str, attrs: str, dims: list[Dims], out: Dims, operations: int) -> None:
    names = [f"i{i}" for i in range(len(dims))]
    whole = op(name, *names, attrs=attrs)
    shapes = {"op": (Shape(out),), **{n: (Shape(d),) for n, d in zip(names, dims, strict=True)}}
    assert flops(whole.node("op"), shapes) == operations


def test_an_op_of_unknown_shapes_counts_no_operations() -> None:
    whole = op("MatMul", "a", "b", attrs="transpose_a=False")
    assert flops(whole.node("op"), {}) == 0
    assert flops(whole.node("op"), {"op": (Shape((2, 4)),)}) == 0
    assert flops(whole.node("op"), {"op": (Shape((2, 4)),), "a": (Shape(None),)}) == 0
    assert flops(Node("none", "Exp"), {"none": ()}) == 0


def test_an_op_reads_each_input_and_writes_each_output_once() -> None:
    whole = graph(
        """
        %a = arg() -> (float32[?,4])
        %w = variable() -> (resource[])
        %op = Op(%a:0, %w:0) -> (int64[2], float32[*])
        """
    )
    shapes = {"op": (Shape((2,)), Shape((3, 5)))}
    assert moved_bytes(whole, whole.node("op"), shapes, unknown=8) == 4 * 8 * 4 + 0 + 8 * 2 + 4 * 15


def test_the_bytes_of_a_tensor_are_of_its_inferred_shape_where_there_is_one() -> None:
    whole = graph("%a = arg() -> (float32[?,4])")
    assert value_bytes(whole, Value("a"), {}, unknown=10) == 160
    assert value_bytes(whole, Value("a"), {"a": (Shape((2, 4)),)}) == 32
    assert value_bytes(whole, Value("a"), {"a": (Shape(None),)}, unknown=3) == 48
