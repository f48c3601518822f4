"""The steady state of small pipelines, with offsets and iterations that were found by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dapple_tf.graph_passes.analysis.steady_state import SteadyState, find_steady_state
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, attributes, tensor, topological

X = Node("x", "input", outputs=(tensor("float32"),))


def node(op: str, m: int, inputs: Sequence[str] = (), after: Sequence[str] = ()) -> Node:
    """Return the node of an op for micro-batch ``m``, called ``<op><m>``."""
    made = Node(f"{op}{m}", op, tuple(map(Value, inputs)), (tensor("float32"),), attributes({"micro_batch": m}))
    for source in after:
        made = made.after(source, "schedule")
    return made


def pipeline(micro_batches: int, warm: int) -> Graph:
    """Return two stages, f0 b0 and f1 b1: f0 runs ``warm`` micro-batches ahead, f1 one."""

    def nodes() -> Iterator[Node]:
        for m in range(micro_batches):
            yield node("f0_", m, ["x"], [f"b0_{m - warm}"] if m >= warm else [])
            yield node("f1_", m, [f"f0_{m}"], [f"b1_{m - 1}"] if m else [])
            yield node("b1_", m, [f"f1_{m}"])
            ahead = min(m + warm, micro_batches) - 1
            yield node("b0_", m, [f"b1_{m}", f"f0_{m}"], [f"f0_{ahead}"])

    total = Node("sum", "add", tuple(Value(f"b0_{m}") for m in range(micro_batches)), (tensor("float32"),))
    return Graph("g", topological([X, *nodes(), total]), ("x",), (Value("sum"),))


def find(graph: Graph, fewest: int = 3) -> SteadyState | None:
    return find_steady_state(graph, lambda found: found.op, fewest)


def names(nodes: Sequence[Node]) -> set[str]:
    return {found.name for found in nodes}


def test_the_round_of_two_stages() -> None:
    """With a warm-up of two, b0 runs one micro-batch behind the others."""
    state = find(pipeline(8, 2))
    assert state is not None
    assert names(state.body) == {"f0_2", "f1_2", "b1_2", "b0_1"}
    assert state.iterations == 6
    assert names(state.before) == {"x", "f0_0", "f0_1", "f1_0", "f1_1", "b1_0", "b1_1", "b0_0"}
    assert names(state.after) == {"b0_7", "sum"}
    assert state.members["f0_1"] == ("f0_2", -1)
    assert state.find("f0_1") is None
    assert state.find("f0_2") == ("f0_2", 0)
    assert state.find("b0_6") == ("b0_1", 5)
    assert state.find("b0_7") is None
    assert state.find("x") is None


def test_the_nodes_of_an_iteration_keep_their_order() -> None:
    state = find(pipeline(8, 3))
    assert state is not None
    order = [found.op for found in state.body]
    assert order.index("f0_") < order.index("f1_") < order.index("b1_")
    assert order.index("f0_") < order.index("b0_")


def test_every_node_is_in_one_part() -> None:
    graph = pipeline(9, 4)
    state = find(graph)
    assert state is not None
    inside = {found.name for found in graph.nodes if state.find(found.name)}
    assert len(inside) == len(state.body) * state.iterations
    assert names(state.before) | names(state.after) | inside == names(graph.nodes)
    assert not names(state.before) & names(state.after)


def test_too_few_iterations_are_no_loop() -> None:
    assert find(pipeline(8, 2), fewest=6) is not None
    assert find(pipeline(8, 2), fewest=7) is None


def test_backwards_after_all_forwards_are_no_loop() -> None:
    forwards = [node("f", m, ["x"]) for m in range(8)]
    backwards = [node("b", m, [f"f{m}"], [f"b{m - 1}" if m else "f7"]) for m in range(8)]
    assert find(Graph("g", (X, *forwards, *backwards), ("x",), ())) is None


def test_a_kind_that_takes_other_things_each_time_stays_outside() -> None:
    """It runs after the loop. Where a node of the loop waits for it, that node is not in the loop either."""
    graph = pipeline(8, 2)
    odd = [node("odd", m, [f"b0_{(3 * m) % 8}"]) for m in range(8)]
    state = find(graph.replace(nodes=topological([*graph.nodes, *odd])))
    assert state is not None
    assert {"odd1", "odd5"} <= names(state.after)
    assert "odd0" in names(state.before)
    needed = [found if found.name != "f1_7" else found.after("odd1", "odd") for found in graph.nodes]
    again = find(graph.replace(nodes=topological([*needed, *odd])))
    assert again is None or again.find("f1_7") is None


def test_kinds_whose_longest_runs_do_not_fit_one_loop() -> None:
    """From 8 on, each a waits for the b before it; up to 11, each b waits for an a that is two micro-batches later."""
    nodes = [node("a", m, ["x"], [f"b{m - 1}"] if m >= 8 else []) for m in range(20)]
    nodes += [node("b", m, ["x"], [f"a{m + 2}"] if m < 12 else []) for m in range(20)]
    assert find(Graph("g", topological([X, *nodes]), ("x",), ())) is None


def test_nothing_is_carried_for_more_iterations_than_the_loop_has() -> None:
    def graph(last: int) -> Graph:
        nodes = [node("a", m, ["x"]) for m in range(20)]
        return Graph("g", (X, *nodes, *(node("b", m, [f"a{m}", f"a{m - 9}"]) for m in range(9, last))), ("x",), ())

    assert find(graph(14)) is None
    found = find(graph(20))
    assert found is not None
    assert found.iterations == 11


def test_kinds_without_edges_between_them_are_one_loop() -> None:
    nodes = [found for m in range(6) for found in (node("a", m, ["x"]), node("b", m, ["x"]))]
    state = find(Graph("g", (X, *nodes), ("x",), ()))
    assert state is not None
    assert state.iterations == 6
    assert not state.after


def test_graphs_without_micro_batches_have_no_loop() -> None:
    assert find(Graph("g", (X,), ("x",), (Value("x"),))) is None
