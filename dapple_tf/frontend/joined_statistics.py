"""Check that all that batch norm takes of the samples of a micro-batch is joined over replicas, and mark where."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.batch_norm_calls import layer_of, statistics_writes
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.joined_moments import mark_joins
from graph_passes.analysis.layers import SHAPE_OPS, live_nodes
from graph_passes.ir.graph import Graph, Node, Value
from graph_passes.passes.function_parts import JOIN


def join_statistics(captured: Captured) -> Captured:
    """Return the captured loss in which the nodes are marked at which replicas join the statistics of batch norm.

    Raises CaptureError for a layer that takes something else of a micro-batch than mean and variance of its input, and
    for one whose call is not seen in the loss.
    """
    graph = mark_joins(captured.graph)
    joins = {node.integer("batch_norm"): node.name for node in graph.nodes if node.has(JOIN) and node.has("batch_norm")}
    for write in statistics_writes(captured, "sync"):
        if write.integer("batch_norm") not in joins:
            raise _own_statistics(write)
    assert captured.dependence is not None, "it was there for the writes"
    calls: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.has("batch_norm"):
            calls.setdefault(node.integer("batch_norm"), []).append(node)
    users, live = graph.consumers(), live_nodes(graph)
    used = {name: [user.name for user in nodes if user.name in live] for name, nodes in users.items()}
    for number, join in joins.items():
        _check_joined(graph, calls[number], join, captured.dependence.kinds, used)
    return dataclasses.replace(captured, graph=graph)


def _check_joined(
    graph: Graph, call: Sequence[Node], join: str, kinds: Mapping[Value, Kind], used: Mapping[str, Sequence[str]]
) -> None:
    """Raise CaptureError if what the layer's ``call`` computes from several samples is used other than for ``join``.

    ``used``: the names of the nodes that take a node's outputs.
    """
    before = {join}
    for node in reversed(call):
        if not before.isdisjoint(used[node.name]):
            before.add(node.name)
    after, of_samples, coupled = {join}, set[str](), set[str]()
    for node in call:
        sources = {value.node for value in node.inputs}
        if after & sources:
            after.add(node.name)
        if of_samples & sources or any(kinds[value].rows for value in node.inputs if value in kinds):
            of_samples.add(node.name)  # not what is read of moving statistics, which each micro-batch writes
        combines = node.name in of_samples - after and any(kinds[v].coupled for v in node.values() if v in kinds)
        if node.name == join or not (combines or sources & coupled) or node.op in SHAPE_OPS:
            continue
        coupled.add(node.name)
        if any(user not in before and graph.node(user).op not in SHAPE_OPS for user in used[node.name]):
            raise _own_statistics(node)


def _own_statistics(node: Node) -> CaptureError:
    layer = layer_of(node)
    return CaptureError(
        f"batch_norm='sync': layer {layer!r} computes statistics in a way of its own ({node.name!r}, {node.op}), and "
        "replicas join only the mean and variance of its input: take batch_norm='micro-batch'"
    )
