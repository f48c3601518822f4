"""Turn a pipelined graph into one TensorFlow function.

Every op is made under its node's device, name and control edges; TensorFlow adds none of its own
(automatic control dependencies are off), so the IR's edges are the ones that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.operations import Operations
from graph_passes.ir.graph import Graph, Node, Value


def emit(graph: Graph, signature: Sequence[tf.TensorSpec], operations: Operations) -> Any:
    """The ConcreteFunction that runs ``graph``: takes the batch's tensors, returns the graph's outputs."""

    def step(*batch: Any) -> list[Any]:
        return _Emitter(graph, operations).run(batch)

    traced = tf.function(
        step,
        autograph=False,
        input_signature=list(signature),
        experimental_attributes={internals.NO_AUTOMATIC_CONTROL: True},
    )
    return traced.get_concrete_function()


class _Emitter:
    def __init__(self, graph: Graph, operations: Operations) -> None:
        self.graph = graph
        self.operations = operations
        self.tensors: dict[Value, Any] = {}
        self.done: dict[str, list[Any]] = {}  # node -> the ops that have run when the node has

    def run(self, batch: Sequence[Any]) -> list[Any]:
        for name, tensor in zip(self.graph.inputs, batch, strict=True):
            self.tensors[Value(name)] = tensor
            self.done[name] = [tensor.op]
        for node in self.graph.nodes:
            if node.name not in self.done:
                self._emit(node)
        with tf.control_dependencies(self._everything()):
            return [self._output(self.tensors[value]) for value in self.graph.outputs]

    def _output(self, tensor: Any) -> Any:
        """The output, where it was made: a rank's token must not come to where a step fails (see ``job.canary``)."""
        with tf.device(tensor.device):
            return tf.identity(tensor)

    def _everything(self) -> list[Any]:
        """The ops that nothing else waits for: the end of the step."""
        waited = {source for node in self.graph.nodes for source in node.predecessors()}
        return [op for node in self.graph.nodes if node.name not in waited for op in self.done[node.name]]

    def _emit(self, node: Node) -> None:
        inputs = [self.tensors[value] for value in node.inputs]
        self._capture_handles(node)
        after = [op for control in node.controls for op in self.done[control.source]]
        with tf.name_scope(node.name + "/"), tf.device(node.device), tf.control_dependencies(after):
            outputs, ops = self.operations.run(node, inputs)
        self.tensors.update(zip(node.values(), outputs, strict=True))
        self.done[node.name] = ops or [tensor.op for tensor in outputs]

    def _capture_handles(self, node: Node) -> None:
        """Capture resources before the control block: an op gets no edge when an input was made inside it."""
        graph = tf.compat.v1.get_default_graph()
        for variable in self.operations.resources(node):
            internals.capture_of(graph, variable.handle)
