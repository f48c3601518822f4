"""Contracts of the passes of windows: one that comes too early or too late is refused, or changes nothing by that."""

from __future__ import annotations

import itertools

import pytest

from dapple_tf.errors import GraphError, ScheduleError
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.instrument import Instrument
from tests.graph_passes.passes.test_contracts import contents, moved
from tests.graph_passes.windows import WindowKind

KINDS = [
    WindowKind((1, 1), 3, state=True, once=True),
    WindowKind((2, 1), 4, sparse=True, once=True),
    WindowKind((2, 1), 2, "2bw", state=True, sparse=True, skip=True),
    WindowKind((1, 1, 1), 3, "latest", frozen=frozenset({1})),
    WindowKind((2, 2), 4, "vertical-sync", skip=True),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_of_a_window_that_is_moved_is_refused_or_gives_the_same_graph(kind: WindowKind) -> None:
    before, passes = kind.input_graph(), kind.passes()
    expected = contents(run_passes(before, passes))
    same: set[tuple[str, str]] = set()
    for to, position in itertools.combinations(range(len(passes)), 2):
        try:
            result = run_passes(before, moved(passes, position, to))
        except (GraphError, ScheduleError):
            continue
        assert contents(result) == expected, f"{passes[position].name} before {passes[to].name}"
        same.add((passes[position].name, passes[to].name))
    assert same <= {
        ("copy_variables", "accumulate"),  # where nothing is copied
        ("copy_variables", "repeat_minibatches"),
        ("group_gradients", "copy_variables"),
        ("order_window", "use_versions"),
        ("place", "use_versions"),  # where none is stored
        ("place", "order_window"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_pass_of_a_window_that_adds_nodes_runs_twice(kind: WindowKind) -> None:
    graph = kind.input_graph()
    for step in kind.passes():
        before, graph = graph, run_passes(graph, [step])
        if {node.op for node in graph.nodes} - {node.op for node in before.nodes}:
            with pytest.raises(GraphError, match="forbids"):
                run_passes(graph, [step])


@pytest.mark.parametrize("position", range(3, 8))
def test_time_stamps_come_after_the_passes_that_add_calls_and_edges(position: int) -> None:
    passes = KINDS[0].passes()
    with pytest.raises(GraphError, match="timestamp"):
        run_passes(KINDS[0].input_graph(), [*passes[:position], Instrument(), *passes[position:]])
