"""Why XLA cannot compile a stage function, found before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from dapple_tf import internals
from dapple_tf.backend.branches import build_branches
from dapple_tf.backend.stage_function import Constants, Library, import_body, only_read, pass_values
from dapple_tf.frontend.write_graph import needed_library
from dapple_tf.graph_passes.ir.graph import BOUND_ROLES, Function, Port
from dapple_tf.xla.examples import Example, describe

# Draws: that XLA draws the same numbers, in the same layout, has not been measured.
_DRAWS = ("Random", "Multinomial", "TruncatedNormal", "CandidateSampler", "RngSkip", "RngRead", "StatefulUniform")
# XLA compiles these, with padding; what they return has a length that depends on data.
_DATA_LENGTHS = frozenset(
    {"Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "DynamicPartition", "ListDiff"}
)
_LONGEST_REASON = 200


def find_problem(
    function: Function,
    examples: Sequence[Example],
    constants: Constants,
    library: Library,
    *,
    resource: Callable[[Port], tf.Variable],
    foreign: Collection[str],
    device: str,
) -> str | None:
    """Return why XLA cannot compile ``function`` for ``device``, or None where it can. Nothing runs.

    ``examples``: of its inputs. ``resource`` returns the variable of a port. ``foreign``: those on other devices.
    """
    built = build_branches(function, constants, library)
    function, library = built.function, {**library, **built.library}
    for op in sorted(_op_types(function, library)):
        if any(word in op for word in _DRAWS):
            return f"it draws random numbers ({op}), which XLA may draw otherwise"
        if op in _DATA_LENGTHS:
            return f"it has the op {op}, whose result has a length that depends on data"
    for _, port in function.input_ports("variable"):
        if port.name in foreign and not only_read(function, port.name):
            return f"it uses the variable {port.name}, which lives on {resource(port).device}, other than by reading it"
    for port in (*function.inputs, *function.outputs):
        if port.type.dtype.name == "variant":
            return f"its {port.role} {port.name} is a list of tensors (the values that a loop keeps for its gradient)"
    for port, example in zip(function.inputs, examples, strict=True):
        if port.role not in BOUND_ROLES and not example.known:
            return f"its input {describe(port, example)} has lengths that are not known before it runs"
    traced = _trace(pass_values(function, foreign), examples, constants, library, resource)
    problem = internals.find_xla_problem(traced, device)
    return None if problem is None else _shorten(problem)


def _trace(
    function: Function,
    examples: Sequence[Example],
    constants: Constants,
    library: Library,
    resource: Callable[[Port], tf.Variable],
) -> Any:
    """Return the ConcreteFunction of ``function`` for inputs like the ``examples``; it captures its variables."""
    signature: list[tf.TensorSpec] = []
    places: list[int] = []
    fixed: dict[int, Any] = {}
    for i, (port, example) in enumerate(zip(function.inputs, examples, strict=True)):
        if port.type.dtype.name == "resource":
            fixed[i] = resource(port).handle
            continue
        if example.value is None:
            shape = resource(port).shape if port.role == "variable" else example.shape.dims
            signature.append(tf.TensorSpec(shape, tf.as_dtype(port.type.dtype.name)))
            places.append(i)

    def body(*tensors: Any) -> list[Any]:
        graph = tf.compat.v1.get_default_graph()
        given = dict(zip(places, tensors, strict=True))
        given |= {i: internals.capture_of(graph, handle) for i, handle in fixed.items()}
        arguments = [
            given[i] if i in given else tf.constant(example.value, port.type.dtype.name)
            for i, (port, example) in enumerate(zip(function.inputs, examples, strict=True))
        ]
        return import_body(function, constants, library, arguments)

    return tf.function(body, autograph=False, input_signature=signature).get_concrete_function()


def _op_types(function: Function, library: Library) -> set[str]:
    """Return the types of all ops of a function and of the functions that these call."""
    found = {node.op for node in function.graph.nodes}
    for _, body in needed_library(function.graph, library):
        found |= {node.op for node in function_pb2.FunctionDef.FromString(body).node_def}
    return found


def _shorten(problem: str) -> str:
    """Return the part of XLA's message that a user can act on."""
    if missing := re.findall(r"No registered '(\w+)' OpKernel", problem):
        return f"XLA has no op {', '.join(sorted(set(missing)))}"
    text = problem.removeprefix("Failed getting HLO text: '").split("\n", maxsplit=1)[0]
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + " ..."
