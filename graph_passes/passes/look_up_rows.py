"""Look rows of a variable up in the variable itself, without reading it whole first.

Keras reads a whole table and gathers rows of the value. Once an update has written single rows of the table, TensorFlow
copies the whole table at each such read, so once for every micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.ir.graph import Function, Graph, Node, make_node
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class LookUpRows(BuiltInPass):
    """Replace the nodes ``GatherV2`` named in ``lookups``, which gather along axis 0, by ``ResourceGather``.

    A read of a variable, and the lookups in its value, stay as they are where another node uses the value or waits for
    the read.
    """

    lookups: frozenset[str]
    contract: ClassVar[Contract] = Contract(forbids=frozenset({OpName.FORWARD, OpName.BACKWARD}))

    def __call__(self, graph: Graph) -> Graph:
        return graph.replace(functions=tuple(_look_up(function, self.lookups) for function in graph.functions))


def _look_up(function: Function, lookups: Set[str]) -> Function:
    """Return the function in which ``lookups`` take the variable in place of its value."""
    graph = function.graph
    consumers = graph.consumers()
    kept = {control.source for node in graph.nodes for control in node.controls}
    kept |= {value.node for value in graph.outputs}
    reads = {
        node.name: node
        for node in graph.nodes
        if node.op == "ReadVariableOp"
        and node.name not in kept
        and consumers[node.name]
        and all(_gathers_from(user, node, lookups) for user in consumers[node.name])
    }
    gone = set(reads)
    nodes = []
    for node in graph.nodes:
        read = reads.get(node.inputs[0].node) if node.name in lookups and node.inputs else None
        if read is not None:
            axis = node.inputs[2].node
            gone |= {axis} if consumers[axis] == [node] and axis not in kept else set()
            node = _resource_gather(node, read)
        nodes.append(node)
    body = graph.replace(nodes=tuple(node for node in nodes if node.name not in gone))
    return dataclasses.replace(function, graph=body)


def _gathers_from(user: Node, read: Node, lookups: Set[str]) -> bool:
    """Return whether ``user`` takes the value of ``read`` only to gather its rows."""
    places = [i for i, value in enumerate(user.inputs) if value.node == read.name]
    return user.op == "GatherV2" and user.name in lookups and places == [0]


def _resource_gather(gather: Node, read: Node) -> Node:
    made = make_node(
        gather.name,
        "ResourceGather",
        (read.inputs[0], gather.inputs[1]),
        gather.outputs,
        dict.fromkeys((*read.controls, *gather.controls)),
        Tindices=gather.attr("Tindices"),
        batch_dims=0,
        dtype=read.attr("dtype"),
        validate_indices=True,
    )
    return dataclasses.replace(made, effect=read.effect, device=gather.device)
