"""Bytes of every tensor of every stage function at a given number of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.compiler import StagedModel
from dapple_tf.graphdef import needed_library, read_shapes, write_graph
from dapple_tf.planner.roofline import value_bytes
from graph_passes.ir import Function, Graph, Port, Shape, Value
from graph_passes.names import at

KINDS = {"F": "forward", "B": "backward", "W": "weights"}
"""The function that each kind of action runs."""


@dataclass(frozen=True)
class Sizes:
    """Shapes of a stage function's values, where ``samples`` go through it."""

    function: Function
    shapes: Mapping[str, Sequence[Shape]]
    samples: int

    def __call__(self, value: Value) -> int:
        """Bytes of a value; a length that TensorFlow cannot tell counts as that of the batch."""
        return value_bytes(self.function.graph, value, self.shapes, self.samples)


def stage_functions(graph: Graph, stage: int) -> dict[str, Function]:
    """The functions of a stage by the kind of action that runs them: F, B, and W where backward is split."""
    known = graph.function_by_name
    names = {kind: at(stage, what=what) for kind, what in KINDS.items()}
    return {kind: known[name] for kind, name in names.items() if name in known}


def measure_functions(
    graph: Graph, stages: int, model: StagedModel, signature: Sequence[tf.TensorSpec], samples: int
) -> dict[str, Sizes]:
    """By name the sizes of all stage functions of ``graph`` for ``samples`` of each argument; nothing runs.

    All are imported into one TensorFlow graph, joined as the pipeline joins them, so that TensorFlow infers the shapes
    of backward from forward's.
    """
    found: dict[str, Sizes] = {}

    def probe(*batch: Any) -> None:
        joined = _Joined(model, dict(zip(graph.inputs, batch, strict=True)))
        for stage, function in _in_order(graph, stages):
            found[function.name] = Sizes(function, joined.add(stage, function), samples)

    specs = [tf.TensorSpec((samples, *spec.shape[1:]), spec.dtype) for spec in signature]
    tf.function(probe, autograph=False, input_signature=specs).get_concrete_function()
    return found


def _in_order(graph: Graph, stages: int) -> Iterator[tuple[int, Function]]:
    """Forwards, then the rest from the last stage on."""
    functions = [stage_functions(graph, stage) for stage in range(stages)]
    yield from ((stage, found["F"]) for stage, found in enumerate(functions))
    for stage in reversed(range(stages)):
        yield from ((stage, functions[stage][kind]) for kind in ("B", "W") if kind in functions[stage])


class _Joined:
    """Stage functions in the TensorFlow graph that is being built."""

    def __init__(self, model: StagedModel, batch: Mapping[str, Any]) -> None:
        self._model = model
        self._graph = tf.compat.v1.get_default_graph()
        self._batch = batch
        self._made: dict[tuple[int, str, str], Any] = {}

    def add(self, stage: int, function: Function) -> dict[str, tuple[Shape, ...]]:
        """The output shapes of all nodes of ``function``, which takes what the functions before it made."""
        body = function.graph
        known = {n: self._take(stage, port) for n, port in zip(body.inputs, function.inputs, strict=True)}
        constants = [node.name for node in body.nodes if node.op == "capture"]
        known |= {n: internals.capture_of(self._graph, self._model.constants[n]) for n in constants}
        definition = write_graph(body.replace(library=needed_library(body, self._model.library)))
        prefix = function.name.replace("/", "_")
        if definition.node:
            present = {name: tensor for name, tensor in known.items() if name in body.by_name}
            tf.graph_util.import_graph_def(definition, input_map=present, name=prefix)
        for port, value in zip(function.outputs, body.outputs, strict=True):
            made = known.get(value.node)
            if made is None:
                made = self._graph.get_tensor_by_name(f"{prefix}/{value.node}:{value.index}")
            self._made[stage, port.role, port.name] = made
        shapes = read_shapes(self._graph, prefix + "/")
        return shapes | {name: (_shape(tensor),) for name, tensor in known.items()}

    def _take(self, stage: int, port: Port) -> Any:
        match port.role:
            case "arg":
                return self._batch[port.name]
            case "variable":
                return internals.capture_of(self._graph, self._model.variables[port.name].handle)
            case "seed":
                return tf.ones([], port.type.dtype.name)
            case "boundary":
                return self._made[stage - 1, port.role, port.name]
            case "gradient":
                return self._made[stage + 1, port.role, port.name]
        return self._made[stage, port.role, port.name]


def _shape(tensor: Any) -> Shape:
    return Shape(None if tensor.shape.rank is None else tuple(tensor.shape.as_list()))
