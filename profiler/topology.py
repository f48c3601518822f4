"""Check which layer reads which: the layers must be able to run one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx

from dapple_tf.errors import ProfileError


def check_edges(names: Sequence[str], edges: Sequence[tuple[int, int]]) -> None:
    """Raise ProfileError unless the edges connect all layers, each edge from one layer to a later one.

    The error names an edge that is out of range, repeated or from a layer to itself; the layers on a cycle; two layers
    that are out of order; or a layer that is not connected to the rest.
    """
    seen: set[tuple[int, int]] = set()
    for index, (source, target) in enumerate(edges):
        if not (0 <= source < len(names) and 0 <= target < len(names)):
            raise ProfileError(
                f"edges[{index}] is [{source}, {target}], but the layers are numbered 0 to {len(names) - 1}"
            )
        if source == target:
            raise ProfileError(f"edges[{index}] joins layer {source} ({names[source]}) to itself")
        if (source, target) in seen:
            raise ProfileError(f"edges[{index}] repeats [{source}, {target}]: give each edge once")
        seen.add((source, target))
    runnable_graph(names, edges)
    for index, (source, target) in enumerate(edges):
        if source > target:
            raise ProfileError(
                f"edges[{index}]: layer {target} ({names[target]}) reads layer {source} ({names[source]}), which comes "
                "after it: put the layers in an order in which they can run"
            )


def runnable_graph(names: Sequence[str], edges: Iterable[tuple[int, int]]) -> nx.DiGraph[int]:
    """Return the graph of the layers; raise ProfileError unless they can run in some order and are connected.

    The error names the layers on a cycle, or a layer that is not connected to the rest.
    """
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(names)))
    graph.add_edges_from(edges)
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [source for source, *_ in nx.find_cycle(graph)]
        raise ProfileError(
            "the layers read each other in a cycle: " + " -> ".join(f"{i} ({names[i]})" for i in [*cycle, cycle[0]])
        )
    parts = sorted(nx.connected_components(graph.to_undirected(as_view=True)), key=lambda part: (len(part), min(part)))
    if len(parts) > 1:
        lone = min(parts[0])
        raise ProfileError(
            f"layer {lone} ({names[lone]}) is not connected to the rest: the graph has {len(parts)} parts; "
            "add the missing edges, or remove the layer"
        )
    return graph
