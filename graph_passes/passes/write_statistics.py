"""Write moving statistics once a step, from sums over all micro-batches and replicas (deferred batch norm).

The forward of each micro-batch gives *statistics*: small tensors that add up over samples. They are no gradients: they
are summed by nodes of their own, so neither clipping nor the optimizer sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Function, Graph, Node, Value, make_node
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS, Site, at, micro_batch_count, nodes_of, replica_counts
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.allreduce import allreduce_node
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class WriteStatistics(BuiltInPass):
    """Sum the statistics that forward gives, and call each ``stageN/write_statistics`` on the sums."""

    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.SUM_STATISTICS, OpName.WRITE_STATISTICS, OpName.BARRIER}),
        produces=frozenset({OpName.SUM_STATISTICS, OpName.WRITE_STATISTICS}),
        may_produce=frozenset({OpName.ALLREDUCE}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a ``sum_statistics`` for each replica whose forward gives statistics, and their users.

        These are an ``allreduce`` for each replicated stage, and a ``write_statistics`` for each stage that has a
        function of that name; it may take the sums of other stages. Raises GraphError if it takes one that no forward
        gives.
        """
        added: list[Node] = []
        sums: dict[str, Value] = {}
        for stage, count in enumerate(replica_counts(graph)):
            ports = graph.function(at(stage, what=OpName.FORWARD)).output_ports("statistic")
            if not ports:
                continue
            names = tuple(port.name for _, port in ports)
            of_replicas = [_sum(graph, stage, replica) for replica in range(count)]
            added += of_replicas
            if count > 1:
                added.append(allreduce_node(at(stage, what="allreduce_statistics"), of_replicas))
            sums |= dict(zip(names, added[-1].values(), strict=True))
        for stage in range(len(replica_counts(graph))):
            function = graph.function_by_name.get(at(stage, what=OpName.WRITE_STATISTICS))
            added += [_write(graph, stage, function, sums)] if function else []
        return graph.replace(nodes=(*graph.nodes, *added)).sorted()


def _sum(graph: Graph, stage: int, replica: int) -> Node:
    """Return the node that adds the statistics of a replica's forwards over the micro-batches."""
    ports = graph.function(at(stage, what=OpName.FORWARD)).output_ports("statistic")
    calls = [at(stage, replica, m, OpName.FORWARD) for m in range(micro_batch_count(graph))]
    site, op, names = Site(stage, replica), OpName.SUM_STATISTICS, tuple(port.name for _, port in ports)
    values, kinds = (Value(call, i) for call in calls for i, _ in ports), (port.type for _, port in ports)
    return make_node(at(*site, what=op), op, values, kinds, **site.attrs, variables=names)


def _write(graph: Graph, stage: int, function: Function, sums: dict[str, Value]) -> Node:
    taken = [port.name for _, port in function.input_ports("statistic")]
    for name in taken:
        if name not in sums:
            raise GraphError(f"{function.name!r} takes the statistic {name!r}, but no forward gives it")
    op = OpName.WRITE_STATISTICS
    node = function.call(at(stage, what=op), op, (sums[name] for name in taken), replica=0, stage=stage)
    for call in nodes_of(graph, OpName.FORWARD, *BACKWARD_OPS):
        if call.integer("stage") == stage:
            node = node.after(call.name, "statistics: what forward and backward read is not written before")
    return node
