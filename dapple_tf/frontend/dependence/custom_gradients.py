"""Check custom gradients: what they give for a micro-batch must be its part of what they give for the whole batch.

In a trace, the outputs, arguments and variables of a ``tf.custom_gradient`` pass through an IdentityN, which has the
user's function as its gradient. The forward ops do not show what this gradient computes. So the gradient is traced and
analysed like any other function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.dependence.kinds import CONSTANT, Form, Kind, shared
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.inference import Body, infer_body
from dapple_tf.frontend.read_graph import read_value
from dapple_tf.frontend.trace_inputs import TraceInputs
from dapple_tf.graph_passes.ir.graph import Effect, Node, Shape, Value

KindsOfBody = Callable[[Body, Sequence[Kind]], list[Kind]]
"""Returns the kinds of the outputs of a function, for arguments of these kinds."""


def has_custom_gradient(node: Node) -> bool:
    """Return whether the op's gradient was written by the user."""
    return node.op == "IdentityN" and node.has("_gradient_op_type")


def check_gradient(
    scope: Scope,
    node: Node,
    kinds: Sequence[Kind],
    func_graph: Any,
    value_of: Callable[[Any], Value],
    of_body: KindsOfBody,
    *,
    unused: bool,
) -> bool:
    """Return whether the gradients of rows are rows, and those of weights sums over samples.

    ``func_graph``: the trace that holds the op. ``value_of``: returns the value of a tensor of that trace. ``unused``:
    samples were combined in tensors that forward does not use, and that a gradient may capture.
    """
    if not any(kind.trained for kind in kinds):
        return True
    # A library's gradient is that of its forward, computed in another way (silu, tf.recompute_grad).
    true = internals.has_library_gradient(func_graph, node.name)
    if true and not unused:
        return True
    gradients = internals.trace_gradient(func_graph, node.name)
    outer = [value_of(tensor) if tf.is_symbolic_tensor(tensor) else None for tensor in gradients.captured]
    lists = (value for value, tensor in zip(outer, gradients.captured, strict=True) if tensor.dtype == tf.variant)
    scope.captured_lists[node.name] = tuple(value for value in lists if value is not None)
    incoming = [_incoming(kind) for kind in kinds]
    captured = [CONSTANT if value is None else scope.kinds.get(value, CONSTANT) for value in outer]
    if true:
        return not any(kind.coupled and not kind.documented for kind in captured)
    shapes = [Shape(scope.dims(value)) for value in node.values()]
    for value, tensor in zip(outer, gradients.captured, strict=True):
        shapes.append(Shape(tuple(tensor.shape) if value is None else scope.dims(value)))
    found = of_body(infer_body(gradients.func_graph, shapes), [*incoming, *captured])
    results = zip(gradients.places, found, gradients.func_graph.outputs, strict=True)
    return all(_is_zero(tensor) or _fits(kinds[place], kind) for place, kind, tensor in results)


def _is_zero(tensor: Any) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)


def _incoming(kind: Kind) -> Kind:
    """Return the kind of the gradient that arrives for a value of this kind."""
    match kind.form:
        case Form.ROWS:
            return replace(kind.plain(), trained=True)
        case Form.SHARED:
            return Kind(Form.SUM, trained=True)
        case Form.MEAN:
            return Kind(Form.ROW_BOUNDS)
    return shared()


def _fits(kind: Kind, gradient: Kind) -> bool:
    """Return whether micro-batches may give a gradient of this kind for a value of that ``kind``."""
    match kind.form:
        case Form.ROWS:
            same = gradient.axis == kind.axis and (gradient.layout == kind.layout or not gradient.outer)
            return gradient.rows and same and not gradient.slope
        case Form.SHARED:
            return not kind.trained or (gradient.form is Form.SUM and not gradient.mixed)
        case Form.MEAN:
            return gradient.form is Form.ROW_BOUNDS
        case Form.SUM:
            return gradient.shared
    return True


def check_read_by_gradients(
    kept: Mapping[str, Sequence[Any]], inputs: TraceInputs, nodes: Sequence[Node], name: str
) -> None:
    """Raise CaptureError where a custom gradient reads a variable that one of ``nodes`` writes: the order is not known.

    Those of TensorFlow itself (``tf.recompute_grad``) are checked when the stages are differentiated. ``kept``: see
    ``internals.kept_for_gradients``. ``name``: of the function, for errors.
    """
    for node in (node for node in nodes if node.effect is Effect.WRITE):
        for op, tensors in kept.items():
            read = {read_value(tensor, inputs.nodes).node for tensor in tensors if tensor.dtype == tf.resource}
            found = sorted(read.intersection(node.strings("writes")))
            if found and not internals.has_library_gradient(tensors[0].graph, op):
                place = internals.user_place(tensors[0].graph.get_operation_by_name(op)) or name
                raise CaptureError(
                    f"{place}: a custom gradient reads the variable {found[0]!r}, which is written before the "
                    "gradients are taken: read the variable in the forward (value = tf.identity(variable)), and use "
                    "this value in the gradient"
                )
