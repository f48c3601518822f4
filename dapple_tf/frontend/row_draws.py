"""Let a micro-batch draw the random numbers that one device draws for its rows of the whole batch.

Where the batch is the outermost axis of a draw, only the micro-batch's rows are drawn: the counter of the random
generator starts at the first of them (see ``draw_layouts``). Elsewhere the micro-batch draws for the whole batch, and
takes its rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.dependence.numbers import constant_value
from dapple_tf.frontend.draw_layouts import (
    DRAW_INPUTS,
    ROW_PARAMETERS,
    SEED_TO_COUNTER,
    CounterLayout,
    advance,
    advance_zero_low,
    counter_layout,
)
from dapple_tf.frontend.traced_nodes import replacement_nodes
from dapple_tf.frontend.write_graph import import_graph
from dapple_tf.graph_passes.analysis.layers import layer_of
from dapple_tf.graph_passes.ir.graph import Graph, Node, Shape, TensorType, Value

_PHILOX = (1, 3)  # RNG_ALG_PHILOX and RNG_ALG_AUTO_SELECT, which is Philox on CPUs and GPUs (rng_alg.h)

Tensors = Mapping[str, Any]
"""The inputs of a draw by name (see ``DRAW_INPUTS``), and the vector ``rows``."""


@dataclass(frozen=True)
class RowDraw:
    """A stateless draw whose output has rows of the batch.

    ``node``: its name in the op-level graph. ``axis``: the axis of its output with the batch, of length
    ``outer`` x samples x ``inner`` in row-major order; the batch is outermost in the axis where ``outer`` is 1.
    """

    node: str
    axis: int
    outer: int = 1
    inner: int = 1


def draw_rows(graph: Graph, draws: Sequence[RowDraw], rows: Value) -> Graph:
    """Return the graph in which each of ``draws`` gives the micro-batch's rows of the whole batch's draw.

    ``rows``: an int64 vector: the first sample of the micro-batch, the one after its last, and the number of samples of
    the whole batch. The inputs of a draw (its shape, parameters with rows) are those of the micro-batch; its key,
    counter and seed are the whole batch's.

    Raises CaptureError for a draw whose rows cannot be drawn separately.
    """
    taken = set(graph.by_name)
    replaced: dict[str, list[Node]] = {}
    for draw in draws:
        node = graph.node(draw.node)
        replaced[draw.node] = _replacement(graph, node, draw, rows, taken)
        taken.update(new.name for new in replaced[draw.node])
    nodes = [new for node in graph.nodes for new in replaced.get(node.name, [node])]
    return graph.replace(nodes=tuple(nodes)).sorted()


def _replacement(graph: Graph, node: Node, draw: RowDraw, rows: Value, taken: set[str]) -> list[Node]:
    if node.op not in DRAW_INPUTS:
        raise CaptureError(
            f"{_describe(node)} cannot draw only the rows of a micro-batch: use tf.random.stateless_uniform, "
            "stateless_normal or another stateless distribution, with the batch size in its shape"
        )
    kinds = {name: graph.type_of(value) for name, value in zip(DRAW_INPUTS[node.op], node.inputs, strict=True)}
    layout = _layout_of_rows(graph, node, draw, kinds)
    redraw = partial(_draw_again, node, kinds)

    def draw_own_rows(*tensors: Any) -> Any:
        inputs = dict(zip((*kinds, "rows"), tensors, strict=True))
        if layout is None:
            return _slice_whole_draw(redraw, draw, _parameter_axes(node, draw, kinds), inputs)
        from_seed = graph.node(node.inputs[2].node).op == SEED_TO_COUNTER
        move = partial(advance_zero_low if from_seed else advance, inputs["counter"])
        return _draw_from_begin(redraw, move, draw, layout, _known_row_elements(node, draw), inputs)

    typed = [(value, graph.type_of(value)) for value in (*node.inputs, rows)]
    return replacement_nodes(node, draw_own_rows, typed, taken)


def _layout_of_rows(graph: Graph, node: Node, draw: RowDraw, kinds: Mapping[str, TensorType]) -> CounterLayout | None:
    """Return how the rows of a draw use the counter, or None where they do not use consecutive values of it."""
    dims = node.outputs[0].shape.dims
    outermost = draw.outer == 1 and (draw.axis == 0 or (dims is not None and set(dims[: draw.axis]) == {1}))
    algorithm = constant_value(graph.node(node.inputs[3].node)) if outermost and "alg" in kinds else None
    if algorithm is None or int(algorithm) not in _PHILOX:
        return None
    if "alpha" in kinds:
        rank = _rank(kinds["alpha"])
        if rank is None or rank not in (0, _rank(node.outputs[0])):
            return None
    return counter_layout(node.op, node.outputs[0].dtype)


def _known_row_elements(node: Node, draw: RowDraw) -> int | None:
    """Return the number of elements of a sample, or None where it is not known before the run."""
    dims = node.outputs[0].shape.dims
    if dims is None:
        return None
    lengths = [dim for dim in dims[draw.axis + 1 :] if dim is not None and dim >= 0]
    return draw.inner * math.prod(lengths) if len(lengths) == len(dims) - draw.axis - 1 else None


def _draw_from_begin(
    redraw: Callable[[Tensors], Any],
    move: Callable[[Any], Any],
    draw: RowDraw,
    layout: CounterLayout,
    known: int | None,
    inputs: Tensors,
) -> Any:
    """Draw rows with an advanced counter. If they begin inside a block, draw the whole block and drop what is before.

    ``move``: returns the counter advanced by a number of values.
    """
    begin, shape = inputs["rows"][0], inputs["shape"]
    elements = draw.inner * _product(shape[draw.axis + 1 :]) if known is None else known
    if layout.block == 1 or (known is not None and known % layout.block == 0):
        return redraw({**inputs, "counter": move(begin * (elements // layout.block * layout.counters))})
    first = begin * elements
    counter = move(first // layout.block * layout.counters)
    surplus = tf.reshape(first % layout.block, [1])
    length = tf.cast(_product(shape) + surplus, shape.dtype)
    drawn = redraw({**inputs, "counter": counter, "shape": length})
    return tf.reshape(tf.slice(drawn, surplus, [-1]), shape)  # without surplus, the slice is no copy


def _slice_whole_draw(redraw: Callable[[Tensors], Any], draw: RowDraw, axes: Mapping[str, int], inputs: Tensors) -> Any:
    """Draw for the whole batch, and return the micro-batch's rows. ``axes``: the batch axis of each parameter."""
    begin, end, samples = tf.unstack(inputs["rows"], 3)
    whole = dict(inputs)
    for name, axis in axes.items():
        whole[name] = _rows_for_the_whole_batch(inputs[name], axis, draw, begin, samples)
    shape = inputs.get("shape")
    if shape is None:
        shape = tf.stack([tf.shape(inputs["logits"])[0], inputs["num_samples"]])
    length = tf.cast(draw.outer * draw.inner * samples, shape.dtype)
    whole["shape"] = tf.tensor_scatter_nd_update(shape, [[draw.axis]], [length])
    whole["num_samples"] = whole["shape"][-1]
    before = draw.outer * _product(shape[: draw.axis])
    after = draw.inner * _product(shape[draw.axis + 1 :])
    by_sample = tf.reshape(redraw(whole), tf.stack([before, samples, after]))
    return tf.reshape(by_sample[:, begin:end], shape)


