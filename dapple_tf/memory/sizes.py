"""Bytes of every tensor of every stage function at a given number of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.compiler import StagedModel
from dapple_tf.frontend.graphdef import needed_library, read_shapes, write_graph
from graph_passes.analysis.layers import batch_axis
from graph_passes.analysis.op_costs import value_bytes
from graph_passes.ir.graph import Function, Graph, Port, Shape, Value
from graph_passes.ir.names import at

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


def measure_functions(graph: Graph, model: StagedModel, samples: Sequence[int]) -> dict[str, Sizes]:
    """By name the sizes of all stage functions of ``graph`` for ``samples[i]`` of each argument in stage i.

    All are imported into one TensorFlow graph, joined as the pipeline joins them, so that TensorFlow infers the shapes
    of backward from forward's; nothing runs. Where it refuses them, lengths that the model leaves open count as the
    samples.
    """
    found: dict[str, Sizes] = {}

    def probe() -> None:
        joined = _Joined(model, dict(zip(graph.inputs, model.signature, strict=True)), samples)
        for stage, function in _in_order(graph, len(samples)):
            found[function.name] = Sizes(function, joined.add(stage, function), samples[stage])

    try:
        tf.function(probe, autograph=False).get_concrete_function()
    except ValueError:  # a step that runs is not to fail for what is only said of it
        return {f.name: Sizes(f, {}, samples[stage]) for stage, f in _in_order(graph, len(samples))}
    return found


def _in_order(graph: Graph, stages: int) -> Iterator[tuple[int, Function]]:
    """Forwards, then the rest from the last stage on."""
    functions = [stage_functions(graph, stage) for stage in range(stages)]
    yield from ((stage, found["F"]) for stage, found in enumerate(functions))
    for stage in reversed(range(stages)):
        yield from ((stage, functions[stage][kind]) for kind in ("B", "W") if kind in functions[stage])


class _Joined:
    """Stage functions in the TensorFlow graph that is being built, each with the ``samples`` of its stage."""

    def __init__(self, model: StagedModel, batch: Mapping[str, tf.TensorSpec], samples: Sequence[int]) -> None:
        self._model = model
        self._graph = tf.compat.v1.get_default_graph()
        self._batch = batch
        self._samples = samples
        self._args: dict[tuple[str, int], Any] = {}
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
                return self._take_arg(port.name, self._samples[stage])
            case "variable":
                return internals.capture_of(self._graph, self._model.variables[port.name].handle)
            case "seed":
                return tf.ones([], port.type.dtype.name)
            case "boundary":
                return self._take_share(self._made[stage - 1, port.role, port.name], port, stage, stage - 1)
            case "gradient":
                return self._take_share(self._made[stage + 1, port.role, port.name], port, stage, stage + 1)
        return self._made[stage, port.role, port.name]

    def _take_arg(self, name: str, samples: int) -> Any:
        """The batch argument with so many samples, once for all who take it."""
        if (name, samples) not in self._args:
            spec = self._batch[name]
            self._args[name, samples] = tf.compat.v1.placeholder(spec.dtype, (samples, *spec.shape[1:]))
        return self._args[name, samples]

    def _take_share(self, made: Any, port: Port, stage: int, neighbour: int) -> Any:
        """What a ``neighbour`` has made, of the samples of ``stage``: other replicas have other shares of a batch."""
        axis = batch_axis(port.type)
        if self._samples[stage] == self._samples[neighbour] or axis is None or made.shape.rank is None:
            return made
        lengths = made.shape.as_list()
        lengths[axis] = self._samples[stage]
        return tf.compat.v1.placeholder(made.dtype, lengths)


def _shape(tensor: Any) -> Shape:
    return Shape(None if tensor.shape.rank is None else tuple(tensor.shape.as_list()))
