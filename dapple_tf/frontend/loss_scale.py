"""Trace the factor by which an optimizer scales the loss before gradients are computed.

A plain training step computes the gradients of ``optimizer.scale_loss(loss)``, and the optimizer divides them again
(``loss_scale_factor``, ``LossScaleOptimizer``). A pipeline starts backward with the factor instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.read_graph import read_graph, read_value
from graph_passes.ir.extract import extract_function
from graph_passes.ir.graph import Function, Node, Port, Role, Value, ancestors
from graph_passes.passes.stage_calls import LOSS_SCALE_NAME


@dataclass(frozen=True)
class LossScale:
    """``function`` gives the factor, in the dtype of the loss. ``func_graph``: the trace that it was read from."""

    function: Function
    library: tuple[tuple[str, bytes], ...]
    func_graph: Any


def scales_loss(optimizer: Any, dtype: str) -> bool:
    """Return whether the optimizer scales a loss of this dtype; False for an object that is no Keras optimizer."""
    return isinstance(optimizer, keras.optimizers.Optimizer) and bool(_trace_factor(optimizer, dtype).outputs)


def trace_loss_scale(optimizer: Any, captured: Captured, variables: Mapping[str, tf.Variable]) -> LossScale:
    """Trace the gradient of ``optimizer.scale_loss(loss)`` for the loss ``captured``.

    ``variables``: the variables of the update, by the name of their node. The optimizer must be built, and must scale
    the loss. Raises CaptureError where the scaled loss is not the loss times a factor, or depends on what is no
    variable of the optimizer, or where the loss is scaled already.
    """
    check_not_scaled(optimizer, captured.variables, captured.graph.name)
    func_graph = _trace_factor(optimizer, captured.graph.type_of(captured.graph.outputs[0]).dtype.name)
    names = {id(variable.handle): name for name, variable in variables.items() if name not in captured.variables}
    inputs: dict[str, Node] = {}
    for outside, placeholder in func_graph.captures:
        if id(outside) not in names:
            raise CaptureError(
                f"{type(optimizer).__name__}.scale_loss uses a tensor that is no variable of the optimizer: give it a "
                "variable made by add_variable; what else is to be added to the loss belongs in the loss function"
            )
        inputs[placeholder.op.name] = Node(names[id(outside)], "variable")
    loss = func_graph.inputs[0].op.name
    inputs[loss] = Node(loss, "arg")
    graph = read_graph(func_graph, inputs, LOSS_SCALE_NAME)
    (result,) = (read_value(tensor, inputs) for tensor in func_graph.outputs)

    def port_of(value: Value) -> tuple[Role, str] | None:
        return ("variable", value.node) if graph.node(value.node).op == "variable" else None

    members = ancestors(graph, [result.node])
    if loss in members:
        raise CaptureError(
            f"{type(optimizer).__name__}.scale_loss returns something else than the loss times a factor: write what it "
            "computes into the loss function, and return loss * factor"
        )
    ports = [Port("combined", LOSS_SCALE_NAME, graph.type_of(result))]
    function = extract_function(LOSS_SCALE_NAME, graph, members, port_of, ports, [result])
    return LossScale(function, graph.library, func_graph)


def _trace_factor(optimizer: Any, dtype: str) -> Any:
    """Return the FuncGraph that computes the factor for a loss of this dtype; it has no output without a factor."""

    def factor(loss: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(loss)
            scaled = optimizer.scale_loss(loss)
        return None if scaled is loss else tape.gradient(scaled, loss, unconnected_gradients="zero")

    return tf.function(factor, autograph=False).get_concrete_function(tf.TensorSpec([], dtype)).graph


def check_not_scaled(optimizer: Any, variables: Mapping[str, tf.Variable], name: str) -> None:
    """Raise CaptureError where the loss called ``name``, which uses ``variables``, is scaled already."""
    scale = getattr(optimizer, "dynamic_scale", None)
    if scale is not None and any(variable is scale.value for variable in variables.values()):
        raise CaptureError(
            f"{name} scales the loss by {type(optimizer).__name__}'s scale: return the loss as it is. The pipeline "
            "computes the gradients of optimizer.scale_loss(loss), as Keras does"
        )
