"""Each check of ``VerifyWindow`` refuses a graph that was damaged in the way it looks for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, attributes, make_node
from dapple_tf.graph_passes.ir.names import Site, nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
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

AT, LAST = "stage0/replica0", "stage1/replica0"
RUN_ONCE, ADD = f"minibatch{{}}/{AT}/run_once", f"{AT}/mb{{}}/accumulate"
UPDATE, COUNT = "minibatch{}/stage0/update", "minibatch{}/stage0/count_update"
BEGINS = ": the first micro-batch of a minibatch, and no other, begins a new sum"


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
    ("kind", "name", "source", "said"),
    [
        # order
        (
            STASH,
            f"{AT}/mb2/forward",
            f"{AT}/mb0/backward",
            "no edge makes NAME run after SOURCE, as the window's order says",
        ),
        (IN_TURN, RUN_ONCE.format(1), RUN_ONCE.format(0), "no edge makes NAME run after SOURCE, as the window's order"),
        # versions
        (STASH, f"{AT}/mb3/backward", f"{AT}/version2", "no edge makes NAME wait for SOURCE, the weights that it uses"),
        (IN_TURN, RUN_ONCE.format(3), f"{AT}/version0", "no edge makes NAME wait for SOURCE, the weights that it uses"),
        (STASH, f"{AT}/version2", f"{AT}/mb1/backward", "NAME overwrites version 0, and does not wait for SOURCE, its"),
        (STASH, f"{AT}/version1", UPDATE.format(0), "NAME does not wait for the update that makes this version"),
        (STASH, UPDATE.format(1), f"{AT}/version1", "NAME does not wait for SOURCE, which reads what it changes"),
        # stages that use their weights themselves
        (STASH, f"{LAST}/mb2/forward", "minibatch1/stage1/update", "NAME must run after SOURCE, whose weights it uses"),
        (STASH, f"{LAST}/mb3/forward", "minibatch2/stage1/update", "NAME must run after SOURCE, whose weights it uses"),
        (LATEST, f"{AT}/mb2/backward", UPDATE.format(1), "NAME must run after SOURCE, whose weights it uses"),
        # updates
        (STASH, COUNT.format(2), UPDATE.format(1), "no edge makes NAME run after SOURCE"),
        (STASH, UPDATE.format(2), COUNT.format(2), "no edge makes NAME run after SOURCE"),
        (
            IN_TURN,
            UPDATE.format(3),
            "stage0/replica1/mb3/backward",
            "no control edge makes NAME wait for SOURCE, which uses what",
        ),
        # sums
        (TWO_BUFFERED, ADD.format(1), ADD.format(0), f"%{AT}/mb0/backward:0 does not reach 'minibatch0/stage0/update'"),
        (
            TWO_BUFFERED,
            ADD.format(2),
            f"minibatch0/{AT}/gradients",
            "no edge makes NAME run after SOURCE, and both use the same sums",
        ),
    ],
)
def test_a_window_without_one_of_its_edges_is_refused(kind: WindowKind, name: str, source: str, said: str) -> None:
    with refused(GraphError, said.replace("NAME", repr(name)).replace("SOURCE", repr(source))):
        check(kind, change(kind.graph(), name, cut(source)))


@pytest.mark.parametrize(
    ("kind", "name", "attrs", "said"),
    [
        (STASH, f"{AT}/mb2/forward", {"version": 0}, " must use version 1 of the weights, in slot 1"),
        (STASH, f"{AT}/version2", {"version": 1}, " stores version 2 in slot 1, not 0"),
        (IN_TURN, "stage0/replica1/version0", {"variables": ("w0",)}, " stores ['w0'], not ['e', 'w0']"),
        (STASH, COUNT.format(2), {"offset": 1}, " counts 1 minibatches of the window, not 2"),
        (TWO_BUFFERED, ADD.format(2), {"first": False}, BEGINS),
        (TWO_BUFFERED, ADD.format(3), {"first": True}, BEGINS),
        (STASH, f"{AT}/mb0/forward", {"inline": True}, " is inlined"),
    ],
)
def test_a_wrong_attribute_is_refused(kind: WindowKind, name: str, attrs: dict[str, Any], said: str) -> None:
    with refused(GraphError, f"{name!r}{said}"):
        check(kind, change(kind.graph(), name, lambda node: node.with_attrs(**attrs)))


@pytest.mark.parametrize(
    ("kind", "name", "make", "said"),
    [
        (STASH, f"{AT}/mb0/forward", lambda node: node.after("minibatch3/stage0/update", "late"), "has a cycle: "),
        (
            STASH,
            f"{AT}/mb2/backward",
            lambda node: dataclasses.replace(node, attrs=attributes({k: v for k, v in node.attrs if k != "version"})),
            f"'{AT}/mb2/backward' must use version 1 of the weights, in slot 1",
        ),
        (
            LATEST,
            "minibatch1/stage0/update",
            lambda node: take("minibatch0/stage0/reduced_gradients")(cut(f"{AT}/mb1/backward")(node)),
            f"'minibatch1/stage0/update' must run after '{AT}/mb2/forward', which uses what it changes",
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


def test_a_commit_that_does_not_wait_for_the_copies_of_another_stage_is_refused() -> None:
    graph = IN_TURN.graph()
    commit, *_ = nodes_of(graph, OpName.COMMIT)
    refresh = make_node(f"{LAST}/other_refresh", OpName.REFRESH, **Site(1).attrs, variables=commit.strings("variables"))
    waiting = change(graph, commit.name, lambda node: node.after(refresh.name, "commit: copies"))
    placed = dataclasses.replace(refresh, device=graph.node(f"{LAST}/mb0/forward").device)
    check(IN_TURN, waiting.replace(nodes=(placed, *waiting.nodes)))
    with refused(GraphError, f"no path orders {commit.name!r} after {refresh.name!r}, which reads"):
        check(IN_TURN, graph.replace(nodes=(placed, *graph.nodes)))


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
