"""Replace a node of an op-level graph by the ops of a Python function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf.frontend.names import unique_name
from dapple_tf.frontend.read_graph import read_graph, read_value
from dapple_tf.graph_passes.ir.graph import OTHER, Attr, Graph, Node, Shape, TensorType, Value, ancestors


def replacement_nodes(
    node: Node, function: Callable[..., Any], inputs: Sequence[tuple[Value, TensorType]], taken: Iterable[str]
) -> list[Node]:
    """Return the nodes that compute ``function`` of ``inputs`` in the place of ``node``, which has one output.

    The last one has the name and the output type of ``node``, so that its consumers stay as they are. The others get
    names ``node/...`` that are not in ``taken``; their unknown dimensions are recorded as ``OTHER``, not as the batch.
    All have the Keras layer, the device and the control edges of ``node``.
    """
    traced = trace_nodes(function, [kind for _, kind in inputs])
    return place_nodes(traced, node, [value for value, _ in inputs], taken)


def place_of(node: Node) -> dict[str, Attr]:
    """Return the attributes that say to which Keras layer a node belongs."""
    return {key: value for key, value in node.attrs if key in ("layer", "within")}


@dataclass(frozen=True)
class TracedNodes:
    """The ops of a Python function, whose inputs are the nodes ``0``, ``1`` and so on; ``last``: its result."""

    body: Graph
    last: Value


def trace_nodes(function: Callable[..., Any], kinds: Sequence[TensorType]) -> TracedNodes:
    """Return the ops of ``function`` of inputs of these ``kinds``."""
    with tf.Graph().as_default() as graph:
        placeholders = [_placeholder(kind) for kind in kinds]
        last = function(*placeholders)
    holders = {tensor.op.name: Node(f"{i}", "arg") for i, tensor in enumerate(placeholders)}
    return TracedNodes(read_graph(graph, holders, "replacement"), read_value(last, holders))


def place_nodes(traced: TracedNodes, node: Node, inputs: Sequence[Value], taken: Iterable[str]) -> list[Node]:
    """Return the traced nodes, in the place of ``node`` and with these ``inputs``; see ``replacement_nodes``."""
    body, last_value = traced.body, traced.last
    needed = ancestors(body, [last_value.node])
    values = {Value(f"{i}"): value for i, value in enumerate(inputs)}
    names = {last_value.node: node.name}
    used = set(taken)
    for new in body.nodes:
        used.add(names.setdefault(new.name, unique_name(f"{node.name}/{new.name}", used)))
    place = place_of(node)
    return [
        dataclasses.replace(
            new.with_attrs(**place),
            name=names[new.name],
            inputs=tuple(values.get(value, Value(names[value.node], value.index)) for value in new.inputs),
            outputs=node.outputs if new.name == last_value.node else tuple(map(_without_batch, new.outputs)),
            controls=node.controls,
            device=node.device,
        )
        for new in body.nodes
        if new.name in needed and new.op != "arg"
    ]


def _placeholder(kind: TensorType) -> Any:
    dims = kind.shape.dims
    shape = None if dims is None else [None if dim in (None, OTHER) else dim for dim in dims]
    return tf.compat.v1.placeholder(kind.dtype.name, shape)


def _without_batch(kind: TensorType) -> TensorType:
    dims = kind.shape.dims
    return kind if dims is None else TensorType(kind.dtype, Shape(tuple(OTHER if d is None else d for d in dims)))
