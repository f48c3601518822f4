"""Time stamps around each call, exchange, AllReduce and update, from which the timeline of a step is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graph_passes.ir.graph import Control, Graph, Node, Value, attributes, tensor
from graph_passes.ir.names import BACKWARD_OPS
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import Contract
from graph_passes.passes.join_replicas import first_part

_STAMP = tensor("float64")
_TIMED = frozenset({OpName.FORWARD, *BACKWARD_OPS, OpName.EXCHANGE, OpName.ALLREDUCE, OpName.UPDATE})


@dataclass(frozen=True)
class Instrument:
    """Add a last output, float64 [2 x nodes]: the start and the end of each of ``timed_nodes``, in seconds."""

    name: str = "instrument"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.TIMESTAMP, OpName.STACK_TIMESTAMPS}),
        produces=frozenset({OpName.TIMESTAMP, OpName.STACK_TIMESTAMPS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        return stamp_nodes(graph)


def timed_nodes(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes that are timed, in the order of the graph's nodes."""
    return tuple(node for node in graph.nodes if node.op in _TIMED)


def stamp_nodes(graph: Graph) -> Graph:
    """Return the graph with a ``timestamp`` before each timed node, when it could start, and one after it.

    A call in parts starts with its first part.
    """
    nodes: list[Node] = []
    timed = timed_nodes(graph)
    starting = {first_part(graph, node).name: node for node in timed}
    for node in graph.nodes:
        if node.name in starting:
            ready = (
                f"{name}/end" if graph.node(name).op in _TIMED else name for name in dict.fromkeys(node.predecessors())
            )
            waits = tuple(Control(name, "time: it could start") for name in ready)
            start = _stamp(starting[node.name], "start", *waits)
            nodes += [start, node.after(start.name, "time: the start is taken before")]
        else:
            nodes.append(node)
        if node.op in _TIMED:
            nodes.append(_stamp(node, "end", Control(node.name, "time: it has ended")))
    stamps = [Value(f"{node.name}/{what}") for node in timed for what in ("start", "end")]
    stack = Node("timeline", OpName.STACK_TIMESTAMPS, tuple(stamps), (tensor("float64", len(stamps)),))
    return graph.replace(nodes=(*nodes, stack), outputs=(*graph.outputs, Value(stack.name))).sorted()


def _stamp(node: Node, what: str, *waits: Control) -> Node:
    place = attributes({key: node.integer(key) for key in ("micro_batch", "replica", "stage") if node.has(key)})
    return Node(f"{node.name}/{what}", OpName.TIMESTAMP, (), (_STAMP,), place, waits)
