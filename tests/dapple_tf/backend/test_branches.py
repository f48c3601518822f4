"""TensorFlow functions of the branches of conditions: built, named, and kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.backend.branches import build_branches
from dapple_tf.backend.stage_function import build_function
from dapple_tf.graph_passes.ir.graph import (
    DType,
    Effect,
    Function,
    FunctionRef,
    Graph,
    Node,
    Port,
    Value,
    attributes,
    tensor,
)

HANDLE, SCALAR, FLAG = tensor("resource"), tensor("float32"), tensor("bool")


def add(name: str, value: str, guard: tuple[str, str]) -> Node:
    """A node of a branch that adds a value to the variable v."""
    attrs = attributes({"dtype": DType("float32"), "guard": guard, "writes": ("v",)})
    inputs = (Value("v"), Value(value))
    return Node(name, "AssignAddVariableOp", inputs, (), attrs, effect=Effect.WRITE).after(guard[0], "condition")


def marker(name: str, pred: str, **attrs: Any) -> Node:
    fixed = {"Tcond": DType("bool"), "Tout": (), "output_shapes": (), "open": True}
    return Node(name, "If", (Value(pred),), (), attributes({**fixed, **attrs}))


def function() -> Function:
    """Adds a where p, and b too where q besides; takes away a where not p."""
    ports = (
        Port("combined", "p", FLAG),
        Port("combined", "q", FLAG),
        *(Port("gradient", name, SCALAR) for name in "ab"),
        Port("variable", "v", HANDLE),
    )
    inputs = tuple(Node(port.name, port.role, (), (port.type,), attributes({"port": port.name})) for port in ports)
    attrs = attributes({"T": DType("float32"), "guard": ("if", "else_branch")})
    negative = Node("n", "Neg", (Value("a"),), (SCALAR,), attrs)
    body = (
        marker("if", "p"),
        add("add_a", "a", ("if", "then_branch")),
        marker("inner", "q", guard=("if", "then_branch")).after("if", "condition"),
        add("add_b", "b", ("inner", "then_branch")),
        negative,
        add("take_a", "n", ("if", "else_branch")),
    )
    graph = Graph("stage0/update", (*inputs, *body), tuple(port.name for port in ports))
    return Function("stage0/update", graph, ports, ())


@pytest.mark.parametrize(
    ("p", "q", "expected"), [(True, True, 13.0), (True, False, 3.0), (False, True, -1.0), (False, False, -1.0)]
)
def test_conditions_run_the_branch_that_their_predicate_chooses(p: bool, q: bool, expected: float) -> None:
    v = tf.Variable(1.0)
    built = build_branches(function(), {}, {})
    step = build_function(built.function, {}, built.library, whole=True)
    gc.collect()
    step(tf.constant(p), tf.constant(q), tf.constant(2.0), tf.constant(10.0), v.handle)
    assert v.numpy() == expected


def test_branches_get_the_names_of_their_functions_and_inner_ones_come_along() -> None:
    built = build_branches(function(), {}, {})
    (node,) = (node for node in built.function.graph.nodes if node.op == "If")
    reference = node.attr("then_branch")
    assert isinstance(reference, FunctionRef)
    assert reference.name in built.library
    assert len(built.library) == len(built.functions) == 4
    assert built.function.graph.functions == ()


def test_a_function_without_conditions_stays_as_it_is() -> None:
    plain = Function("f", Graph("f", (Node("x", "arg", (), (SCALAR,)),), ("x",)), (Port("arg", "x", SCALAR),), ())
    built = build_branches(plain, {}, {})
    assert (built.function, built.library, built.functions) == (plain, {}, ())
