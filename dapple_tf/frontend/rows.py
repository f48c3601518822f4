"""Rewrite the ops that need to know which rows of the batch a micro-batch has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.frontend.dependence.result import BatchDependence, WholeSize
from dapple_tf.frontend.row_draws import draw_rows
from dapple_tf.frontend.traced_nodes import TracedNodes, place_nodes, place_of, replacement_nodes, trace_nodes
from dapple_tf.graph_passes.analysis.layers import TAKES_ROWS, layer_of
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, tensor

ROWS_NAME = "micro_batch/rows"
"""The input node of an int64 vector: the micro-batch's first row, the row after its last one, the batch size."""

ROWS_OP = "rows"
_ROWS = tensor("int64", 3)


def use_rows(graph: Graph, dependence: BatchDependence | None) -> Graph:
    """Return the graph in which a random draw gives the micro-batch's rows of the whole batch's draw.

    Further changes: a micro-batch takes its rows of values that are computed on the whole batch (``sliced``). Sizes of
    the micro-batch that the loss computes with are replaced by those of the whole batch. A Squeeze without axes gets
    the axes that it removes from the whole batch; from a single sample it would remove more. A node that adds a mean
    over samples to a variable adds the micro-batch's share of the mean.

    Raises CaptureError for a draw that cannot be given rows.
    """
    if dependence is None:
        return graph
    if dependence.squeezed:
        graph = _name_squeezed(graph, dependence.squeezed)
    sized = dependence.sizes or dependence.shapes
    if not (dependence.draws or sized or dependence.sliced or dependence.mean_adds):
        return graph
    if ROWS_NAME not in graph.by_name:
        graph = graph.replace(nodes=(Node(ROWS_NAME, ROWS_OP, (), (_ROWS,)), *graph.nodes))
    graph = _slice_rows(_use_whole_sizes(graph, dependence), dependence.sliced)
    graph = _add_shares(graph, dependence.mean_adds)
    # A draw outside of Keras layers becomes a layer of its own, so that the ops that pick its rows stay with it.
    named = {draw.node for draw in dependence.draws if not layer_of(graph.node(draw.node))}
    nodes = (node.with_attrs(layer=node.name) if node.name in named else node for node in graph.nodes)
    return draw_rows(graph.replace(nodes=tuple(nodes)), dependence.draws, Value(ROWS_NAME))


def _name_squeezed(graph: Graph, squeezed: Mapping[str, tuple[int, ...]]) -> Graph:
    """Return the graph in which each Squeeze of ``squeezed`` removes these axes only."""
    nodes = (
        node.with_attrs(squeeze_dims=squeezed[node.name]) if node.name in squeezed else node for node in graph.nodes
    )
    return graph.replace(nodes=tuple(nodes))


def _use_whole_sizes(graph: Graph, dependence: BatchDependence) -> Graph:
    """Return the graph in which nodes that compute sizes of the whole batch replace those of the micro-batch."""
    size_nodes = _SizeNodes(graph)
    by_node: dict[str, list[WholeSize]] = {}
    for size in dependence.sizes:
        by_node.setdefault(size.node, []).append(size)
    nodes: list[Node] = []
    for node in graph.nodes:
        sizes = by_node.get(node.name, [])
        if any(size.operand is None for size in sizes):
            nodes += size_nodes.make(node, sizes[0])
            continue
        inputs = list(node.inputs)
        for size in sizes:
            assert size.operand is not None, "sizes of a node's output were handled above"
            kind = graph.type_of(node.inputs[size.operand])
            place = place_of(node)
            result = Node(f"{node.name}/batch_size{size.operand}", "Cast", (), (kind,)).with_attrs(**place)
            nodes += size_nodes.make(result, size)
            inputs[size.operand] = Value(result.name)
        nodes.append(dataclasses.replace(node, inputs=tuple(inputs)))
    for size in dependence.shapes:
        value = Value(size.node, size.operand or 0)
        name = f"{size.node}/of_batch{value.index}"
        *added, last = size_nodes.make(Node(name, "Cast", (), (graph.type_of(value),)), size)
        nodes += [*added, last.with_attrs(stands_for=str(value))]
    return graph.replace(nodes=tuple(nodes)).sorted()


