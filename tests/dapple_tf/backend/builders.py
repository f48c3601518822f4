"""Nodes, and variables by name, for handlers that run eagerly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from dapple_tf.backend.handler import Context
from dapple_tf.graph_passes.ir.graph import Attr, Graph, Node, Port, TensorType, attributes
from dapple_tf.graph_passes.ir.ops import OpName

DEVICES = tuple(f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4))


def make_node(op: OpName, *outputs: TensorType, **attrs: Attr) -> Node:
    """Return a node with these attributes, called after its op."""
    return Node(op.value, op, outputs=outputs, attrs=attributes(attrs))


@dataclass
class NamedVariables:
    """Implements ``Bindings``. Copies of variables are those of the replicas in order."""

    owners: Mapping[str, tf.Variable] = field(default_factory=dict)
    replica_copies: Mapping[str, Sequence[tf.Variable]] = field(default_factory=dict)
    sums: Mapping[str, tf.Variable] = field(default_factory=dict)
    updating: tf.Variable = field(default_factory=lambda: tf.Variable(False))

    def variable(self, node: Node, name: str) -> tf.Variable:
        copies = self.replica_copies.get(name)
        return copies[node.integer("replica")] if copies else self.owners[name]

    def resource(self, node: Node, port: Port) -> tf.Variable:
        return self.sums[port.name] if port.role == "sum" else self.variable(node, port.name)

    def owner(self, name: str) -> tf.Variable:
        return self.owners[name]

    def copies(self, node: Node, name: str) -> Sequence[tf.Variable]:
        return self.replica_copies[name]

    def accumulators(self, node: Node) -> Sequence[tf.Variable]:
        return [self.sums[name] for name in node.strings("variables")]


def make_context(bindings: NamedVariables | None = None) -> Context:
    """Return the context of a graph without stage functions, in one process."""
    return Context(Graph("empty", ()), bindings or NamedVariables(), {}, None)