def _rows_for_the_whole_batch(parameter: Any, axis: int, draw: RowDraw, begin: Any, samples: Any) -> Any:
    """Return a parameter with the micro-batch's rows at their places in the whole batch, and any valid rows elsewhere.

    An ``axis`` of length 1, which is broadcast, keeps that value for all rows.
    """
    length = tf.shape(parameter, tf.int64)[axis]
    own = tf.maximum(length // (draw.outer * draw.inner), 1)
    sample = tf.clip_by_value(tf.range(samples) - begin, 0, own - 1)
    outer = tf.range(draw.outer, dtype=tf.int64)[:, None, None] * own
    places = (outer + sample[:, None]) * draw.inner + tf.range(draw.inner, dtype=tf.int64)
    return tf.gather(parameter, tf.minimum(tf.reshape(places, [-1]), length - 1), axis=axis)


def _parameter_axes(node: Node, draw: RowDraw, kinds: Mapping[str, TensorType]) -> dict[str, int]:
    """Return the batch axis of each parameter that has one; parameters are broadcast to the last axes of the draw."""
    axes = {}
    for name in (name for name in kinds if name in ROW_PARAMETERS):
        rank, drawn = _rank(kinds[name]), _rank(node.outputs[0])
        if rank == 0:
            continue
        if rank is None or drawn is None:
            raise CaptureError(
                f"{_describe(node)} cannot draw the rows of a micro-batch: the number of axes of its input {name!r} is "
                "unknown, so it cannot be told whether the input has a batch axis; set its shape with tf.ensure_shape"
            )
        axis = draw.axis - (drawn - rank)
        if axis >= 0 and (name != "logits" or axis == 0):  # axis 1: classes in logits, drawn numbers in the draw
            axes[name] = axis
    return axes


def _draw_again(node: Node, kinds: Mapping[str, TensorType], inputs: Tensors) -> Any:
    """Add the op of ``node`` to the TensorFlow graph under construction, with other ``inputs`` of the same dtypes."""
    holders = tuple(Node(name, "arg", outputs=(kind,)) for name, kind in kinds.items())
    drawn = (TensorType(node.outputs[0].dtype, Shape(None)),)
    copy = dataclasses.replace(node, name="draw", inputs=tuple(map(Value, kinds)), outputs=drawn, controls=())
    graph = Graph("draw", (*holders, copy), outputs=(Value("draw"),))
    return import_graph(graph, {name: inputs[name] for name in kinds}, "drawn")[0]


def _product(shape: Any) -> Any:
    return tf.reduce_prod(tf.cast(shape, tf.int64))


def _rank(kind: TensorType) -> int | None:
    return None if kind.shape.dims is None else len(kind.shape.dims)


def _describe(node: Node) -> str:
    return f"the random draw {node.name!r} ({node.op}, in {layer_of(node) or 'no Keras layer'})"
