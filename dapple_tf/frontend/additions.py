"""Read an assignment of a variable's own value plus something as an addition to the variable.

Micro-batches can each add to a variable, as ``v.assign_add(x)`` does; a value that is assigned holds for the last of
them only. Keras variables write their additions as ``v.assign(v + x)``, as many users do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, ancestors

ADDITION_OPS = ("AssignAddVariableOp", "AssignSubVariableOp")
"""Types of the ops that add to a variable, or subtract from it."""

_ADD, _SUBTRACT = ADDITION_OPS
_ADDITIONS = {"Add": _ADD, "AddV2": _ADD, "Sub": _SUBTRACT}


def read_additions(graph: Graph, outputs: Collection[Value]) -> Graph:
    """Return the op-level graph of a loss in which ``v.assign(v + x)`` is ``v.assign_add(x)``, and so for ``v - x``.

    The nodes that computed the sum stay, without use, so that all nodes keep their names. An assignment stays one where
    something else takes the value that was read or the sum, where it is one of the loss's ``outputs``, where x has
    another shape than the variable, and where the variable is written between the read and the assignment.
    """
    reader = _Reader(graph, {name: {node.name for node in users} for name, users in graph.consumers().items()}, outputs)
    found = (reader.addition(node) or node if node.op == "AssignVariableOp" else node for node in graph.nodes)
    return graph.replace(nodes=tuple(found))


@dataclass(frozen=True)
class _Reader:
    """``takers``: the names of the nodes that take an output of each node."""

    graph: Graph
    takers: Mapping[str, set[str]]
    outputs: Collection[Value]

    def addition(self, node: Node) -> Node | None:
        """Return the addition that an assignment is, or None."""
        variable, value = node.inputs
        total = self._computed_for(value, node)
        op = _ADDITIONS.get(total.op) if total is not None else None
        if total is None or op is None:
            return None
        for place in (0,) if total.op == "Sub" else (0, 1):
            read, added = self._computed_for(total.inputs[place], total), total.inputs[1 - place]
            if read is None or read.op != "ReadVariableOp" or read.inputs[0] != variable:
                continue
            if self._has_shape_of(added, read) and not self._is_written_between(read, node):
                controls = tuple(control for control in node.controls if control.source != read.name)
                made = dataclasses.replace(node, op=op, inputs=(variable, added), controls=controls)
                return made.without("validate_shape")
        return None

    def _computed_for(self, value: Value, taker: Node) -> Node | None:
        """Return the node that computes ``value``, before Identity ops, if nothing but ``taker`` takes it."""
        node = self.graph.node(value.node)
        if self.takers[node.name] != {taker.name} or value in self.outputs:
            return None
        return self._computed_for(node.inputs[0], node) if node.op == "Identity" else node

    def _has_shape_of(self, added: Value, read: Node) -> bool:
        dims = self.graph.type_of(added).shape.dims
        return dims is not None and None not in dims and dims == read.outputs[0].shape.dims

    def _is_written_between(self, read: Node, write: Node) -> bool:
        """Return whether another write of the variable may come after the read and before ``write``."""
        variables = {*write.strings("writes")}
        before = ancestors(self.graph, [read.name])
        others = [n for n in self.graph.nodes if n.effect is Effect.WRITE and variables & {*n.strings("writes")}]
        return any(
            other.name not in before and write.name not in ancestors(self.graph, [other.name])
            for other in others
            if other is not write
        )
