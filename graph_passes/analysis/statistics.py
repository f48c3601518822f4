"""Values whose sums over micro-batches and replicas are used at the end of a step, such as statistics of batch norm.

The node that computes such a *statistic* has its name as an attribute.
"""

from __future__ import annotations

from collections.abc import Mapping

from dapple_tf.graph_passes.ir.graph import Graph, Value

_STATISTIC = "statistic"


def mark_statistics(graph: Graph, names: Mapping[Value, str]) -> Graph:
    """Return the graph with the values of ``names``, each the only output of a node, marked as statistics by name."""
    of_node = {value.node: name for value, name in names.items()}
    return graph.replace(
        nodes=tuple(
            node.with_attrs(**{_STATISTIC: of_node[node.name]}) if node.name in of_node else node
            for node in graph.nodes
        )
    )


def find_statistics(graph: Graph) -> dict[str, Value]:
    """Return the statistics by name, in the order of the graph."""
    return {node.string(_STATISTIC): Value(node.name) for node in graph.nodes if node.has(_STATISTIC)}
