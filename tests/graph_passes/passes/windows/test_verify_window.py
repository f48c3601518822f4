"""Each check of ``VerifyWindow`` refuses a graph that was damaged in the way it looks for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest
from hypothesis import given

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, attributes
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.verify_ranks import verify_ranks
from dapple_tf.graph_passes.passes.windows.verify_window import VerifyWindow
from tests.graph_passes.builders import refused
from tests.graph_passes.windows import WindowKind, window_kinds

STASH = WindowKind((1, 1), 4)
"""Two slots on stage 0 (F0 F1 B0 F2 B1 F3 B2 B3), none on stage 1."""
IN_TURN = WindowKind((2, 1), 4, sparse=True, once=True)
TWO_BUFFERED = WindowKind((2, 1), 3, "2bw")
LATEST = WindowKind((1, 1), 3, "latest")

AT = "stage0/replica0"


def check(kind: WindowKind, graph: Graph) -> None:
    VerifyWindow(kind.versions, kind.trained)(graph)


def change(graph: Graph, name: str, make: Callable[[Node], Node]) -> Graph:
    """The graph with another node in the place of ``name``."""
    return graph.replace(nodes=tuple(make(node) if node is graph.node(name) else node for node in graph.nodes))


def cut(*sources: str) -> Callable[[Node], Node]:
    """Remove the control edges from ``sources``, which the node must have."""

    def make(node: Node) -> Node:
        assert {control.source for control in node.controls}.issuperset(sources)
        return dataclasses.replace(node, controls=tuple(c for c in node.controls if c.source not in sources))

    return make


def take(*values: str) -> Callable[[Node], Node]:
    return lambda node: dataclasses.replace(node, inputs=tuple(map(Value, values)))


@pytest.mark.parametrize("kind", [STASH, IN_TURN, TWO_BUFFERED, LATEST])
def test_a_finished_window_passes_unchanged(kind: WindowKind) -> None:
    graph = kind.graph()
    assert run_passes(graph, [VerifyWindow(kind.versions, kind.trained)]) == graph


@pytest.mark.parametrize(
    ("kind", "name", "make", "said"),
    [
        # order
        (
            STASH,
            f"{AT}/mb0/forward",
            lambda node: node.after("minibatch3/stage0/update", "late"),
            "the graph has a cycle: ",
        ),
        (
            STASH,
            f"{AT}/mb2/forward",
            cut(f"{AT}/mb0/backward"),
            f"no edge makes '{AT}/mb2/forward' run after '{AT}/mb0/backward', as the window's order says",
        ),
        (
            IN_TURN,
            f"minibatch1/{AT}/run_once",
            cut(f"minibatch0/{AT}/run_once"),
            f"no edge makes 'minibatch1/{AT}/run_once' run after 'minibatch0/{AT}/run_once', as the window's order",
        ),
        # versions
        (
            STASH,
            f"{AT}/mb2/forward",
            lambda node: node.with_attrs(version=0),
            f"'{AT}/mb2/forward' must use version 1 of the weights, in slot 1",
        ),
        (
            STASH,
            f"{AT}/mb2/backward",
            lambda node: dataclasses.replace(node, attrs=attributes({k: v for k, v in node.attrs if k != "version"})),
            f"'{AT}/mb2/backward' must use version 1 of the weights, in slot 1",
        ),
        (
            STASH,
            f"{AT}/mb3/backward",
            cut(f"{AT}/version2"),
            f"no edge makes '{AT}/mb3/backward' wait for '{AT}/version2', the weights that it uses",
        ),
        (
            IN_TURN,
            f"minibatch3/{AT}/run_once",
            cut(f"{AT}/version0"),
            f"no edge makes 'minibatch3/{AT}/run_once' wait for '{AT}/version0', the weights that it uses",
        ),
        (
            STASH,
            f"{AT}/version2",
            lambda node: node.with_attrs(version=1),
            f"'{AT}/version2' stores version 2 in slot 1, not 0",
        ),
        (
            STASH,
            f"{AT}/version2",
            cut(f"{AT}/mb1/backward"),
            f"'{AT}/version2' overwrites version 0, and does not wait for '{AT}/mb1/backward', its last use",
        ),
        (
            STASH,
            f"{AT}/version1",
            cut("minibatch0/stage0/update"),
            f"'{AT}/version1' does not wait for the update that makes this version",
        ),
        (
            STASH,
            "minibatch1/stage0/update",
            cut(f"{AT}/version1"),
            f"'minibatch1/stage0/update' does not wait for '{AT}/version1', which reads what it changes",
        ),
        (
            IN_TURN,
            "stage0/replica1/version0",
            lambda node: node.with_attrs(variables=("w0",)),
            "'stage0/replica1/version0' stores ['w0'], not ['e', 'w0']",
        ),
        # stages that use their weights themselves
        (
            STASH,
            "stage1/replica0/mb2/forward",
            cut("minibatch1/stage1/update"),
            "'stage1/replica0/mb2/forward' must run after 'minibatch1/stage1/update', whose weights it uses",
        ),
        (
            STASH,
            "stage1/replica0/mb3/forward",
            cut("minibatch2/stage1/update"),
            "'stage1/replica0/mb3/forward' must run after 'minibatch2/stage1/update', whose weights it uses",
        ),
        (
            LATEST,
            f"{AT}/mb2/backward",
            cut("minibatch1/stage0/update"),
            f"'{AT}/mb2/backward' must run after 'minibatch1/stage0/update', whose weights it uses",
        ),
        (
            LATEST,
            "minibatch1/stage0/update",
            lambda node: take("minibatch0/stage0/reduced_gradients")(cut(f"{AT}/mb1/backward")(node)),
            f"'minibatch1/stage0/update' must run after '{AT}/mb2/forward', which uses what it changes",
        ),
        # updates
        (
            STASH,
            "minibatch2/stage0/count_update",
            lambda node: node.with_attrs(offset=1),
            "'minibatch2/stage0/count_update' counts 1 minibatches of the window, not 2",
        ),
        (
            STASH,
            "minibatch2/stage0/count_update",
            cut("minibatch1/stage0/update"),
            "no edge makes 'minibatch2/stage0/count_update' run after 'minibatch1/stage0/update'",
        ),
        (
            STASH,
            "minibatch2/stage0/update",
            cut("minibatch2/stage0/count_update"),
            "no edge makes 'minibatch2/stage0/update' run after 'minibatch2/stage0/count_update'",
        ),
        (
            IN_TURN,
            "minibatch3/stage0/update",
            cut("stage0/replica1/mb3/backward"),
            "no control edge makes 'minibatch3/stage0/update' wait for 'stage0/replica1/mb3/backward', which uses what",
        ),
        (
            STASH,
            "minibatch1/stage0/reduced_gradients",
            take("minibatch0/stage0/replica0/gradients"),
            f"the gradient %{AT}/mb0/backward:0 is of another update, but reaches 'minibatch1/stage0/update'",
        ),
        (
            IN_TURN,
            "minibatch3/stage0/allreduce",
            take("minibatch2/stage0/replica0/gradients"),
            "the gradient %stage0/replica1/mb3/backward:0 does not reach 'minibatch3/stage0/update'",
        ),
        (
            IN_TURN,
            "minibatch3/stage0/gather_slices/e",
            lambda node: dataclasses.replace(node, inputs=(*node.inputs[:2], *node.inputs[:2])),
            "the gradient %stage0/replica1/mb3/backward:1 does not reach 'minibatch3/stage0/update'",
        ),
        (
            TWO_BUFFERED,
            f"{AT}/mb1/accumulate",
            cut(f"{AT}/mb0/accumulate"),
            f"the gradient %{AT}/mb0/backward:0 does not reach 'minibatch0/stage0/update'",
        ),
        # sums
        (
            TWO_BUFFERED,
            f"{AT}/mb2/accumulate",
            cut(f"minibatch0/{AT}/gradients"),
            f"no edge makes '{AT}/mb2/accumulate' run after 'minibatch0/{AT}/gradients', and both use the same sums",
        ),
        (
            TWO_BUFFERED,
            f"{AT}/mb2/accumulate",
            lambda node: node.with_attrs(first=False),
            f"'{AT}/mb2/accumulate': the first micro-batch of a minibatch, and no other, begins a new sum",
        ),
        (
            TWO_BUFFERED,
            f"{AT}/mb3/accumulate",
            lambda node: node.with_attrs(first=True),
            f"'{AT}/mb3/accumulate': the first micro-batch of a minibatch, and no other, begins a new sum",
        ),
        # the rest
        (STASH, f"{AT}/mb0/forward", lambda node: node.with_attrs(inline=True), f"'{AT}/mb0/forward' is inlined"),
        (STASH, "loss", lambda node: dataclasses.replace(node, device=""), "node 'loss' has no device"),
    ],
)
def test_a_damaged_window_is_refused(kind: WindowKind, name: str, make: Callable[[Node], Node], said: str) -> None:
    with refused(GraphError, said):
        check(kind, change(kind.graph(), name, make))


@pytest.mark.parametrize(
    ("like", "name"),
    [(f"{AT}/mb0/forward", f"{AT}/mb7/forward"), (f"minibatch0/{AT}/run_once", f"minibatch7/{AT}/run_once")],
)
def test_calls_that_are_not_of_the_window_are_refused(like: str, name: str) -> None:
    graph = IN_TURN.graph()
    with refused(GraphError, f"{name!r} is not in the window's order"):
        check(IN_TURN, graph.replace(nodes=(*graph.nodes, dataclasses.replace(graph.node(like), name=name))))


def test_a_version_that_nobody_uses_is_refused() -> None:
    """It would overwrite a slot."""
    graph = STASH.graph()
    more = dataclasses.replace(graph.node(f"{AT}/version2"), name=f"{AT}/version3")
    with refused(GraphError, f"'{AT}/version3' stores a version of the weights that no call uses"):
        check(STASH, graph.replace(nodes=(*graph.nodes, more)))


def test_a_stage_that_uses_its_newest_weights_stores_none() -> None:
    graph = STASH.graph()
    more = dataclasses.replace(graph.node(f"{AT}/version0"), name="stage1/replica0/version0")
    with refused(GraphError, "'stage1/replica0/version0' stores a version of the weights that no call uses"):
        check(STASH, graph.replace(nodes=(*graph.nodes, more.with_attrs(stage=1))))


@pytest.mark.parametrize(
    "name", [f"{AT}/mb1/backward", f"{AT}/version1", "minibatch2/stage0/update", "minibatch2/stage1/count_update"]
)
def test_a_node_that_is_missing_is_named(name: str) -> None:
    """Its users go with it, so that the graph itself is whole."""
    graph, gone = STASH.graph(), {name}
    nodes = []
    for node in graph.nodes:
        if gone.intersection(node.predecessors()) or node.name in gone:
            gone.add(node.name)
        else:
            nodes.append(node)
    with refused(GraphError, "has no node"):
        check(STASH, graph.replace(nodes=tuple(nodes)))


@given(window_kinds())
def test_every_window_is_proved_and_its_ranks_fit_together_and_cannot_deadlock(kind: WindowKind) -> None:
    graphs = kind.rank_graphs()
    for part in graphs:
        verify(part)
    verify_ranks(graphs)


@given(window_kinds((2, 3)))
def test_no_edge_of_a_replica_s_order_can_be_left_out(kind: WindowKind) -> None:
    """A call's edges from the call before it, from its weights and from an update: the proof needs each of them."""
    graph = kind.graph()
    for node in graph.nodes:
        if node.op not in ("forward", "backward", "store_version"):
            continue
        data = {value.node for value in node.inputs}
        for control in node.controls:
            if control.source in data or control.source.endswith(("refresh", "run_once")):
                continue
            needed = not (control.source.endswith("update") and node.has("version"))  # its store waits for its update
            if needed:
                with refused(GraphError, ""):
                    check(kind, change(graph, node.name, cut(control.source)))


def test_a_window_of_256_minibatches_on_8_stages_is_proved_in_seconds() -> None:
    """A proof that compares every action with every update takes more than a minute."""
    kind = WindowKind((1,) * 8, 256)
    start = time.process_time()
    kind.graph()
    assert time.process_time() - start < 30
