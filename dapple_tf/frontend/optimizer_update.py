"""Trace the update of a Keras optimizer, once, on all variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import PlanError
from dapple_tf.frontend.capture import unique
from dapple_tf.frontend.graphdef import read_graph
from graph_passes.ir.graph import Graph, Node, attributes


@dataclass(frozen=True)
class TracedUpdate:
    """An optimizer's update as a graph.

    ``graph``: args are gradients named by their variable; ``variables``: all it reads or writes, by name;
    ``trained``: the objects whose gradients it takes, as the optimizer knows them; ``global_clipnorm``: left out.
    """

    graph: Graph
    variables: dict[str, tf.Variable]
    constants: dict[str, tf.Tensor]
    trained: tuple[Any, ...]
    global_clipnorm: float | None
    func_graph: Any


def trace_update(optimizer: Any, names: Sequence[str], variables: dict[str, tf.Variable]) -> TracedUpdate:
    """Trace ``optimizer.apply`` for the variables called ``names``.

    Clipping by the global norm is left out (the pipelined graph does it over all stages). Raises PlanError
    for what is not a Keras optimizer, or one that was built for other variables.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise PlanError(f"optimizer is a {type(optimizer).__name__}, not a keras.optimizers.Optimizer")
    trained = internals.keras_variables([variables[name] for name in names])
    with tf.init_scope():
        if not optimizer.built:
            optimizer.build(trained)

    def update(*gradients: Any) -> None:
        with tf.name_scope("optimizer"):  # so that no op has the name of a variable
            optimizer.apply(list(gradients), list(trained))

    specs = [tf.TensorSpec(variables[name].shape, variables[name].dtype) for name in names]
    with _without_global_clip(optimizer) as clip:
        try:
            concrete = tf.function(update, autograph=False).get_concrete_function(*specs)
        except (ValueError, KeyError) as error:
            raise PlanError(f"{type(optimizer).__name__} cannot update these variables: {error}") from error
    graph = concrete.graph
    inputs: dict[str, Node] = {}
    for i, (name, tensor) in enumerate(zip(names, graph.inputs, strict=False)):
        inputs[tensor.op.name] = Node(f"gradient/{i}", "arg", attrs=attributes({"port": name}))
    by_handle = {id(variables[name].handle): name for name in names}
    known = {id(v): v for v in (*graph.variables, *(v.value for v in optimizer.variables))}
    others = {id(variable.handle): variable for variable in known.values()}
    found = dict(variables)
    constants: dict[str, tf.Tensor] = {}
    for outside, inside in graph.captures:
        if id(outside) in by_handle:
            inputs[inside.op.name] = Node(by_handle[id(outside)], "variable")
        elif id(outside) in others:
            variable = others[id(outside)]
            label = unique(variable.name.split(":")[0], found)
            found[label] = variable
            inputs[inside.op.name] = Node(label, "variable")
        else:
            label = f"optimizer/capture/{len(constants)}"
            constants[label] = outside
            inputs[inside.op.name] = Node(label, "capture")
    return TracedUpdate(read_graph(graph, inputs, "optimizer"), found, constants, tuple(trained), clip, graph)


@contextlib.contextmanager
def _without_global_clip(optimizer: Any) -> Iterator[float | None]:
    clip = optimizer.global_clipnorm
    optimizer.global_clipnorm = None
    try:
        yield float(clip) if clip else None
    finally:
        optimizer.global_clipnorm = clip
