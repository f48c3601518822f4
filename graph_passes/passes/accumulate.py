"""Gradient accumulation: each replica sums the gradients of its micro-batches (DAPPLE, section V.A.3, Fig. 10: GA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.ir.graph import Attr, Control, Graph, Node, Value, make_node
from dapple_tf.graph_passes.ir.names import at, micro_batch_count, nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class Accumulate(BuiltInPass):
    """Add an ``accumulate`` after each call that gives gradients of weights, and a ``gradients`` for each replica."""

    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.ACCUMULATE, OpName.GRADIENTS, OpName.ALLREDUCE, OpName.REDUCED_GRADIENTS}),
        may_produce=frozenset({OpName.ACCUMULATE, OpName.GRADIENTS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a ``gradients`` node for each replica of each stage that has gradients.

        Several micro-batches are summed in micro-batch order, in buffers on the replica's device, so that no
        micro-batch's gradients stay in memory. The gradients of a single micro-batch are passed on as they are.
        """
        last = micro_batch_count(graph) - 1
        added: list[Node] = []
        for node in nodes_of(graph, OpName.BACKWARD, OpName.WEIGHTS):
            ports = graph.function(node.string("function")).output_ports("variable")
            if not ports:
                continue
            stage, replica, m = (node.integer(key) for key in ("stage", "replica", "micro_batch"))
            values = tuple(Value(node.name, i) for i, _ in ports)
            names = tuple(port.name for _, port in ports)
            attrs: dict[str, Attr] = {"replica": replica, "stage": stage, "variables": names}
            controls: tuple[Control, ...] = ()
            if last:
                name = at(stage, replica, m, OpName.ACCUMULATE)
                previous = at(stage, replica, m - 1, OpName.ACCUMULATE)
                order = () if m == 0 else (Control(previous, f"accumulate: micro-batch {m} after {m - 1}"),)
                own_attrs: dict[str, Attr] = {**attrs, "first": m == 0, "micro_batch": m}
                added.append(make_node(name, OpName.ACCUMULATE, values, (), order, **own_attrs))
                values, controls = (), (Control(name, "accumulate: all micro-batches are summed"),)
            if m == last:
                kinds = (port.type for _, port in ports)
                name = at(stage, replica, what=OpName.GRADIENTS)
                added.append(make_node(name, OpName.GRADIENTS, values, kinds, controls, **attrs))
        return graph.replace(nodes=(*graph.nodes, *added)).sorted()
