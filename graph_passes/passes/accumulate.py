"""Gradient accumulation: every device sums the gradients of its micro-batches (DAPPLE, V.A.3, Fig. 10: GA)."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.ir.graph import Attr, Control, Graph, Node, attributes
from graph_passes.ir.names import at, micro_batch_count, nodes_of


@dataclass(frozen=True)
class Accumulate:
    """Add ``accumulate`` after each call that gives gradients of weights, and ``gradients``: the sum of a replica."""

    name: str = "accumulate"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return accumulate_gradients(graph)


def accumulate_gradients(graph: Graph) -> Graph:
    """The graph with one ``gradients`` node for each replica of each stage that has gradients.

    With several micro-batches they are summed in buffers that live on the device, in micro-batch order, so
    that no micro-batch's gradients stay alive; a single micro-batch's are passed on as they are.
    """
    last = micro_batch_count(graph) - 1
    added: list[Node] = []
    for node in nodes_of(graph, "backward", "weights"):
        ports = graph.function(node.string("function")).output_ports("variable")
        if not ports:
            continue
        stage, replica, m = (node.integer(key) for key in ("stage", "replica", "micro_batch"))
        values = tuple(node.values()[i] for i, _ in ports)
        names = tuple(port.name for _, port in ports)
        attrs: dict[str, Attr] = {"replica": replica, "stage": stage, "variables": names}
        controls: tuple[Control, ...] = ()
        if last:
            here = at(stage, replica, m, "accumulate")
            before = at(stage, replica, m - 1, "accumulate")
            order = () if m == 0 else (Control(before, f"accumulate: micro-batch {m} after {m - 1}"),)
            more = attributes({**attrs, "first": m == 0, "micro_batch": m})
            added.append(Node(here, "accumulate", values, (), more, order))
            values, controls = (), (Control(here, "accumulate: all micro-batches are summed"),)
        if m == last:
            kinds = tuple(port.type for _, port in ports)
            name = at(stage, replica, what="gradients")
            added.append(Node(name, "gradients", values, kinds, attributes(attrs), controls))
    return graph.replace(nodes=(*graph.nodes, *added)).sorted()
