"""Peak memory of a function's own tensors, on graphs small enough to count by hand."""

from __future__ import annotations

from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, attributes, tensor
from dapple_tf.memory.liveness import buffer_value, execution_order, packed_bytes, peak_bytes

VECTOR = tensor("float32", 10)  # 40 bytes


def op(name: str, kind: str, *inputs: str, outputs: int = 1, **attrs: int) -> Node:
    values = tuple(Value(text.partition(":")[0], int(text.partition(":")[2] or 0)) for text in inputs)
    return Node(name, kind, values, (VECTOR,) * outputs, attributes(dict(attrs)))


def graph(*nodes: Node, gives: str) -> Graph:
    inputs = tuple(node.name for node in nodes if not node.op[0].isupper())
    return Graph("f", nodes, inputs, tuple(Value(name) for name in gives.split()))


def peak(found: Graph) -> int:
    return peak_bytes(found, lambda value: found.type_of(value).bytes())


def test_inputs_do_not_count_and_outputs_stay_live() -> None:
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), op("b", "MatMul", "a"), gives="b")) == 80
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), op("b", "MatMul", "x"), gives="a b")) == 80


def test_a_tensor_is_freed_after_its_last_reader() -> None:
    chain = [op(f"n{i}", "MatMul", f"n{i - 1}") for i in range(1, 6)]
    assert peak(graph(op("n0", "arg"), *chain, gives="n5")) == 80  # at most an input and an output of one op
    longer = [*chain, op("last", "MatMul", "n5", "n1")]
    assert peak(graph(op("n0", "arg"), *longer, gives="last")) == 120


def test_a_tensor_without_readers_is_freed_at_once() -> None:
    nodes = [op("x", "arg"), op("a", "MatMul", "x"), op("b", "MatMul", "x"), op("c", "MatMul", "b")]
    assert peak(graph(*nodes, gives="c")) == 80


def test_element_wise_ops_overwrite_an_input_that_nothing_else_reads() -> None:
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), op("b", "Relu", "a"), gives="b")) == 40
    # Neither an input of the function, nor a tensor that is read later.
    assert peak(graph(op("x", "arg"), op("b", "Relu", "x"), op("c", "MatMul", "b"), gives="c")) == 80
    shared = [op("x", "arg"), op("a", "MatMul", "x"), op("b", "Relu", "a"), op("c", "MatMul", "b", "a")]
    assert peak(graph(*shared, gives="c")) == 120
    # An op that reads an input twice is its only reader.
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), op("b", "Mul", "a", "a"), gives="b")) == 40


def test_an_output_of_another_size_or_dtype_is_allocated() -> None:
    half = Node("b", "Relu", (Value("a"),), (tensor("float32", 5),))
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), half, gives="b")) == 60
    other = Node("b", "Cast", (Value("a"),), (tensor("int32", 10),))
    assert peak(graph(op("x", "arg"), op("a", "MatMul", "x"), other, gives="b")) == 80


def test_views_constants_and_reads_of_variables_allocate_nothing() -> None:
    nodes = [op("w", "variable"), op("r", "ReadVariableOp", "w"), op("c", "Const"), op("v", "Reshape", "r", "c")]
    assert peak(graph(*nodes, gives="v")) == 0


def test_a_view_keeps_its_tensor_live() -> None:
    nodes = [op("x", "arg"), op("a", "MatMul", "x"), op("v", "Identity", "a"), op("b", "MatMul", "x")]
    assert peak(graph(*nodes, op("c", "MatMul", "b"), gives="v c")) == 120


def test_a_part_of_an_unpacked_tensor_keeps_the_whole_live() -> None:
    whole = Node("a", "MatMul", (Value("x"),), (tensor("float32", 2, 10),))
    parts = op("p", "Unpack", "a", outputs=2, axis=0)
    found = graph(op("x", "arg"), whole, parts, op("b", "MatMul", "p:1"), gives="b")
    assert peak(found) == 120
    assert buffer_value(found, Value("p", 1), lambda value: found.type_of(value).bytes()) == Value("a")
    across = op("p", "Unpack", "a", outputs=2, axis=1)
    assert peak(graph(op("x", "arg"), whole, across, op("b", "MatMul", "p:1"), gives="b")) == 160


def test_a_sum_that_does_not_change_the_size_is_a_view() -> None:
    nodes = [op("x", "arg"), op("a", "MatMul", "x"), op("s", "Sum", "a"), op("b", "MatMul", "s")]
    assert peak(graph(*nodes, gives="b")) == 80
    small = Node("s", "Sum", (Value("a"),), (tensor("float32"),))
    assert peak(graph(*nodes[:2], small, gives="s")) == 44


def test_ops_run_in_the_order_in_which_they_become_ready() -> None:
    """So a weight's gradient that is last in the graph is computed before the chain of gradients ends."""
    chain = [op("d2", "MatMul", "x"), op("d1", "MatMul", "d2"), op("d0", "MatMul", "d1")]
    weights = [op("w2", "MatMul", "x"), op("w1", "MatMul", "d2"), op("w0", "MatMul", "d1")]
    found = graph(op("x", "arg"), *chain, *weights, gives="d0 w2 w1 w0")
    assert [node.name for node in execution_order(found)] == ["x", "d2", "w2", "d1", "w1", "d0", "w0"]


def test_an_op_runs_after_the_sources_of_its_control_edges() -> None:
    late = op("a", "MatMul", "x").after("b", "for the test")
    found = Graph("f", (op("x", "arg"), op("b", "MatMul", "x"), late), ("x",), (Value("a"),))
    assert [node.name for node in execution_order(found)] == ["x", "b", "a"]


def product(m: int, k: int, n: int, kind: str = "MatMul") -> Graph:
    inputs = [Node("a", "arg", (), (tensor("float32", m, k),)), Node("b", "arg", (), (tensor("float32", k, n),))]
    result = Node("c", kind, (Value("a"), Value("b")), (tensor("float32", m, n),))
    return Graph("f", (*inputs, result), ("a", "b"), (Value("c"),))


def packed(found: Graph) -> int:
    return packed_bytes(found, found.node("c"), lambda value: found.type_of(value).bytes())


def test_a_matrix_product_packs_copies_of_both_operands() -> None:
    assert packed(product(512, 256, 128)) == (512 * 256 + 256 * 128) * 4
    assert packed(product(64, 8 * 832, 32)) == (64 + 32) * 832 * 4  # a part of a long axis at a time
    assert packed(product(64, 0, 32)) == packed(product(0, 8, 32)) == 0
    assert packed(product(64, 64, 64, "Add")) == 0


def test_packed_copies_count_only_while_the_product_runs_and_where_operands_are_packed() -> None:
    """While the product runs there are its 4 bytes and 16 of copies; then these are gone, and there are 9 more."""
    first = product(1, 2, 1)
    found = first.replace(nodes=(*first.nodes, op("d", "Transpose", "c")), outputs=(Value("d"), Value("c")))
    sizes = {"a": 8, "b": 8, "c": 4, "d": 9}
    assert peak_bytes(found, lambda value: sizes[value.node]) == 4 + 9
    assert peak_bytes(found, lambda value: sizes[value.node], packs=True) == 4 + 16
