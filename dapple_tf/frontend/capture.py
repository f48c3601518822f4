"""Trace a tf.function or callable, and read its graph into the IR.

The trace is our own (the user's function keeps its traces untouched), with an unknown batch size on axis 0
of every argument, so that the same graph serves every micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError, LossError
from dapple_tf.frontend.batch import batch_signature
from dapple_tf.frontend.graphdef import read_graph
from graph_passes.ir.graph import Effect, Graph, Node, Value, attributes


@dataclass(frozen=True)
class Captured:
    """A traced loss.

    ``graph``: the op-level IR; its outputs are the loss, then the aux tensors. ``func_graph``: the TensorFlow
    graph it was read from, where gradients are made. ``variables``: by IR name. ``constants``: outside
    tensors, by the name of their ``capture`` node. ``aux``: the structure of the aux output, or None.
    """

    graph: Graph
    func_graph: Any
    variables: dict[str, tf.Variable]
    trainable: tuple[str, ...]
    constants: dict[str, tf.Tensor]
    aux: Any
    signature: tuple[tf.TensorSpec, ...]

    @property
    def stateful(self) -> bool:
        """Forward draws random numbers or writes variables, so its result depends on the micro-batches."""
        return any(node.effect in (Effect.WRITE, Effect.RANDOM) for node in self.graph.nodes)


def capture(loss_fn: Callable[..., Any], batch: Sequence[Any]) -> Captured:
    """Trace ``loss_fn(*batch)`` once and read the graph.

    Raises CaptureError when the trace fails for an unknown batch size or the function trains nothing, and
    LossError when the loss is not a scalar.
    """
    specs = batch_signature(batch)
    structured = tf.nest.pack_sequence_as(tuple(batch), list(specs))
    function = internals.clone_function(loss_fn) if internals.is_tf_function(loss_fn) else tf.function(loss_fn)
    _check_signature(function)
    recorder = _LayerRecorder()
    try:
        with internals.record_layers(recorder):
            concrete = function.get_concrete_function(*structured)
    except (TypeError, ValueError) as error:
        if "None" not in str(error):  # not about the unknown batch size
            raise CaptureError(f"{_name(loss_fn)} cannot be traced: {error}") from error
        raise CaptureError(
            f"{_name(loss_fn)} cannot be traced with an unknown batch size on axis 0 ({specs}): {error}. Where it "
            "uses x.shape[0], let it use tf.shape(x)[0]"
        ) from error
    graph = concrete.graph
    outputs, aux = _outputs(concrete, graph, loss_fn)
    return _read(concrete, graph, outputs, aux, specs, recorder, _name(loss_fn))


def _check_signature(function: Any) -> None:
    signature = internals.input_signature(function)
    for spec in tf.nest.flatten(signature or ()):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is not None:
            raise CaptureError(
                f"the function's input_signature fixes axis 0 to {spec.shape[0]}; micro-batches need it to be None"
            )


def _name(function: Any) -> str:
    python = getattr(function, "python_function", function)
    name = getattr(python, "__name__", type(python).__name__)
    return "".join(c if c.isalnum() or c in "_.-" else "_" for c in str(name)).strip("_") or "loss"


def _outputs(concrete: Any, graph: Any, loss_fn: Any) -> tuple[list[Any], Any]:
    result = concrete.structured_outputs
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    name = _name(loss_fn)
    if not isinstance(loss, tf.TensorSpec | tf.Tensor):
        raise LossError(f"{name} must return a scalar loss, or (loss, aux), but returns {type(loss).__name__}")
    if loss.shape.rank != 0:
        raise LossError(
            f"the loss of {name} has shape {loss.shape}, not (): return its mean over the batch (tf.reduce_mean)"
        )
    if not loss.dtype.is_floating:
        raise LossError(f"the loss of {name} is {loss.dtype.name}, not a float")
    flat = [_source(tensor) for tensor in graph.outputs]
    if len(flat) != 1 + len(tf.nest.flatten(aux) if aux is not None else []):
        raise CaptureError(f"every output of {name} must be a tensor")
    return flat, aux


def _source(tensor: Any) -> Any:
    """The tensor behind the Identity ops at a function's end, which would hold what is computed early till then."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


