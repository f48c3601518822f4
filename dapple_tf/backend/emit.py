"""Build the TensorFlow function of a pipelined graph.

Every op gets its node's device, name scope and control edges. TensorFlow's automatic control dependencies are off, so
only the graph's own edges order the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.operations import Operations
from graph_passes.ir.graph import Graph, Node, Value


def emit(graph: Graph, signature: Sequence[tf.TensorSpec], operations: Operations) -> Any:
    """Return the ConcreteFunction that runs ``graph``: it takes the batch's tensors and returns the graph's outputs.

    ``signature``: the specs of the graph's inputs, which are the batch's flattened tensors.
    """

    def step(*batch: Any) -> list[Any]:
        with internals.one_grappler_iteration():
            return _Emitter(graph, operations).run(batch)

    traced = tf.function(
        step,
        autograph=False,
        input_signature=list(signature),
        experimental_attributes={internals.NO_AUTOMATIC_CONTROL: True},
    )
    return traced.get_concrete_function()


class _Emitter:
    """Emits the nodes of a graph into the TensorFlow graph under construction, in order."""

    def __init__(self, graph: Graph, operations: Operations) -> None:
        self._graph = graph
        self._operations = operations
        self._tensors: dict[Value, Any] = {}
        self._ends: dict[str, list[Any]] = {}  # by node, the ops that have run once the node has

    def run(self, batch: Sequence[Any]) -> list[Any]:
        for name, tensor in zip(self._graph.inputs, batch, strict=True):
            self._tensors[Value(name)] = tensor
            self._ends[name] = [tensor.op]
        for node in self._graph.nodes:
            if node.name not in self._ends:
                self._emit(node)
        with tf.control_dependencies(self._final_ops()):
            return [self._output(self._tensors[value]) for value in self._graph.outputs]

    def _emit(self, node: Node) -> None:
        inputs = [self._tensors[value] for value in node.inputs]
        self._capture_resources(node)
        after = [op for control in node.controls for op in self._ends[control.source]]
        with tf.name_scope(node.name + "/"), tf.device(node.device), tf.control_dependencies(after):
            outputs, ops = self._operations.run(node, inputs)
        self._tensors.update(zip(node.values(), outputs, strict=True))
        self._ends[node.name] = ops or [tensor.op for tensor in outputs]

    def _capture_resources(self, node: Node) -> None:
        """Capture resources outside of the control block: an op gets no edge if an input was created inside it."""
        graph = tf.compat.v1.get_default_graph()
        for variable in self._operations.resources(node):
            internals.capture_of(graph, variable.handle)

    def _final_ops(self) -> list[Any]:
        """Return the ops for which no node waits: the step ends when these have run."""
        waited_for = {source for node in self._graph.nodes for source in node.predecessors()}
        return [op for node in self._graph.nodes if node.name not in waited_for for op in self._ends[node.name]]

    def _output(self, tensor: Any) -> Any:
        """Return an output on the device that computed it.

        A transfer to another device would fail with the step, and with it a rank's token, which the hang detector
        waits for.
        """
        with tf.device(tensor.device):
            return tf.identity(tensor)
