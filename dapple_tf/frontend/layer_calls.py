"""Find out which Keras layer created each op of a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.graph_passes.ir.graph import Graph


@dataclass
class _Call:
    """A layer's call: the ops ``first_op`` to ``end_op`` (exclusive, and known when it returns) of ``graph``.

    ``path`` holds the names of the layer and of those that called it. A ``container`` calls other layers, or is a
    model. ``batch_norm``: the number of the call among those of ``keras.layers.BatchNormalization`` layers, or None.
    """

    graph: Any
    first_op: int
    path: str
    container: bool
    end_op: int = 0
    batch_norm: int | None = None


class LayerRecorder:
    """Records which ops of a trace each Keras layer's call created; for ``internals.record_layers``."""

    def __init__(self) -> None:
        self._open: list[_Call] = []
        self._calls: list[_Call] = []
        self._batch_norms = 0

    def __call__(self, layer: keras.Layer, entering: bool) -> None:
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations()) if graph.building_function else 0
        if entering:
            if self._open and self._open[-1].graph is graph:
                self._open[-1].container = True
            path = "/".join([*(call.path for call in self._open[-1:]), layer.name])
            self._open.append(_Call(graph, count, path, isinstance(layer, keras.Model)))
            return
        call = self._open.pop()
        call.end_op = count
        if isinstance(layer, keras.layers.BatchNormalization):
            call.batch_norm, self._batch_norms = self._batch_norms, self._batch_norms + 1
        self._calls.append(call)

    def mark_layers(self, graph: Graph, func_graph: Any) -> Graph:
        """Return ``graph``, read from ``func_graph``, with each node's Keras layer as an attribute.

        ``layer``: the path of the innermost layer whose call created the op. Where that layer contains others, the
        attribute is called ``within``. ``batch_norm``, for the ops of batch normalization: the number of the call.
        """
        operations = func_graph.get_operations()
        calls = {op.name: call for op, call in zip(operations, self._innermost(func_graph), strict=True)}
        nodes = []
        for node in graph.nodes:
            call = calls.get(node.name)
            if call is not None and call.path:
                node = node.with_attrs(within=call.path) if call.container else node.with_attrs(layer=call.path)
                node = node if call.batch_norm is None else node.with_attrs(batch_norm=call.batch_norm)
            nodes.append(node)
        return dataclasses.replace(graph, nodes=tuple(nodes))

    def _innermost(self, func_graph: Any) -> Sequence[_Call | None]:
        """Return the innermost call that created each op of ``func_graph``.

        Calls in the body of a loop belong to the body's graph, not to this one.
        """
        found: list[_Call | None] = [None] * len(func_graph.get_operations())
        for call in reversed(self._calls):  # an inner call returns, and is recorded, before the outer one
            if call.graph is func_graph:
                found[call.first_op : call.end_op] = [call] * (call.end_op - call.first_op)
        return found
