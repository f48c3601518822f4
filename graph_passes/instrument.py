"""Time stamps around every forward and backward call, so that the order that ran can be seen."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.ir import Control, Graph, Node, Value, attributes, tensor

_STAMP = tensor("float64")
_TIMED = ("forward", "backward")


@dataclass(frozen=True)
class Instrument:
    """Add a last output: start and end of every call, in the order of ``timed_calls`` [2 x calls], seconds."""

    name: str = "instrument"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return stamp_calls(graph)


def timed_calls(graph: Graph) -> tuple[str, ...]:
    """Names of the calls that are timed, in the order of the graph's nodes."""
    return tuple(node.name for node in graph.nodes if node.op in _TIMED)


def stamp_calls(graph: Graph) -> Graph:
    """The graph with a ``timestamp`` before each call, once all it waits for is there, and one after it."""
    nodes: list[Node] = []
    stamps: list[Value] = []
    for node in graph.nodes:
        if node.op not in _TIMED:
            nodes.append(node)
            continue
        place = attributes({key: node.integer(key) for key in ("micro_batch", "replica", "stage")})
        ready = (
            f"{name}/end" if graph.node(name).op in _TIMED else name for name in dict.fromkeys(node.predecessors())
        )
        waits = tuple(Control(name, "time: the call could start") for name in ready)
        start = Node(f"{node.name}/start", "timestamp", (), (_STAMP,), place, waits)
        call = node.after(start.name, "time: the start is taken before")
        end = Node(
            f"{node.name}/end",
            "timestamp",
            (),
            (_STAMP,),
            place,
            (Control(node.name, "time: the call ended"),),
        )
        nodes += [start, call, end]
        stamps += [Value(start.name), Value(end.name)]
    pack = Node("timeline", "pack", tuple(stamps), (tensor("float64", len(stamps)),))
    return graph.replace(nodes=(*nodes, pack), outputs=(*graph.outputs, Value(pack.name))).sorted()
