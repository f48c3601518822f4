"""Bytes of every tensor of every stage function, for a given number of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.inference import import_for_shapes
from dapple_tf.frontend.tables import with_known_shapes
from dapple_tf.frontend.write_graph import needed_library, write_graph
from dapple_tf.graph_passes.analysis.layers import batch_axis
from dapple_tf.graph_passes.analysis.op_costs import value_bytes
from dapple_tf.graph_passes.ir.graph import Function, Graph, Port, Shape, Value
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.schedules.schedule import CALL_OF_KIND
from dapple_tf.staged_model import StagedModel


@dataclass(frozen=True)
class FunctionSizes:
    """Shapes of all values of a stage function that processes ``samples`` samples."""

    function: Function
    shapes: Mapping[str, Sequence[Shape]]
    samples: int

    def bytes_of(self, value: Value) -> int:
        """Return the bytes of a value; an axis whose length TensorFlow cannot infer counts as ``samples``."""
        return value_bytes(self.function.graph, value, self.shapes, self.samples)


def stage_functions(graph: Graph, stage: int) -> dict[str, Function]:
    """Return the functions of a stage by the kind of action that runs them: F, and B or I and W, or all of these."""
    functions = graph.function_by_name
    names = {kind: at(stage, what=call) for kind, call in CALL_OF_KIND.items()}
    return {kind: functions[name] for kind, name in names.items() if name in functions}


def infer_sizes(graph: Graph, model: StagedModel, samples: Sequence[int]) -> dict[str, FunctionSizes]:
    """Return the sizes in every stage function of ``graph``, by name; stage i processes ``samples[i]`` samples.

    All functions are imported into one TensorFlow graph and connected as the pipeline connects them, so that
    TensorFlow infers the shapes of backward from forward's; nothing runs. Where TensorFlow refuses the number of
    samples, unknown lengths count as ``samples``.
    """
    found: dict[str, FunctionSizes] = {}

    def import_all() -> None:
        for stage, function, _, shapes in connect_functions(graph, model, samples):
            found[function.name] = FunctionSizes(function, shapes, samples[stage])

    try:
        tf.function(import_all, autograph=False).get_concrete_function()
    except ValueError:  # a step that can run must not fail because of a report
        return {f.name: FunctionSizes(f, {}, samples[stage]) for stage, f in _in_order(graph, len(samples))}
    return found


Imported = tuple[int, Function, Mapping[str, Any], Mapping[str, Sequence[Shape]]]
"""The stage, a function of it, the tensors of its inputs and the shapes of all its values, both by node."""


def connect_functions(graph: Graph, model: StagedModel, samples: Sequence[int]) -> Iterator[Imported]:
    """Import the functions of forward and backward into the TensorFlow graph under construction, and yield each.

    They are connected as the pipeline connects them. Raises ValueError where TensorFlow refuses the number of samples.
    """
    inference = _ShapeInference(model, dict(zip(model.graph.inputs, model.interface.example, strict=True)), samples)
    for stage, function in _in_order(graph, len(samples)):
        inputs, shapes = inference.add(stage, function)
        yield stage, function, inputs, shapes


def _in_order(graph: Graph, stages: int) -> Iterator[tuple[int, Function]]:
    """Yield all forward functions, then the others from the last stage to the first."""
    functions = [stage_functions(graph, stage) for stage in range(stages)]
    yield from ((stage, by_kind["F"]) for stage, by_kind in enumerate(functions))
    for stage in reversed(range(stages)):
        yield from ((stage, functions[stage][kind]) for kind in ("B", "I", "W") if kind in functions[stage])


class _ShapeInference:
    """Imports stage functions into the TensorFlow graph under construction, each for its stage's ``samples``."""

    def __init__(self, model: StagedModel, signature: Mapping[str, tf.TensorSpec], samples: Sequence[int]) -> None:
        self._model = model
        self._graph = tf.compat.v1.get_default_graph()
        self._signature = signature
        self._samples = samples
        self._arguments: dict[tuple[str, int], Any] = {}
        self._outputs: dict[tuple[int, str, str], Any] = {}  # by stage, role and name of the port

    def add(self, stage: int, function: Function) -> tuple[dict[str, Any], Mapping[str, Sequence[Shape]]]:
        """Import ``function`` with the outputs of the functions before it; return its inputs, and all nodes' shapes."""
        body = function.graph
        known = {n: self._input(stage, port) for n, port in zip(body.inputs, function.inputs, strict=True)}
        constants = [node.name for node in body.nodes if node.op == "capture"]
        known |= {n: internals.capture_of(self._graph, self._model.constants[n]) for n in constants}
        library = needed_library(body, self._model.library)
        definition = write_graph(with_known_shapes(body).replace(library=library), shapes=True)
        imported = import_for_shapes(definition, known, self._graph)
        for port, value in zip(function.outputs, body.outputs, strict=True):
            self._outputs[stage, port.role, port.name] = imported.tensors[value.node][value.index]
        return known, imported.shapes

    def _input(self, stage: int, port: Port) -> Any:
        match port.role:
            case "arg":
                return self._argument(port.name, self._samples[stage])
            case "variable":
                return internals.capture_of(self._graph, self._model.variables[port.name].handle)
            case "sum":
                return tf.compat.v1.placeholder(tf.resource, [])
            case "seed":
                return tf.ones([], port.type.dtype.name)
            case "rows":
                return tf.constant([0, self._samples[stage], self._samples[stage]], tf.int64)
            case "once":
                return tf.compat.v1.placeholder(port.type.dtype.name, port.type.shape.dims)
            case "boundary":
                return self._received(port, stage, stage - 1)
            case "gradient":
                if stage + 1 == len(self._samples):  # the loss head gives the gradients of the rows that forward gave
                    return self._outputs[stage, "boundary", port.name]
                return self._received(port, stage, stage + 1)
        return self._outputs[stage, port.role, port.name]

    def _argument(self, name: str, samples: int) -> Any:
        """Return a placeholder for ``samples`` rows of a batch argument, the same one for all functions."""
        if (name, samples) not in self._arguments:
            spec = self._signature[name]
            self._arguments[name, samples] = tf.compat.v1.placeholder(spec.dtype, (samples, *spec.shape[1:]))
        return self._arguments[name, samples]

    def _received(self, port: Port, stage: int, sender: int) -> Any:
        """Return what ``stage`` receives from ``sender``: with other replicas, a tensor of another number of rows."""
        tensor = self._outputs[sender, port.role, port.name]
        axis = batch_axis(port.type)
        if self._samples[stage] == self._samples[sender] or axis is None or tensor.shape.rank is None:
            return tensor
        lengths = tensor.shape.as_list()
        lengths[axis] = self._samples[stage]
        return tf.compat.v1.placeholder(tensor.dtype, lengths)
