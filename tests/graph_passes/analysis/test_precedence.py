"""Tests of the order of nodes along data and control edges."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.passes.windows.verify_window import Precedence
from tests.graph_passes.builders import graph
from tests.graph_passes.strategies import graphs

CHAIN = graph(
    """
    %a = A() -> (float32[])
    %b = B(%a:0) -> (float32[])
    %c = C() -> (float32[]) ^%b 'later'
    %d = D() -> (float32[])
    """
)


def test_paths_lead_over_data_and_control_edges_and_over_nodes_that_are_not_marked() -> None:
    runs_before = Precedence(CHAIN.nodes, ["a", "c", "d", "a"])
    pairs = [(first, second) for first, second in itertools.product("acd", repeat=2) if runs_before(first, second)]
    assert pairs == [("a", "c")]


def test_only_marked_nodes_can_be_asked_about() -> None:
    with pytest.raises(KeyError):
        Precedence(CHAIN.nodes, ["a", "c"])("b", "c")


@given(graphs(), st.data())
def test_it_agrees_with_a_search_of_paths(found: Graph, data: st.DataObject) -> None:
    edges = nx.DiGraph((source, node.name) for node in found.nodes for source in node.predecessors())
    edges.add_nodes_from(found.by_name)
    marked = data.draw(st.lists(st.sampled_from(sorted(found.by_name)))) if found.nodes else []
    runs_before = Precedence(found.nodes, marked)
    for first, second in itertools.product(marked, repeat=2):
        assert runs_before(first, second) == (first != second and nx.has_path(edges, first, second))
