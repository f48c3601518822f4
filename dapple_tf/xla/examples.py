"""Shapes, and values where they are fixed, of the inputs of all functions of a program, for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.read_graph import read_shape
from dapple_tf.graph_passes.ir.graph import OTHER, Graph, Port, Role, Shape
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.memory.sizes import connect_functions
from dapple_tf.staged_model import StagedModel

# Roles of inputs that other stage functions compute: some are shapes, which XLA must know when it compiles.
_COMPUTED: frozenset[Role] = frozenset({"stash", "carry", "boundary", "gradient"})
_LONGEST_VALUE = 64  # elements; shapes and axes are shorter


@dataclass(frozen=True)
class Example:
    """An input of a stage function: its shape, and its value (NumPy) where that is short and always the same."""

    shape: Shape
    value: Any = None

    @property
    def known(self) -> bool:
        """Whether all lengths are known."""
        return self.shape.dims is not None and all(isinstance(dim, int) and dim >= 0 for dim in self.shape.dims)


def find_examples(
    graph: Graph, model: StagedModel, samples: Sequence[int], batch_size: int
) -> dict[str, tuple[Example, ...]]:
    """Return the examples of each function's inputs, by the function's name.

    ``samples``: of a micro-batch, on one replica of each stage. Functions of the whole batch take ``batch_size``.
    Nothing runs: TensorFlow infers the shapes.
    """
    found: dict[str, tuple[Example, ...]] = {}
    for f in graph.functions:
        rows = OTHER if f.name.endswith(OpName.UPDATE) else batch_size  # an update takes no samples
        found[f.name] = tuple(_by_type(port, rows) for port in f.inputs)

    def import_all() -> None:
        for stage, function, inputs, _ in connect_functions(graph, model, samples):
            found[function.name] = tuple(
                _by_inference(port, inputs[name], samples[stage])
                for port, name in zip(function.inputs, function.graph.inputs, strict=True)
            )

    try:
        tf.function(import_all, autograph=False).get_concrete_function()
    except ValueError:  # TensorFlow refuses this number of samples: what is not known then is not compiled
        return found
    return found


def _by_type(port: Port, rows: int) -> Example:
    """Return an example of the port's type with ``rows`` on the batch's axis."""
    dims = port.type.shape.dims
    return Example(Shape(None if dims is None else tuple(rows if dim is None else dim for dim in dims)))


def _by_inference(port: Port, tensor: Any, rows: int) -> Example:
    """Return an example like ``tensor``, whose shape is inferred; where TensorFlow cannot tell it, by the type."""
    if port.role in _COMPUTED and tensor.dtype.is_integer:
        value = internals.constant_value(tensor)
        if value is not None and value.size <= _LONGEST_VALUE:
            return Example(Shape(value.shape), value)
    inferred = Example(read_shape(tensor))
    return inferred if inferred.known else _by_type(port, rows)


def describe(port: Port, example: Example) -> str:
    """Return how a message names an input: its role and name, and its shape."""
    dims = example.shape.dims
    lengths = "unknown" if dims is None else [dim if isinstance(dim, int) and dim >= 0 else "?" for dim in dims]
    return f"{port.role} {port.name}, of shape {lengths},".replace("'?'", "?")