class _LayerRecorder:
    """Which ops each Keras layer's call made: (graph, first op, end op, path, whether it holds layers)."""

    def __init__(self) -> None:
        self.stack: list[tuple[keras.Layer, Any, int, list[bool]]] = []  # layer, its graph, first op, layers inside
        self.spans: list[tuple[Any, int, int, str, bool]] = []

    def __call__(self, layer: keras.Layer, entering: bool) -> None:
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations()) if graph.building_function else 0
        if entering:
            if self.stack and self.stack[-1][1] is graph:
                self.stack[-1][3].append(True)
            self.stack.append((layer, graph, count, []))
            return
        path = "/".join(entry[0].name for entry in self.stack)
        _, _, first, inner = self.stack.pop()
        self.spans.append((graph, first, count, path, bool(inner) or isinstance(layer, keras.Model)))

    def paths(self, graph: Any) -> list[tuple[str, bool]]:
        """For each op of ``graph`` its innermost layer's path, and whether that layer holds others (a container).

        Calls made while the body of a loop was traced belong to the body's graph, not to this one.
        """
        found: list[tuple[str, bool]] = [("", True)] * len(graph.get_operations())
        for where, first, end, path, container in reversed(self.spans):
            if where is graph:
                found[first:end] = [(path, container)] * (end - first)
        return found


def _read(
    concrete: Any, graph: Any, outputs: list[Any], aux: Any, specs: Any, recorder: _LayerRecorder, name: str
) -> Captured:
    variables: dict[str, tf.Variable] = {}
    constants: dict[str, tf.Tensor] = {}
    inputs: dict[str, Node] = {}
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    candidates = list(graph.trainable_variables)
    # A frozen Keras layer tells its own variables, not TensorFlow's.
    wrappers = internals.keras_variables(candidates)
    trainable_ids = {id(v) for v, wrapper in zip(candidates, wrappers, strict=True) if wrapper.trainable}
    trainable: list[str] = []
    arguments = graph.inputs[: len(specs)]
    operations = {
        op.name for op in graph.get_operations() if op.type != "Placeholder"
    }  # a variable may have such a name
    for i, tensor in enumerate(arguments):
        inputs[tensor.op.name] = Node(f"input/{i}", "arg", attrs=attributes({"port": f"input/{i}"}))
    for outside, inside in graph.captures:
        variable = by_handle.get(id(outside))
        if variable is None:
            if outside.dtype == tf.resource:
                raise CaptureError(
                    f"{name} uses a resource that is not a tf.Variable ({inside.name}; a table, dataset or iterator?): "
                    "pass what it gives as an argument instead"
                )
            inputs[inside.op.name] = Node(f"capture/{len(constants)}", "capture")
            constants[f"capture/{len(constants)}"] = outside
            continue
        label = unique(variable.name.split(":")[0], operations | variables.keys())
        variables[label] = variable
        inputs[inside.op.name] = Node(label, "variable")
        if id(variable) in trainable_ids:
            trainable.append(label)
    if not trainable:
        raise CaptureError(f"{name} uses no trainable variable, so there is nothing to train: is the model captured?")
    ir = read_graph(graph, inputs, name)
    ir = _mark_layers(ir, graph, recorder.paths(graph), inputs)
    values = tuple(_value(tensor, inputs) for tensor in outputs)
    ir = ir.replace(inputs=tuple(inputs[t.op.name].name for t in arguments), outputs=values)
    return Captured(ir, graph, variables, tuple(trainable), constants, aux, specs)


def unique(name: str, taken: Any) -> str:
    """``name``, or ``name_1``, ``name_2`` ... where it is taken."""
    label, count = name, 0
    while label in taken:
        count += 1
        label = f"{name}_{count}"
    return label


def _value(tensor: Any, inputs: dict[str, Node]) -> Value:
    name = tensor.op.name
    return Value(inputs[name].name if name in inputs else name, tensor.value_index)


def _mark_layers(ir: Graph, graph: Any, paths: list[tuple[str, bool]], inputs: dict[str, Node]) -> Graph:
    layer_of = {op.name: path for op, path in zip(graph.get_operations(), paths, strict=True)}
    nodes = []
    for node in ir.nodes:
        path, container = layer_of.get(node.name, ("", True))
        if path and container:
            node = node.with_attrs(within=path)
        elif path:
            node = node.with_attrs(layer=path)
        nodes.append(node)
    return dataclasses.replace(ir, nodes=tuple(nodes))
