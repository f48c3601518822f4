"""Trace the update of a Keras optimizer, once, for all variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import PlanError
from dapple_tf.frontend.names import unique_name
from dapple_tf.frontend.read_graph import read_graph
from graph_passes.ir.graph import Graph, Node, attributes


@dataclass(frozen=True)
class TracedUpdate:
    """An optimizer's update as a graph.

    ``graph``: takes one ``arg`` per trained variable, its gradient, whose port has the variable's name. ``variables``:
    the model's and the optimizer's, by the name of their node. ``constants``: by the name of their ``capture`` node.
    ``trained``: the variables as the optimizer knows them (Keras variables, where there are any).
    ``global_clipnorm``: the optimizer's option, which ``graph`` does not apply; None where it has none.
    ``func_graph``: the TensorFlow graph that ``graph`` was read from.
    """

    graph: Graph
    variables: dict[str, tf.Variable]
    constants: dict[str, tf.Tensor]
    trained: tuple[Any, ...]
    global_clipnorm: float | None
    func_graph: Any


def trace_update(optimizer: Any, names: Sequence[str], variables: Mapping[str, tf.Variable]) -> TracedUpdate:
    """Trace ``optimizer.apply`` for the ``variables`` called ``names``, building the optimizer if it is not built.

    Clipping by the global norm is left out: the pipelined graph clips over all stages. Raises PlanError for an object
    that is not a Keras optimizer, and for an optimizer that was built for other variables.
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
            func_graph = tf.function(update, autograph=False).get_concrete_function(*specs).graph
        except (ValueError, KeyError) as error:
            raise PlanError(f"{type(optimizer).__name__} cannot update these variables: {error}") from error
    inputs = _read_inputs(func_graph, optimizer, names, variables)
    graph = read_graph(func_graph, inputs.nodes, "optimizer")
    return TracedUpdate(graph, inputs.variables, inputs.constants, tuple(trained), clip, func_graph)


@dataclass
class _Inputs:
    """What enters the trace. ``nodes``: the input nodes by the name of the placeholder they replace."""

    variables: dict[str, tf.Variable]
    nodes: dict[str, Node] = field(default_factory=dict)
    constants: dict[str, tf.Tensor] = field(default_factory=dict)


def _read_inputs(
    func_graph: Any, optimizer: Any, names: Sequence[str], variables: Mapping[str, tf.Variable]
) -> _Inputs:
    """Return the trace's inputs: gradients, trained variables, the optimizer's own variables, and constants."""
    found = _Inputs(dict(variables))
    for i, (name, tensor) in enumerate(zip(names, func_graph.inputs, strict=False)):
        found.nodes[tensor.op.name] = Node(f"gradient/{i}", "arg", attrs=attributes({"port": name}))
    trained = {id(variables[name].handle): name for name in names}
    others = [*func_graph.variables, *(variable.value for variable in optimizer.variables)]
    by_handle = {id(variable.handle): variable for variable in others}
    for outside, placeholder in func_graph.captures:
        if id(outside) in trained:
            node = Node(trained[id(outside)], "variable")
        elif id(outside) in by_handle:
            variable = by_handle[id(outside)]
            node = Node(unique_name(internals.variable_name(variable), found.variables), "variable")
            found.variables[node.name] = variable
        else:
            node = Node(f"optimizer/capture/{len(found.constants)}", "capture")
            found.constants[node.name] = outside
        found.nodes[placeholder.op.name] = node
    return found


@contextlib.contextmanager
def _without_global_clip(optimizer: Any) -> Iterator[float | None]:
    """Unset the optimizer's ``global_clipnorm`` in the block, which gets its value."""
    clip = optimizer.global_clipnorm
    optimizer.global_clipnorm = None
    try:
        yield float(clip) if clip else None
    finally:
        optimizer.global_clipnorm = clip
