"""Refuse calls of batch norm layers whose statistics cannot be found in the graph of a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.exactness import BatchNorm
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.dependence.elementwise import is_integer
from dapple_tf.frontend.dependence.kinds import Form, Kind
from dapple_tf.graph_passes.analysis.layers import layer_of, live_nodes
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value


def statistics_writes(captured: Captured, choice: BatchNorm) -> list[Node]:
    """Return the nodes by which batch norm layers write moving statistics of each micro-batch.

    Raises CaptureError if another node writes such statistics, since the layer is then called inside that node. Raises
    CaptureError too if such a layer computes with the number of its samples: a call has only the samples of one
    micro-batch on one replica, and the statistics are taken over more. ``choice``: the value of ``batch_norm``, for the
    message.
    """
    assert captured.dependence is not None, "the analysis tells which layers normalise each micro-batch"
    once = captured.dependence.once
    writes = [node for node in captured.graph.nodes if node.effect is Effect.WRITE and node.name not in once]
    _check_seen(captured, writes, choice)
    found = [node for node in writes if node.has("batch_norm")]
    _check_sizes(captured.graph, captured.dependence.kinds, found, choice)
    return found


def _check_seen(captured: Captured, writes: Sequence[Node], choice: BatchNorm) -> None:
    """Raise CaptureError if a node that is no batch norm layer's own op writes such a layer's moving statistics."""
    others = {name: node for node in writes if not node.has("batch_norm") for name in node.strings("writes")}
    layers = {id(layer.moving_mean.value): layer for layer in internals.batch_norm_layers()} if others else {}
    for name, node in others.items():
        layer = layers.get(id(captured.variables.get(name)))
        if layer is not None:
            raise CaptureError(
                f"batch_norm={choice!r}: {node.name!r} ({node.op}) writes the statistics of layer {layer.name!r}: the "
                "layer is called in a nested tf.function, a loop or a condition, or not by its __call__. Call it in "
                "the loss itself, or take batch_norm='micro-batch'"
            )


def _check_sizes(graph: Graph, kinds: Mapping[Value, Kind], writes: Sequence[Node], choice: BatchNorm) -> None:
    """Raise CaptureError if a layer with one of the ``writes`` computes a float from the length of a batch axis."""
    calls, live = {node.integer("batch_norm") for node in writes}, live_nodes(graph)
    for node in graph.nodes:
        if node.name not in live or not node.has("batch_norm") or node.integer("batch_norm") not in calls:
            continue
        numbers = [value for value in node.values() if not is_integer(graph.type_of(value))]
        if any(kinds[value].form is Form.SIZE for value in numbers):
            raise CaptureError(
                f"batch_norm={choice!r}: layer {layer_of(node)!r} computes with the number of its samples "
                f"({node.name!r}, {node.op}): it sees those of one micro-batch on one replica, and its statistics are "
                "taken over more. Take batch_norm='micro-batch', or a layer that does not use that number"
            )
