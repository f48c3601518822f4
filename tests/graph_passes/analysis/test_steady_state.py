"""The steady state of small pipelines, with offsets and iterations that were found by hand."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given

from dapple_tf.graph_passes.analysis.steady_state import SteadyState, find_steady_state
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, attributes, tensor, topological
from dapple_tf.graph_passes.ir.names import is_collective, of_any_micro_batch
from tests.graph_passes.whole import Kind, kinds, ranks_of

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
    order = [found.op for found in state.body]
    assert order.index("f0_") < order.index("f1_") < order.index("b1_")
    assert order.index("f0_") < order.index("b0_")


def test_every_node_is_in_one_part() -> None:
    graph = pipeline(9, 4)
    state = find(graph)
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
    assert found.iterations == 11


def test_kinds_without_edges_between_them_are_one_loop() -> None:
    nodes = [found for m in range(6) for found in (node("a", m, ["x"]), node("b", m, ["x"]))]
    state = find(Graph("g", (X, *nodes), ("x",), ()))
    assert state.iterations == 6
    assert not state.after


def test_graphs_without_micro_batches_have_no_loop() -> None:
    assert find(Graph("g", (X,), ("x",), (Value("x"),))) is None


# --- loops of ranks


def find_in_rank(graph: Graph, fewest: int) -> SteadyState | None:
    return find_steady_state(graph, of_any_micro_batch, fewest)


def assert_ranks_end(graphs: Sequence[Graph], states: Sequence[SteadyState | None]) -> None:
    """Assert that no rank waits for itself: a message waits for its sender only, an iteration for an earlier one.

    A token of a kind's nodes waits for those of all earlier iterations; the first iteration ends when all that the loop
    takes from before it is there.
    """
    waits: nx.DiGraph[tuple[Hashable, ...]] = nx.DiGraph()
    for rank, (graph, state) in enumerate(zip(graphs, states, strict=True)):
        for found in graph.nodes:
            here, inside = (rank, found.name), state is not None and state.find(found.name)
            if is_collective(found):
                sent = (*here, "sent")
                waits.add_edge(sent, here)
                senders = found.integers("source") if found.op == "exchange" else found.integers("ranks")
                waits.add_edges_from(((source, found.name, "sent"), here) for source in senders)
                here = sent
            waits.add_node(here)
            taken = [(rank, name) for name in found.predecessors()]
            waits.add_edges_from((before, here) for before in taken)
            if state is None:
                continue
            if inside:
                kind, iteration = inside
                waits.add_edge((rank, "ended", iteration - state.parallel_iterations), here)
                waits.add_edge((rank, found.name), (rank, "ended", iteration))
                waits.add_edge((rank, found.name), (rank, "list of", kind))
                waits.add_edge((rank, found.name), (rank, "token", kind, iteration))
                waits.add_edge((rank, "token", kind, iteration - 1), (rank, "token", kind, iteration))
                ends = (state.find(control.source) for control in found.controls)
                waits.add_edges_from(((rank, "token", *end), here) for end in ends if end and end[1] < iteration)
            for member in filter(None, (state.find(name) for _, name in taken if not inside)):
                waits.add_edge((rank, "list of", member[0]), here)
                waits.add_edge((rank, "ended", state.iterations - state.parallel_iterations), here)
        if state is None:
            continue
        taken_from = {state.members.get(name, ("", 0)) for member in state.body for name in member.predecessors()}
        carried = {kind for kind, iteration in taken_from if iteration < 0}
        early = [name for name, (kind, iteration) in state.members.items() if iteration < 0 and kind in carried]
        waits.add_edges_from(((rank, name), (rank, "ended", 0)) for name in early)
        for iteration in range(state.iterations):
            waits.add_edge((rank, "ended", iteration - 1), (rank, "ended", iteration))
    assert nx.is_directed_acyclic_graph(waits), nx.find_cycle(waits)


@pytest.mark.parametrize(
    "kind",
    [
        Kind((1, 1), 20, skip=True, tied=True),
        Kind((1, 1, 1), 24, "dapple-b"),
        Kind((1, 1, 1), 24, "K=6,3,1", clip=True),
        Kind((2, 1, 3), 20, sparse=True, state=True),
        Kind((1, 2), 20, "zb-h1"),
        Kind((1, 1, 1, 1), 24, "interleaved-1f1b:v=2"),
        Kind((2, 2), 20, joins=True),
    ],
    ids=str,
)
def test_the_loops_of_all_ranks_end_together(kind: Kind) -> None:
    graphs = ranks_of(kind)
    states = [find_in_rank(graph, 12 if "v=2" not in kind.schedule else 5) for graph in graphs]
    assert_ranks_end(graphs, states)
    for graph, state in zip(graphs, states, strict=True):
        assert {"exchange", "forward", "backward"} & {found.op for found in state.body} >= {"exchange", "forward"}
        outside = [found for found in graph.nodes if found.has("micro_batch") and state.find(found.name) is None]
        assert len(outside) < len(graph.nodes) / 2


@given(kinds())
def test_loops_of_any_order_of_calls_end_together(kind: Kind) -> None:
    graphs = ranks_of(kind)
    assert_ranks_end(graphs, [find_in_rank(graph, 2) for graph in graphs])


@given(kinds(shared=True))
def test_loops_of_ranks_with_several_stages_end_together(kind: Kind) -> None:
    graphs = ranks_of(kind)
    assert_ranks_end(graphs, [find_in_rank(graph, 2) for graph in graphs])


def test_a_loop_of_as_many_iterations_as_run_side_by_side() -> None:
    """Its outputs wait for the first iteration, whose messages answer those that follow the loop."""
    graphs = ranks_of(Kind((1, 1), 12, "gpipe", state=True))
    states = [find_in_rank(graph, 12) for graph in graphs]
    assert_ranks_end(graphs, states)
    assert states[0] is None
    assert states[1].iterations == states[1].parallel_iterations == 12


def test_messages_alone_are_no_loop() -> None:
    """The first backward would wait for all messages, the last of which waits for a forward that comes after it."""
    order = "0F0 0F1 0B0 0F2 0F3 0F4 0B1 0B2 0B3 0F5 0B4 0F6 0F7 0B5 0B6 0B7"
    other = " ".join(f"1F{m} 1B{m}" for m in range(8))
    graphs = ranks_of(Kind((1, 1), 8, f"{order}; {other}"))
    assert find_in_rank(graphs[0], 3) is None
    unaware = [replace(found, attrs=tuple(a for a in found.attrs if a[0] != "ranks")) for found in graphs[0].nodes]
    state = find_in_rank(graphs[0].replace(nodes=tuple(unaware)), 3)
    assert {found.op for found in state.body} >= {"exchange"}
    with pytest.raises(AssertionError):
        assert_ranks_end(graphs, [state, None])
