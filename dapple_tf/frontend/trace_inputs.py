"""Read the inputs of a trace: the batch's tensors, variables, and tensors from outside of the function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.names import unique_name
from dapple_tf.frontend.node_attributes import read_attribute
from dapple_tf.frontend.tables import find_misuse
from dapple_tf.graph_passes.ir.graph import Node, attributes

TRAINED = "trained_variables"
"""The attribute of a loss function that returns the variables to train, in the order in which its optimizer gets them.

Without it all trainable variables that the function uses are trained, in the order of their first use.
"""


@dataclass
class TraceInputs:
    """The inputs of a trace. ``nodes``: the input nodes by the name of the placeholder they replace.

    ``gradients``: the names of the gradients by each target.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    variables: dict[str, tf.Variable] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)
    constants: dict[str, tf.Tensor] = field(default_factory=dict)
    gradients: dict[int, set[str]] = field(default_factory=dict)


def read_inputs(func_graph: Any, arguments: int, name: str) -> TraceInputs:
    """Return the inputs of a trace: its first ``arguments`` inputs are the batch's tensors, the others captures.

    ``name``: of the function, for errors. Raises CaptureError for a captured resource that is neither a variable nor a
    lookup table that is only read.
    """
    found = TraceInputs()
    for i, tensor in enumerate(func_graph.inputs[:arguments]):
        found.nodes[tensor.op.name] = Node(f"input/{i}", "arg", attrs=attributes({"port": f"input/{i}"}))
    by_handle = {id(variable.handle): variable for variable in func_graph.variables}
    unknown = [t for t, _ in func_graph.captures if t.dtype == tf.resource and id(t) not in by_handle]
    by_handle |= {id(variable.handle): variable for variable in internals.variables_of_handles(unknown)}
    trainable = _trainable_variables(func_graph)
    # A variable may have the name of an op.
    op_names = {op.name for op in func_graph.get_operations() if op.type != "Placeholder"}
    for label, tensor in small_constants(func_graph):
        attrs = {key: read_attribute(value) for key, value in tensor.op.node_def.attr.items()}
        found.nodes[tensor.op.name] = Node(label, "Const", attrs=attributes(attrs))
    for outside, placeholder in func_graph.captures:
        if placeholder.op.name in found.nodes:
            continue
        variable = by_handle.get(id(outside))
        if variable is not None:
            label = unique_name(internals.variable_name(variable), op_names | found.variables.keys())
            found.variables[label] = variable
            found.nodes[placeholder.op.name] = Node(label, "variable")
            if id(variable) in trainable:
                found.trainable.append(label)
        elif outside.dtype == tf.resource and (misuse := find_misuse(placeholder)):
            raise CaptureError(
                f"{name} uses a resource that is neither a tf.Variable nor a lookup table that it only reads "
                f"({placeholder.name}, used by the op {misuse}; perhaps a dataset, an iterator, or a table that is "
                "written): pass the values that it gives as an argument instead"
            )
        else:
            label = f"capture/{len(found.constants)}"
            found.nodes[placeholder.op.name] = Node(label, "capture")
            found.constants[label] = outside
    return found


def variables_to_train(inputs: TraceInputs, loss_fn: Callable[..., Any]) -> list[str]:
    """Return the names of the variables to train; those that ``loss_fn`` names, where it does (``TRAINED``)."""
    if not hasattr(loss_fn, TRAINED):
        return inputs.trainable
    wanted = [id(internals.as_tf_variable(variable)) for variable in getattr(loss_fn, TRAINED)()]
    names = {id(inputs.variables[name]): name for name in inputs.trainable}
    return [names[item] for item in wanted if item in names]


def _trainable_variables(func_graph: Any) -> set[int]:
    """Return the ids of the variables to train: freezing a Keras layer marks Keras's variables, not TensorFlow's."""
    variables = list(func_graph.trainable_variables)
    wrappers = internals.keras_variables(variables)
    return {id(variable) for variable, wrapper in zip(variables, wrappers, strict=True) if wrapper.trainable}


def small_constants(func_graph: Any) -> list[tuple[str, Any]]:
    """Return the tensors from outside of which TensorFlow made a Const in the trace, each with a name for its node.

    TensorFlow's own names of these differ from process to process.
    """
    found = [tensor for _, tensor in func_graph.captures if tensor.op.type == "Const"]
    return [(f"constant/{i}", tensor) for i, tensor in enumerate(found)]
