"""Time stamps around every call, exchange, AllReduce and update, so that what ran, and when, can be seen."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.ir.graph import Control, Graph, Node, Value, attributes, tensor

_STAMP = tensor("float64")
_TIMED = frozenset({"forward", "backward", "weights", "exchange", "allreduce", "update"})


@dataclass(frozen=True)
class Instrument:
    """Add a last output: start and end of every node of ``timed_nodes``, in that order [2 x nodes], seconds."""

    name: str = "instrument"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return stamp_nodes(graph)


def timed_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes that are timed, in the order of the graph's nodes."""
    return tuple(node for node in graph.nodes if node.op in _TIMED)


def stamp_nodes(graph: Graph) -> Graph:
    """The graph with a ``timestamp`` before each timed node, once all it waits for is there, and one after it."""
    nodes: list[Node] = []
    stamps: list[Value] = []
    for node in graph.nodes:
        if node.op not in _TIMED:
            nodes.append(node)
            continue
        place = attributes({key: node.integer(key) for key in ("micro_batch", "replica", "stage") if node.has(key)})
        ready = (
            f"{name}/end" if graph.node(name).op in _TIMED else name for name in dict.fromkeys(node.predecessors())
        )
        waits = tuple(Control(name, "time: it could start") for name in ready)
        start = Node(f"{node.name}/start", "timestamp", (), (_STAMP,), place, waits)
        end = Node(f"{node.name}/end", "timestamp", (), (_STAMP,), place, (Control(node.name, "time: it has ended"),))
        nodes += [start, node.after(start.name, "time: the start is taken before"), end]
        stamps += [Value(start.name), Value(end.name)]
    pack = Node("timeline", "pack", tuple(stamps), (tensor("float64", len(stamps)),))
    return graph.replace(nodes=(*nodes, pack), outputs=(*graph.outputs, Value(pack.name))).sorted()
