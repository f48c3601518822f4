"""Nodes, types, and topological order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import (
    Control,
    DType,
    Node,
    Shape,
    Value,
    ancestors,
    search_back,
    tensor,
    topological,
)
from tests.graph_passes.builders import graph, refused

DIAMOND = """
    %x = arg() -> (float32[?])
    %left = Neg(%x:0) -> (float32[?])
    %right = Exp(%x:0) -> (float32[?])
    %sum = Add(%left:0, %right:0) -> (float32[?])
    %print = Print(%x:0) ^%left 'side effects in order'
"""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("bool", 1),
        ("int4", 1),
        ("uint8", 1),
        ("half", 2),
        ("bfloat16", 2),
        ("float32", 4),
        ("complex64", 8),
        ("complex128", 16),
        ("resource", 8),
        ("float8_e5m2", 1),
    ],
)
def test_bytes_of_one_element(name: str, size: int) -> None:
    assert DType(name).size == size


def test_only_floats_and_complex_numbers_carry_gradients() -> None:
    carry = {"bfloat16", "half", "float32", "float64", "complex64", "complex128"}
    names = [*sorted(carry), "int32", "uint8", "bool", "string", "resource", "variant"]
    assert {name for name in names if DType(name).differentiable} == carry


def test_handles_and_strings_stay_on_their_device() -> None:
    names = ["float32", "int64", "bool", "resource", "variant", "string"]
    assert [DType(name).transferable for name in names] == [True, True, True, False, False, False]


def test_bytes_count_a_given_number_for_each_unknown_dimension() -> None:
    assert tensor("float32", None, 8).bytes() == 32
    assert tensor("float32", None, 8).bytes(unknown=10) == 320
    assert tensor("float64").bytes() == 8
    assert Shape(None).elements(unknown=7) == 1


def test_a_value_prints_with_its_index() -> None:
    assert str(Value("a/b", 2)) == "%a/b:2"


def test_attributes_are_read_by_type() -> None:
    node = Node("n", "Op").with_attrs(stage=1, kind="mean", names=("a", "b"), axes=(0, 2))
    assert node.integer("stage") == 1
    assert node.integers("axes") == (0, 2)
    assert node.string("kind") == "mean"
    assert node.strings("names") == ("a", "b")
    assert node.has("kind")
    assert not node.has("axis")


def test_with_attrs_replaces_and_keeps_the_order_of_names() -> None:
    node = Node("n", "Op").with_attrs(b=1, a=2).with_attrs(b=3)
    assert node.attrs == (("a", 2), ("b", 3))


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("attr", "node 'n' (Op) has no attribute 'none'"),
        ("integer", "attribute 'text' of 'n' is 'word', not an integer"),
        ("string", "attribute 'number' of 'n' is 1, not a string"),
        ("strings", "attribute 'number' of 'n' is 1, not a tuple of strings"),
        ("integers", "attribute 'words' of 'n' is ('a',), not a tuple of integers"),
    ],
)
def test_an_attribute_of_another_type_is_refused(read: str, said: str) -> None:
    key = {"attr": "none", "integer": "text", "integers": "words"}.get(read, "number")
    node = Node("n", "Op").with_attrs(number=1, text="word", words=("a",))
    with refused(GraphError, said):
        getattr(node, read)(key)


def test_a_control_edge_is_added_once() -> None:
    node = Node("n", "Op").after("a", "first").after("a", "again").after("b", "second")
    assert node.controls == (Control("a", "first"), Control("b", "second"))


def test_the_error_of_a_missing_node_value_or_function_names_it() -> None:
    diamond = graph(DIAMOND)
    with refused(GraphError, "graph 'f' has no node 'y'"):
        diamond.node("y")
    with refused(GraphError, "graph 'f' has no function 'stage0/forward'"):
        diamond.function("stage0/forward")
    with refused(GraphError, "%x:1 does not exist: arg has 1 output"):
        diamond.type_of(Value("x", 1))


def test_consumers_are_listed_once_each_in_order() -> None:
    users = graph("%x = arg() -> (float32[])\n%y = Mul(%x:0, %x:0) -> (float32[])\n%z = Neg(%x:0)").consumers()
    assert {name: [node.name for node in nodes] for name, nodes in users.items()} == {"x": ["y", "z"], "y": [], "z": []}


def test_ancestors_follow_data_and_control_edges_up_to_the_given_nodes() -> None:
    diamond = graph(DIAMOND)
    assert ancestors(diamond, ["sum"]) == {"sum", "left", "right", "x"}
    assert ancestors(diamond, ["print"]) == {"print", "left", "x"}
    assert ancestors(diamond, ["sum"], stop=["left"]) == {"sum", "right", "x"}
    assert ancestors(diamond, ["left"], stop=["left"]) == set()


def test_a_search_ends_at_values_and_goes_on_past_other_values_of_their_nodes() -> None:
    pair = graph(
        "%x = arg() -> (int32[])\n%two = Op(%x:0) -> (int32[], int32[])\n%sum = Add(%two:0, %two:1) -> (int32[])"
    )
    first, second = Value("two"), Value("two", 1)
    assert search_back(pair, [Value("sum")], lambda value: value == first) == ({"sum", "two", "x"}, {first})
    assert search_back(pair, [Value("sum")], lambda value: value in (first, second)) == ({"sum"}, {first, second})
    assert search_back(pair, [first], lambda value: value == first) == (set(), {first})


def test_sorted_moves_only_nodes_that_stand_before_their_inputs() -> None:
    shuffled = graph("%a = Op() ^%d 'late'\n%b = Op()\n%c = Op()\n%d = Op() ^%c 'late'")
    assert [node.name for node in shuffled.sorted().nodes] == ["c", "d", "a", "b"]


def test_two_nodes_of_one_name_are_refused() -> None:
    with refused(GraphError, "two nodes are called 'b'"):
        topological([Node("a", "Op"), Node("b", "Op"), Node("b", "Other")])


def test_a_cycle_is_named() -> None:
    cyclic = graph("%a = Op()\n%b = Op(%c:0) -> (int32[])\n%c = Op() -> (int32[]) ^%b 'order'")
    with refused(GraphError, "the graph has a cycle: b <- c <- b"):
        topological(cyclic.nodes)


@st.composite
def acyclic(draw: st.DrawFn) -> list[Node]:
    """Nodes n0, n1 ... with edges from lower to higher numbers, in any order."""
    size = draw(st.integers(1, 8))
    nodes = []
    for i in range(size):
        sources = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        data = {j for j in sources if draw(st.booleans())}
        controls = tuple(Control(f"n{j}", "order") for j in sorted(sources - data))
        nodes.append(Node(f"n{i}", "Op", tuple(Value(f"n{j}") for j in sorted(data)), controls=controls))
    return draw(st.permutations(nodes))


@given(acyclic())
def test_topological_respects_edges_and_moves_only_what_an_earlier_node_needs(given_nodes: list[Node]) -> None:
    placed = topological(given_nodes)
    assert sorted(node.name for node in placed) == sorted(node.name for node in given_nodes)
    at = {node.name: i for i, node in enumerate(placed)}
    assert all(at[source] < at[node.name] for node in placed for source in node.predecessors())
    needs: dict[str, set[str]] = {}
    for node in sorted(given_nodes, key=lambda node: int(node.name[1:])):
        needs[node.name] = {node.name}.union(*(needs[source] for source in node.predecessors()))
    for i, late in enumerate(given_nodes):
        for early in given_nodes[:i]:
            overtaken = at[late.name] < at[early.name]
            assert not overtaken or any(late.name in needs[node.name] for node in given_nodes[:i])


@given(acyclic())
def test_topological_leaves_a_topological_order_alone(given_nodes: list[Node]) -> None:
    ordered = tuple(sorted(given_nodes, key=lambda node: int(node.name[1:])))
    assert topological(ordered) == ordered
