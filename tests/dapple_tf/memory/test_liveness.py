"""What a function's own tensors take at most, on graphs small enough to count by hand."""

from __future__ import annotations

from dapple_tf.memory.execution_order import execution_order
from dapple_tf.memory.liveness import buffer_value, peak_bytes
from graph_passes.ir.graph import Graph, Node, Value, attributes, tensor

VECTOR = tensor("float32", 10)  # 40 bytes


def op(name: str, kind: str, *inputs: str, outputs: int = 1, **attrs: int) -> Node:
    values = tuple(Value(text.partition(":")[0], int(text.partition(":")[2] or 0)) for text in inputs)
    return Node(name, kind, values, (VECTOR,) * outputs, attributes(dict(attrs)))


def graph(*nodes: Node, gives: str) -> Graph:
    inputs = tuple(node.name for node in nodes if not node.op[0].isupper())
    return Graph("f", nodes, inputs, tuple(Value(name) for name in gives.split()))


def peak(found: Graph, **owned: int) -> int:
    return peak_bytes(found, lambda value: found.type_of(value).bytes(), owned)


def test_inputs_are_the_callers_and_outputs_stay() -> None:
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), op("b", "MatMul", "a"), gives="b")) == 80
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), op("b", "MatMul", "x"), gives="a b")) == 80


def test_what_nobody_reads_any_more_is_freed() -> None:
    chain = [op(f"n{i}", "MatMul", f"n{i - 1}") for i in range(1, 6)]
    assert peak(graph(op("n0", "arg"), *chain, gives="n5")) == 80  # never more than a source and its result
    kept = [*chain, op("last", "MatMul", "n5", "n1")]
    assert peak(graph(op("n0", "arg"), *kept, gives="last")) == 120


def test_what_is_never_read_is_freed_at_once() -> None:
    nodes = [op("x", "arg"), op("a", "MatMul", "x"), op("b", "MatMul", "x"), op("c", "MatMul", "b")]
    assert peak(graph(*nodes, gives="c")) == 80


def test_element_wise_ops_write_over_their_last_reader_s_input() -> None:
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), op("b", "Relu", "a"), gives="b")) == 40
    # Not over an input of the caller's, nor over what is read again.
    assert peak(graph(op("x", "arg"), op("b", "Relu", "x"), op("c", "MatMul", "b"), gives="c")) == 80
    shared = [op("x", "arg"), op("a", "MatMul", "x"), op("b", "Relu", "a"), op("c", "MatMul", "b", "a")]
    assert peak(graph(*shared, gives="c")) == 120
    # An op that reads its input twice is its only reader still.
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), op("b", "Mul", "a", "a"), gives="b")) == 40


def test_an_op_of_another_size_or_type_takes_memory_of_its_own() -> None:
    half = Node("b", "Relu", (Value("a"),), (tensor("float32", 5),))
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), half, gives="b")) == 60
    other = Node("b", "Cast", (Value("a"),), (tensor("int32", 10),))
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), other, gives="b")) == 80


def test_views_constants_and_reads_of_variables_take_nothing() -> None:
    nodes = [op("w", "variable"), op("r", "ReadVariableOp", "w"), op("c", "Const"), op("v", "Reshape", "r", "c")]
    assert peak(graph(*nodes, gives="v")) == 0


def test_a_view_keeps_what_it_shows() -> None:
    nodes = [op("x", "arg"), op("a", "MatMul", "x"), op("v", "Identity", "a"), op("b", "MatMul", "x")]
    assert peak(graph(*nodes, op("c", "MatMul", "b"), gives="v c")) == 120


def test_parts_of_a_tensor_hold_all_of_it() -> None:
    whole = Node("a", "MatMul", (Value("x"),), (tensor("float32", 2, 10),))
    parts = op("p", "Unpack", "a", outputs=2, axis=0)
    found = graph(op("x", "arg"), whole, parts, op("b", "MatMul", "p:1"), gives="b")
    assert peak(found) == 120
    assert buffer_value(found, Value("p", 1), lambda value: found.type_of(value).bytes()) == Value("a")
    across = op("p", "Unpack", "a", outputs=2, axis=1)
    assert peak(graph(op("x", "arg"), whole, across, op("b", "MatMul", "p:1"), gives="b")) == 160


def test_a_sum_over_nothing_is_a_view() -> None:
    nodes = [op("x", "arg"), op("a", "MatMul", "x"), op("s", "Sum", "a"), op("b", "MatMul", "s")]
    assert peak(graph(*nodes, gives="b")) == 80
    small = Node("s", "Sum", (Value("a"),), (tensor("float32"),))
    assert peak(graph(*nodes[:2], small, gives="s")) == 44


def test_inputs_that_are_handed_over_count_until_they_are_read() -> None:
    nodes = [
        op("x", "stash"),
        op("y", "stash"),
        op("a", "MatMul", "x"),
        op("b", "MatMul", "a"),
        op("c", "Add", "b", "y"),
    ]
    found = graph(*nodes, gives="c")
    assert peak(found) == 80
    assert peak(found, x=40, y=40) == 120  # x and y and a, then y and a and b


def test_ops_run_as_they_become_ready() -> None:
    """So the gradient of a weight that the graph lists last is made before the chain has gone on to its end."""
    chain = [op("d2", "MatMul", "x"), op("d1", "MatMul", "d2"), op("d0", "MatMul", "d1")]
    weights = [op("w2", "MatMul", "x"), op("w1", "MatMul", "d2"), op("w0", "MatMul", "d1")]
    found = graph(op("x", "arg"), *chain, *weights, gives="d0 w2 w1 w0")
    assert [node.name for node in execution_order(found)] == ["x", "d2", "w2", "d1", "w1", "d0", "w0"]


def test_control_edges_are_waited_for() -> None:
    late = op("a", "MatMul", "x").after("b", "for the test")
    found = Graph("f", (op("x", "arg"), op("b", "MatMul", "x"), late), ("x",), (Value("a"),))
    assert [node.name for node in execution_order(found)] == ["x", "b", "a"]
