"""Sum gradients over the replicas of a stage (AllReduce), and over the stages that share a variable.

Seeds already carry each slice's share of the batch, so the sum is the gradient of the global mean (DAPPLE,
V.A.3, Fig. 10). The sum is wanted where the update runs: on the owner's first device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.graph import Attr, Graph, Node, TensorType, Value, attributes
from graph_passes.ir.names import at, nodes_of, replica_counts


@dataclass(frozen=True)
class AllReduce:
    """Add ``allreduce`` (replicated stages), ``tied_sum`` (shared variables) and ``reduced`` (every owner)."""

    name: str = "allreduce"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return reduce_gradients(graph)


def reduce_gradients(graph: Graph) -> Graph:
    """The graph with one ``reduced`` node a stage: the complete gradients of the variables it owns.

    Gradients that come in buckets are reduced bucket by bucket.
    """
    replicas = replica_counts(graph)
    sources: dict[tuple[int, int], list[Node]] = {}
    for node in nodes_of(graph, "gradients"):
        sources.setdefault((node.integer("stage"), node.integer("replica")), []).append(node)
    added: list[Node] = []
    # (stage, variable) -> that stage's share of the gradient, summed over its replicas
    shares: dict[tuple[int, str], Value] = {}
    types: dict[str, TensorType] = {}
    for stage, count in enumerate(replicas):
        for same in zip(*(sources.get((stage, r), []) for r in range(count)), strict=True):
            node = same[0] if count == 1 else _reduce(stage, same)
            added += [node] if count > 1 else []
            for name, value, kind in zip(node.strings("variables"), node.values(), node.outputs, strict=True):
                shares[stage, name] = value
                types[name] = kind
    variables = find_variables(graph)
    for stage in range(len(replicas)):
        names = tuple(name for name in variables.owned(stage) if name in types)
        if names:
            added += _collect(stage, names, shares, types)
    return graph.replace(nodes=(*graph.nodes, *added))


def _reduce(stage: int, same: Sequence[Node]) -> Node:
    """The sum of what each replica of the stage has of the same gradients."""
    first = same[0]
    attrs: dict[str, Attr] = {
        "replica": 0,
        "replicas": len(same),
        "stage": stage,
        "variables": first.strings("variables"),
    }
    name = at(stage, what="allreduce")
    if first.has("bucket"):
        attrs["bucket"] = first.integer("bucket")
        name += f"/bucket{first.integer('bucket')}"
    inputs = tuple(value for node in same for value in node.values())
    return Node(name, "allreduce", inputs, first.outputs, attributes(attrs))


def _collect(
    stage: int, names: tuple[str, ...], shares: dict[tuple[int, str], Value], types: dict[str, TensorType]
) -> list[Node]:
    nodes: list[Node] = []
    inputs: list[Value] = []
    for name in names:
        parts = tuple(value for (_, variable), value in sorted(shares.items()) if variable == name)
        if len(parts) > 1:
            attrs = attributes({"replica": 0, "stage": stage, "variable": name})
            nodes.append(Node(at(stage, what=f"tied_sum_{len(nodes)}"), "tied_sum", parts, (types[name],), attrs))
            parts = nodes[-1].values()
        inputs += parts
    attrs = attributes({"replica": 0, "stage": stage, "variables": names})
    kinds = tuple(types[name] for name in names)
    return [*nodes, Node(at(stage, what="reduced"), "reduced", tuple(inputs), kinds, attrs)]
