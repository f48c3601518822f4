"""Infer shapes at a given batch size: costs and bytes need one, and the traced graph's is unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.inference import Shapes, import_for_shapes
from dapple_tf.frontend.read_graph import read_shape
from dapple_tf.frontend.rows import ROWS_NAME
from dapple_tf.frontend.tables import with_known_shapes
from dapple_tf.frontend.write_graph import write_graph
from dapple_tf.graph_passes.ir.graph import OTHER, Graph, Shape, TensorType


def infer_shapes(captured: Captured, batch_size: int) -> Shapes:
    """Return the output shapes of every node for ``batch_size`` samples, as far as TensorFlow can infer them.

    Inner lengths that the signature leaves unknown are those of the example. Empty where the model does not accept
    that batch size.
    """
    with tf.Graph().as_default():
        inputs = {
            name: tf.compat.v1.placeholder(spec.dtype, (batch_size, *spec.shape[1:]))
            for name, spec in zip(captured.graph.inputs, captured.example, strict=True)
        }
        inputs |= {name: internals.placeholder_like(v.handle, []) for name, v in captured.variables.items()}
        inputs |= {name: internals.placeholder_like(v, v.shape) for name, v in captured.constants.items()}
        inputs |= {ROWS_NAME: tf.constant([0, batch_size, batch_size], tf.int64)}
        definition = write_graph(with_known_shapes(captured.graph), shapes=True)
        try:
            found = import_for_shapes(definition, inputs, captured.func_graph).shapes
        except ValueError:  # the model does not accept this batch size; no shapes is always safe
            return Shapes()
    variables = {name: (read_shape(variable),) for name, variable in captured.variables.items()}
    return Shapes({**found, **variables}, found.bodies)


PROBE = 1009
"""A batch size that divides no other length in a model: it is prime, and no usual width of a layer is a multiple."""


def probe_shapes(captured: Captured, batch_size: int) -> tuple[int, Shapes]:
    """Return a batch size that tells the lengths that depend on the batch from others, and the shapes for it.

    ``batch_size``: one that the model accepts, for a model whose batches must be multiples of a number.
    """
    for probe in (PROBE, PROBE * batch_size):
        if shapes := infer_shapes(captured, probe):
            return probe, shapes
    return batch_size, infer_shapes(captured, batch_size)


def infer_batch_axes(captured: Captured, batch_size: int) -> tuple[Captured, Shapes]:
    """Return the captured loss with its batch axes marked (see ``mark_batch``), and all shapes at ``batch_size``."""
    shapes = infer_shapes(captured, batch_size)
    known = bool(shapes) and captured.signature == captured.example
    shapes = shapes or _shapes_below(captured, batch_size)
    # An unknown inner length may be equal to the size of this micro-batch.
    probe, probed = (batch_size, shapes) if known else probe_shapes(captured, batch_size)
    return dataclasses.replace(captured, graph=mark_batch(captured.graph, probed, probe)), shapes


def _shapes_below(captured: Captured, batch_size: int) -> Shapes:
    """Return the shapes for a micro-batch that has too few samples for the function, from those for two larger sizes.

    For example, the 8 largest values over the batch cannot be taken of 4 samples. If such an op runs once, on the whole
    batch, micro-batches may have fewer samples. Empty where the loss is not exact in micro-batches, or where the larger
    sizes are refused too.
    """
    if captured.dependence is None or captured.dependence.exactness.undocumented:
        return Shapes()
    one, other = infer_shapes(captured, PROBE), infer_shapes(captured, 2 * PROBE)
    if not (one and other):
        return Shapes()
    pairs = {name: zip(one[name], other[name], strict=True) for name in one}
    return Shapes({name: tuple(_shape_below(*pair, batch_size) for pair in of) for name, of in pairs.items()})


def _shape_below(one: Shape, other: Shape, batch_size: int) -> Shape:
    """Return the shape for ``batch_size`` samples: its lengths change with them as between ``one`` and ``other``."""
    if one.dims is None or other.dims is None or len(one.dims) != len(other.dims):
        return Shape(None)
    dims: list[int | None] = []
    for first, second in zip(one.dims, other.dims, strict=True):
        if first is None or second is None or (second - first) % PROBE:
            dims.append(None)
            continue
        length = first + (second - first) // PROBE * (batch_size - PROBE)
        dims.append(length if length >= 0 else None)
    return Shape(tuple(dims))


def mark_batch(graph: Graph, shapes: Mapping[str, Sequence[Shape]], batch_size: int) -> Graph:
    """Return the graph with ``OTHER`` for every unknown length that is not the batch size.

    An axis is the batch axis only if its length is ``batch_size`` in ``shapes``, which were inferred for that batch
    size. An axis with several rows for each sample may hold them in any order, and cannot be split between replicas.
    """
    nodes = []
    for node in graph.nodes:
        inferred = shapes.get(node.name, ())
        outputs = [
            _mark(kind, inferred[i] if i < len(inferred) else Shape(None), batch_size)
            for i, kind in enumerate(node.outputs)
        ]
        nodes.append(dataclasses.replace(node, outputs=tuple(outputs)))
    return graph.replace(nodes=tuple(nodes))


def _mark(kind: TensorType, inferred: Shape, batch_size: int) -> TensorType:
    dims = kind.shape.dims
    if dims is None:
        return kind
    lengths = inferred.dims if inferred.dims is not None and len(inferred.dims) == len(dims) else (None,) * len(dims)
    marked = tuple(
        OTHER if dim is None and length != batch_size else dim for dim, length in zip(dims, lengths, strict=True)
    )
    return TensorType(kind.dtype, Shape(marked))
