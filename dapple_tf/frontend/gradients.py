"""Differentiate each stage, last one first, in the graph that the user's function was traced into.

Working in the very graph of the trace keeps custom gradients (which close over its tensors), control flow
and nested functions intact. The gradient of each boundary tensor is a placeholder, filled by the stage after.
DAPPLE, section V.A.1: no backward graph before all forward graphs; then backward graphs in reverse order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.graphdef import read_graph, tensor_name
from graph_passes.ir.graph import Graph, Node, Value, ancestors
from graph_passes.passes.backward import StageGradients
from graph_passes.passes.partition import Stage, StageGraph


def differentiate(captured: Captured, stages: StageGraph) -> tuple[Graph, tuple[StageGradients, ...]]:
    """The joint graph of forward and backward, and what each stage's differentiation gave."""
    graph = captured.func_graph
    tensors = _Tensors(captured)
    trained = _depends_on_training(captured)
    for node in captured.graph.nodes:
        if node.op == "EagerPyFunc" and node.name in trained:
            raise CaptureError(
                f"{node.name!r} is a tf.py_function on the way of a gradient: it keeps one tape for the whole graph, "
                "so micro-batches would take each other's. Write it in TensorFlow ops, or give tf.numpy_function a "
                "tf.custom_gradient"
            )
    found: list[StageGradients] = []
    arriving: dict[Value, Any] = {}  # boundary tensor -> whether a gradient comes for it
    for stage in reversed(stages.stages):
        with graph.as_default(), tf.name_scope(f"stage{stage.index}_gradients"):
            result = _stage(captured, stages, stage, arriving, tensors, trained)
        found.append(result)
        arriving = {value: True for value, _ in result.boundary}
    joint = read_graph(graph, tensors.inputs, captured.graph.name)
    return _keep_types(joint, captured.graph), tuple(reversed(found))


def _keep_types(joint: Graph, captured: Graph) -> Graph:
    """Differentiation reads the graph anew: what is known of forward's shapes is kept."""
    nodes = []
    for node in joint.nodes:
        known = captured.by_name[node.name].outputs if node.name in captured.by_name else ()
        nodes.append(dataclasses.replace(node, outputs=(*known, *node.outputs[len(known) :])))
    return joint.replace(nodes=tuple(nodes))


class _Tensors:
    """IR values to the TensorFlow tensors they were read from."""

    def __init__(self, captured: Captured) -> None:
        self.graph = captured.func_graph
        self.handles = {
            name: internals.capture_of(self.graph, variable.handle) for name, variable in captured.variables.items()
        }
        self.inputs: dict[str, Node] = {}
        self.placeholders: dict[str, Any] = {}
        names = list(captured.graph.inputs)
        for name, tensor in zip(names, self.graph.inputs, strict=False):
            self._add(captured.graph.node(name), tensor)
        for name, handle in self.handles.items():
            self._add(captured.graph.node(name), handle)
        for name, outside in captured.constants.items():
            self._add(captured.graph.node(name), internals.capture_of(self.graph, outside))

    def _add(self, node: Node, tensor: Any) -> None:
        self.inputs[tensor.op.name] = node
        self.placeholders[node.name] = tensor

    def __getitem__(self, value: Value) -> Any:
        if value.node in self.placeholders:
            return self.placeholders[value.node]
        return self.graph.get_tensor_by_name(tensor_name(value))

    def value(self, tensor: Any) -> Value:
        name = tensor.op.name
        return Value(self.inputs[name].name if name in self.inputs else name, tensor.value_index)


def _depends_on_training(captured: Captured) -> set[str]:
    """Nodes that depend on a trainable variable: gradients are wanted for no others."""
    found = set(captured.trainable)
    for node in captured.graph.nodes:
        if any(value.node in found for value in node.inputs):
            found.add(node.name)
    return found


def _stage(
    captured: Captured,
    stages: StageGraph,
    stage: Stage,
    arriving: dict[Value, Any],
    tensors: _Tensors,
    trained: set[str],
) -> StageGradients:
    graph = captured.graph
    loss = graph.outputs[0]
    targets = [value for value in stage.outputs if value in arriving]
    owner = stages.stage_of(loss.node)
    if (len(stages.stages) - 1 if owner is None else owner) == stage.index:
        targets.append(loss)
    if not targets:
        return StageGradients()
    seeds = [
        tf.compat.v1.placeholder(tensors[v].dtype, tensors[v].shape, name=f"seed{i}") for i, v in enumerate(targets)
    ]
    entering = [v for v in stage.inputs if graph.type_of(v).dtype.differentiable and v.node in trained]
    foreign = {name for other in stages.stages if other.index != stage.index for name in other.nodes}
    needed = ancestors(graph, [v.node for v in targets], stop=foreign)
    names = [name for name in captured.trainable if name in needed]
    sources = [tensors[value] for value in entering] + [tensors.handles[name] for name in names]
    if not sources:
        return StageGradients()
    stops = [tensors[value] for value in stage.inputs if graph.type_of(value).dtype.differentiable]
    wanted = [tensors[v] for v in targets]
    with internals.stop_gradients_at_calls(stops):
        grads = tf.gradients(wanted, sources, grad_ys=seeds, stop_gradients=stops, name="gradients")
    dense = [None if g is None else tensors.value(tf.convert_to_tensor(g)) for g in grads]
    boundary = tuple((v, g) for v, g in zip(entering, dense, strict=False) if g is not None)
    variables = tuple((n, g) for n, g in zip(names, dense[len(entering) :], strict=True) if g is not None)
    return StageGradients(
        tuple((v, tensors.value(seed).node) for v, seed in zip(targets, seeds, strict=True)),
        boundary,
        variables,
    )