def _slice_rows(graph: Graph, sliced: Sequence[Value]) -> Graph:
    """Return the graph in which the values ``sliced`` are the micro-batch's rows of what runs on the whole batch.

    The node that runs on the whole batch gets another name.
    """
    names, used = {value.node for value in sliced}, set(graph.by_name)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in names:
            nodes.append(node)
            continue
        whole = dataclasses.replace(node, name=whole_name(node.name))
        place = place_of(node)
        parts: list[Value] = []
        found: list[Node] = []
        for value in node.values():
            source, kind = Value(whole.name, value.index), graph.type_of(value)
            if value not in sliced:
                parts.append(source)
                continue
            name = node.name if len(node.outputs) == 1 else f"{node.name}/rows{value.index}"
            result = Node(name, "StridedSlice", (), (kind,)).with_attrs(**place)
            taken = [(source, kind), (Value(ROWS_NAME), _ROWS)]
            *added, last = replacement_nodes(result, lambda whole, rows: whole[rows[0] : rows[1]], taken, used)
            found += [*added, last.with_attrs(**{TAKES_ROWS: True})]
            parts.append(Value(name))
        if len(node.outputs) > 1:
            types = tuple(kind.dtype for kind in node.outputs)
            found.append(Node(node.name, "IdentityN", tuple(parts), node.outputs).with_attrs(T=types, **place))
        nodes += [whole, *found]
        used |= {each.name for each in (whole, *found)}
    return graph.replace(nodes=tuple(nodes)).sorted()


def _add_shares(graph: Graph, mean_adds: Collection[str]) -> Graph:
    """Return the graph in which these nodes add the micro-batch's share of a mean to their variables."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in mean_adds:
            variable, mean = node.inputs
            kind = graph.type_of(mean)
            share = Node(f"{node.name}/share", "Mul", (), (kind,)).with_attrs(**place_of(node))
            taken = [(mean, kind), (Value(ROWS_NAME), _ROWS)]
            nodes += replacement_nodes(
                share, lambda mean, rows: mean * tf.cast(share_of(rows), mean.dtype), taken, graph.by_name
            )
            node = dataclasses.replace(node, inputs=(variable, Value(share.name)))
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes)).sorted()


def share_of(rows: Any) -> Any:
    """Return the micro-batch's share of the samples, a float64 scalar, from the vector ``ROWS_NAME``."""
    counts = tf.cast(rows, tf.float64)
    return (counts[1] - counts[0]) / counts[2]


def whole_name(name: str) -> str:
    """Return the name of the node that computes on the whole batch what the node ``name`` gives a micro-batch."""
    return f"{name}/whole"


class _SizeNodes:
    """Makes the nodes that compute sizes of the whole batch; layers that are alike compute theirs by the same ops."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._taken = set(graph.by_name)
        self._traced: dict[Hashable, TracedNodes] = {}

    def make(self, result: Node, size: WholeSize) -> list[Node]:
        """Return the nodes that compute the size; the last one has the name and type of ``result``."""
        values = [Value(ROWS_NAME), *(Value(term.argument) for term in size.lengths)]
        kinds = [_ROWS, *map(self._graph.type_of, values[1:])]
        dtype = result.outputs[0].dtype.name
        terms = [(term.axis, *_content(term.scale), *_content(term.offset)) for term in size.lengths]
        key = (dtype, *kinds, *terms, *_content(size.scale), *_content(size.offset))
        if key not in self._traced:
            self._traced[key] = trace_nodes(partial(_compute_size, size, dtype), kinds)
        return place_nodes(self._traced[key], result, values, self._taken)


def _content(array: Any) -> tuple[Hashable, ...]:
    """Return what tells the array from others."""
    array = np.asarray(array)
    return array.dtype.str, array.shape, array.tobytes()


def _compute_size(size: WholeSize, dtype: str, rows: Any, *arguments: Any) -> Any:
    scale, offset = size.scale, size.offset
    for term, argument in zip(size.lengths, arguments, strict=True):
        length = tf.shape(argument, tf.int64)[term.axis]
        scale, offset = scale + term.scale * length, offset + term.offset * length
    return tf.cast(scale * rows[2] + offset, dtype)
