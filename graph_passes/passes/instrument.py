"""Time stamps around each call, exchange, AllReduce and update, from which the timeline of a step is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dapple_tf.graph_passes.ir.graph import Control, Graph, Node, Value, make_node, tensor
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS, nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.join_replicas import first_part

_STAMP = tensor("float64")
_START, _END = "/start", "/end"
_TIMED = frozenset({OpName.FORWARD, *BACKWARD_OPS, OpName.EXCHANGE, OpName.ALLREDUCE, OpName.REDUCE, OpName.UPDATE})


@dataclass(frozen=True)
class Instrument(BuiltInPass):
    """Add a last output, a float64 vector: the start and the end of each of ``timed_nodes``, in seconds."""

    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.TIMESTAMP, OpName.STACK_TIMESTAMPS}),
        produces=frozenset({OpName.TIMESTAMP, OpName.STACK_TIMESTAMPS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a ``timestamp`` before each timed node, taken when it can start, and one after it.

        A call in parts starts with its first part. The nodes that directly follow a timed node also wait for its last
        time stamp, so all that depends on it, even through nodes that are not timed, starts after this stamp.
        """
        nodes: list[Node] = []
        timed = tuple(node for node in graph.nodes if node.op in _TIMED)
        starting = {first_part(graph, node).name: node for node in timed}
        for node in graph.nodes:
            if node.name in starting:
                waits = tuple(
                    Control(name + _END if graph.node(name).op in _TIMED else name, "time: it could start")
                    for name in dict.fromkeys(node.predecessors())
                )
                start = _stamp(starting[node.name], _START, *waits)
                nodes += [start, node.after(start.name, "time: the start is taken before")]
            else:
                ended = [name for name in dict.fromkeys(node.predecessors()) if graph.node(name).op in _TIMED]
                controls = (Control(name + _END, "time: the end is taken before") for name in ended)
                nodes.append(replace(node, controls=(*node.controls, *controls)))
            if node.op in _TIMED:
                nodes.append(_stamp(node, _END, Control(node.name, "time: it has ended")))
        stamps = [Value(node.name + what) for node in timed for what in (_START, _END)]
        stack = Node("timeline", OpName.STACK_TIMESTAMPS, tuple(stamps), (tensor("float64", len(stamps)),))
        return graph.replace(nodes=(*nodes, stack), outputs=(*graph.outputs, Value(stack.name))).sorted()


def timed_nodes(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes that an instrumented graph times, in the order of the pairs of its last output."""
    (stack,) = nodes_of(graph, OpName.STACK_TIMESTAMPS)
    return tuple(graph.node(start.node.removesuffix(_START)) for start in stack.inputs[::2])


def end_of(graph: Graph, node: Node) -> str:
    """Return the name of the node after which ``node`` has ended: the stamp of its end, where it is timed."""
    return node.name + _END if node.name + _END in graph.by_name else node.name


def starts_of(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the stamps of the time at which ``node`` could start; none where it is not timed."""
    waits = (control.source for control in node.controls)
    return tuple(name for name in waits if graph.node(name).op == OpName.TIMESTAMP and name.endswith(_START))


def _stamp(node: Node, what: str, *waits: Control) -> Node:
    place = {key: node.integer(key) for key in ("micro_batch", "replica", "stage") if node.has(key)}
    return make_node(node.name + what, OpName.TIMESTAMP, (), [_STAMP], waits, **place)
