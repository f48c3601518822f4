"""Sum gradients over the replicas of a stage (AllReduce), and over the stages that share a variable.

Each slice's gradient already has its share of the batch as a factor, so the sum is the gradient of the mean over the
whole batch (DAPPLE, section V.A.3, Fig. 10). The update takes the sum on the first device of the variable's owner.
Where the update of a stage is sharded, the sum is only made on the device that updates the variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.variable_use import Variables, find_variables
from dapple_tf.graph_passes.ir.graph import Attr, Graph, Node, TensorType, Value, make_node
from dapple_tf.graph_passes.ir.names import Site, at, nodes_of, replica_counts, site_of, without_target
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class AllReduce(BuiltInPass):
    """Add ``allreduce`` (replicated stages), ``tied_sum`` (shared variables) and ``reduced_gradients`` (each owner).

    ``shares``: see ``Variables``; stages whose update is sharded get ``reduce`` in place of ``allreduce``.
    """

    shares: tuple[tuple[str, int], ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.GRADIENTS}),
        forbids=frozenset({OpName.ALLREDUCE, OpName.REDUCE, OpName.TIED_SUM, OpName.REDUCED_GRADIENTS, OpName.BARRIER}),
        may_produce=frozenset({OpName.ALLREDUCE, OpName.REDUCE, OpName.TIED_SUM, OpName.REDUCED_GRADIENTS}),
    )

    @property
    def name(self) -> str:
        return str(OpName.ALLREDUCE)

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with ``reduced_gradients`` for each stage, of all variables that it owns.

        A stage whose update is sharded has such a node for each replica.

        Gradients in buckets (see ``Overlap``) are reduced bucket by bucket.
        """
        replicas, variables = replica_counts(graph), find_variables(graph, self.shares)
        gradients: dict[tuple[int, int], list[Node]] = {}
        for node in nodes_of(graph, OpName.GRADIENTS):
            gradients.setdefault(site_of(node), []).append(node)
        added: list[Node] = []
        # (stage, variable) -> the gradient that this stage computes, summed over its replicas; the loss head comes last
        stage_sums: dict[tuple[int, str], Value] = {}
        types: dict[str, TensorType] = {}
        for stage, count in enumerate(replicas):
            for of_replicas in zip(*(gradients.get((stage, r), []) for r in range(count)), strict=True):
                if stage in variables.sharded:
                    sums = _reduce(stage, of_replicas, variables)
                elif count > 1:
                    sums = [allreduce_node(at(stage, what=OpName.ALLREDUCE), of_replicas)]
                else:
                    sums = [*of_replicas]
                added += sums if count > 1 else []
                for node in sums:
                    for name, value, kind in zip(node.strings("variables"), node.values(), node.outputs, strict=True):
                        stage_sums[stage, name] = value
                        types[name] = kind
        for node in nodes_of(graph, OpName.LOSS_HEAD):  # it runs once, on one replica
            for i, port in graph.function(node.string("function")).output_ports("variable"):
                stage_sums[len(replicas), port.name] = Value(node.name, i)
                types[port.name] = port.type
        of_homes: dict[Site, list[str]] = {}
        of_variables: dict[str, list[str]] = {}
        for name in types:
            of_variables.setdefault(without_target(name), []).append(name)
        for stage in range(len(replicas)):
            for variable in variables.owned(stage):
                for name in of_variables.get(variable, ()):
                    of_homes.setdefault(variables.home(name), []).append(name)
        for home, names in sorted(of_homes.items()):
            added += _sum_over_stages(home, names, stage_sums, types)
        return graph.replace(nodes=(*graph.nodes, *added))


def allreduce_node(name: str, of_replicas: Sequence[Node]) -> Node:
    """Return the node that sums gradients over the replicas of a stage; ``of_replicas``: the node of each replica.

    ``name``: the name of the new node; for a bucket of the gradients the number of the bucket is added to it.
    """
    first = of_replicas[0]
    bucket, suffix = _bucket(first)
    return make_node(
        name + suffix,
        OpName.ALLREDUCE,
        (value for node in of_replicas for value in node.values()),
        first.outputs,
        **Site(first.integer("stage")).attrs,
        replicas=len(of_replicas),
        variables=first.strings("variables"),
        **bucket,
    )


def _bucket(gradients: Node) -> tuple[dict[str, Attr], str]:
    """Return the attribute, and the end of a name, that say which bucket of the gradients a sum is of, if any."""
    number = gradients.get("bucket")
    return ({}, "") if number is None else ({"bucket": number}, f"/bucket{number}")


def _reduce(stage: int, of_replicas: Sequence[Node], variables: Variables) -> list[Node]:
    """Return the sums of the same gradients of each replica of a stage, each where its variable is updated.

    The gradient of a variable that another stage owns is summed on one of the replicas, which sends it to the owner.
    """
    first, count = of_replicas[0], len(of_replicas)
    bucket, suffix = _bucket(first)
    at_replica: dict[int, list[int]] = {}
    for i, name in enumerate(first.strings("variables")):
        at_replica.setdefault(variables.home(name).replica % count, []).append(i)
    nodes = []
    for replica, own in sorted(at_replica.items()):
        names = tuple(first.strings("variables")[i] for i in own)
        name, attrs = at(stage, replica, what=f"{OpName.REDUCE}{suffix}"), Site(stage, replica).attrs | bucket
        inputs, kinds = (Value(node.name, i) for node in of_replicas for i in own), (first.outputs[i] for i in own)
        nodes.append(make_node(name, OpName.REDUCE, inputs, kinds, **attrs, variables=names))
    return nodes


def _sum_over_stages(
    home: Site, names: Sequence[str], stage_sums: dict[tuple[int, str], Value], types: dict[str, TensorType]
) -> list[Node]:
    """Return the ``reduced_gradients`` of a site, and a ``tied_sum`` for each variable that has several gradients."""
    nodes: list[Node] = []
    inputs: list[Value] = []
    for name in names:
        parts = tuple(value for (_, variable), value in sorted(stage_sums.items()) if variable == name)
        if len(parts) > 1:
            sum_name = home.at(f"tied_sum_{len(nodes)}")
            nodes.append(make_node(sum_name, OpName.TIED_SUM, parts, [types[name]], **home.attrs, variable=name))
            parts = nodes[-1].values()
        inputs += parts
    op, kinds = OpName.REDUCED_GRADIENTS, (types[name] for name in names)
    return [*nodes, make_node(home.at(op), op, inputs, kinds, **home.attrs, variables=tuple(names))]
