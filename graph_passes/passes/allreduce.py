"""Sum gradients over the replicas of a stage (AllReduce), and over the stages that share a variable.

Each slice's gradient already has its share of the batch as a factor, so the sum is the gradient of the mean over the
whole batch (DAPPLE, section V.A.3, Fig. 10). The update takes the sum on the first device of the variable's owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import Attr, Graph, Node, TensorType, Value, attributes
from dapple_tf.graph_passes.ir.names import at, nodes_of, replica_counts
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import Contract


@dataclass(frozen=True)
class AllReduce:
    """Add ``allreduce`` (replicated stages), ``tied_sum`` (shared variables) and ``reduced_gradients`` (each owner)."""

    name: str = "allreduce"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.GRADIENTS}),
        forbids=frozenset({OpName.ALLREDUCE, OpName.TIED_SUM, OpName.REDUCED_GRADIENTS, OpName.BARRIER}),
        may_produce=frozenset({OpName.ALLREDUCE, OpName.TIED_SUM, OpName.REDUCED_GRADIENTS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        return reduce_gradients(graph)


def reduce_gradients(graph: Graph) -> Graph:
    """Return the graph with a ``reduced_gradients`` node for each stage: all gradients of the variables that it owns.

    Gradients in buckets (see ``Overlap``) are reduced bucket by bucket.
    """
    replicas = replica_counts(graph)
    gradients: dict[tuple[int, int], list[Node]] = {}
    for node in nodes_of(graph, OpName.GRADIENTS):
        gradients.setdefault((node.integer("stage"), node.integer("replica")), []).append(node)
    added: list[Node] = []
    # (stage, variable) -> the gradient that this stage computes, summed over its replicas; the loss head comes last
    stage_sums: dict[tuple[int, str], Value] = {}
    types: dict[str, TensorType] = {}
    for stage, count in enumerate(replicas):
        for of_replicas in zip(*(gradients.get((stage, r), []) for r in range(count)), strict=True):
            node = of_replicas[0] if count == 1 else _allreduce(stage, of_replicas)
            added += [node] if count > 1 else []
            for name, value, kind in zip(node.strings("variables"), node.values(), node.outputs, strict=True):
                stage_sums[stage, name] = value
                types[name] = kind
    for node in nodes_of(graph, OpName.LOSS_HEAD):  # it runs once, on one replica
        for i, port in graph.function(node.string("function")).output_ports("variable"):
            stage_sums[len(replicas), port.name] = node.values()[i]
            types[port.name] = port.type
    variables = find_variables(graph)
    for stage in range(len(replicas)):
        names = tuple(name for name in variables.owned(stage) if name in types)
        if names:
            added += _sum_over_stages(stage, names, stage_sums, types)
    return graph.replace(nodes=(*graph.nodes, *added))


def _allreduce(stage: int, of_replicas: Sequence[Node]) -> Node:
    """Return the sum of the same gradients of each replica of a stage."""
    first = of_replicas[0]
    attrs: dict[str, Attr] = {
        "replica": 0,
        "replicas": len(of_replicas),
        "stage": stage,
        "variables": first.strings("variables"),
    }
    name = at(stage, what=OpName.ALLREDUCE)
    if first.has("bucket"):
        attrs["bucket"] = first.integer("bucket")
        name += f"/bucket{first.integer('bucket')}"
    inputs = tuple(value for node in of_replicas for value in node.values())
    return Node(name, OpName.ALLREDUCE, inputs, first.outputs, attributes(attrs))


def _sum_over_stages(
    stage: int, names: tuple[str, ...], stage_sums: dict[tuple[int, str], Value], types: dict[str, TensorType]
) -> list[Node]:
    """Return the ``reduced_gradients`` of a stage, and a ``tied_sum`` for each variable that has several gradients."""
    nodes: list[Node] = []
    inputs: list[Value] = []
    for name in names:
        parts = tuple(value for (_, variable), value in sorted(stage_sums.items()) if variable == name)
        if len(parts) > 1:
            attrs = attributes({"replica": 0, "stage": stage, "variable": name})
            nodes.append(Node(at(stage, what=f"tied_sum_{len(nodes)}"), OpName.TIED_SUM, parts, (types[name],), attrs))
            parts = nodes[-1].values()
        inputs += parts
    attrs = attributes({"replica": 0, "stage": stage, "variables": names})
    kinds = tuple(types[name] for name in names)
    op = OpName.REDUCED_GRADIENTS
    return [*nodes, Node(at(stage, what=op), op, tuple(inputs), kinds, attrs)]
