"""Shapes at a given batch size: the traced graph has an unknown batch, costs and bytes need a known one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.graphdef import import_graph, read_shapes
from graph_passes.ir.graph import OTHER, Graph, Shape, TensorType


def infer_shapes(captured: Captured, batch_size: int) -> dict[str, tuple[Shape, ...]]:
    """The output shapes of every node for ``batch_size`` samples, as far as TensorFlow infers them.

    None are known where the model refuses that size.
    """
    found: dict[str, tuple[Shape, ...]] = {}

    def probe(*batch: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        known = dict(zip(captured.graph.inputs, batch, strict=True))
        known |= {name: internals.capture_of(graph, v.handle) for name, v in captured.variables.items()}
        known |= {name: internals.capture_of(graph, value) for name, value in captured.constants.items()}
        import_graph(captured.graph, known, "probe")
        found.update(read_shapes(graph, "probe/"))  # with placeholders of no shape for the inputs, which are known
        found.update({name: (Shape(tuple(tensor.shape)),) for name, tensor in known.items()})
        found.update({name: (Shape(tuple(variable.shape)),) for name, variable in captured.variables.items()})

    specs = [tf.TensorSpec((batch_size, *spec.shape[1:]), spec.dtype) for spec in captured.signature]
    try:
        tf.function(probe, autograph=False, input_signature=specs).get_concrete_function()
    except ValueError:  # the model does not take this batch size: nothing is known, which is always safe
        return {}
    return found


def infer_batch_axes(captured: Captured, batch_size: int) -> tuple[Captured, dict[str, tuple[Shape, ...]]]:
    """Return the captured loss with its batch axes marked (see ``mark_batch``), and all shapes at ``batch_size``."""
    shapes = infer_shapes(captured, batch_size)
    return dataclasses.replace(captured, graph=mark_batch(captured.graph, shapes, batch_size)), shapes


def mark_batch(graph: Graph, shapes: Mapping[str, Sequence[Shape]], batch_size: int) -> Graph:
    """The graph with every unknown length that is not the batch's marked ``OTHER``.

    Only a length that was ``batch_size`` when the batch was counts: an axis that holds several rows of each
    sample may hold them in any order, and cannot be split between replicas.
    """
    nodes = []
    for node in graph.nodes:
        found = shapes.get(node.name, ())
        outputs = [
            _mark(kind, found[i] if i < len(found) else Shape(None), batch_size) for i, kind in enumerate(node.outputs)
        ]
        nodes.append(dataclasses.replace(node, outputs=tuple(outputs)))
    return graph.replace(nodes=tuple(nodes))


def _mark(kind: TensorType, found: Shape, batch_size: int) -> TensorType:
    dims = kind.shape.dims
    if dims is None:
        return kind
    known = found.dims if found.dims is not None and len(found.dims) == len(dims) else (None,) * len(dims)
    marked = tuple(
        OTHER if dim is None and length != batch_size else dim for dim, length in zip(dims, known, strict=True)
    )
    return TensorType(kind.dtype, Shape(marked))
