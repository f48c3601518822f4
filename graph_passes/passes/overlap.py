"""AllReduce during backward: the last micro-batch's gradients are reduced in buckets, those of the last layers first.

DAPPLE, section VI.C ("DP Overlap"), for any replicated stage: gradients that backward has computed are reduced while it
computes the rest. Only the last micro-batch can overlap: before it the sums are not complete. Where backward has side
effects (reads of variables are none) its gradients wait for these, as those of any TensorFlow function do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Control, Function, Graph, Node, Port, make_node
from dapple_tf.graph_passes.ir.names import at, micro_batch_count, nodes_of, replica_counts, weight_gradient_op
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract

# Large enough that the latency of a collective (0.3 to 2 ms) is small against its transfer (4 ms at 1 GB/s, 40 ms at
# 1 Gbps), and small enough that the last bucket, which nothing overlaps, is short. Horovod fuses small buckets that
# are ready at the same time.
BUCKET_BYTES = 4 * 2**20

READS = "overlap: where a call is inlined, its reads of variables wait for none of its inputs"

IndexedPort = tuple[int, Port]
"""A gradient of a variable, with its position among those of the function."""


@dataclass(frozen=True)
class Overlap(BuiltInPass):
    """Reduce the gradients of each replicated stage in buckets of about ``bucket_bytes``."""

    bucket_bytes: int = BUCKET_BYTES
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.GRADIENTS}),
        forbids=frozenset({OpName.ALLREDUCE, OpName.REDUCED_GRADIENTS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a ``gradients`` (and, for several micro-batches, an ``accumulate``) for each bucket.

        The last backward call of a replica (where backward is split, the last ``weights`` call) gets the attribute
        ``inline``, and a function of its own where there are other calls: a call that is not inlined gives all its
        gradients at its end. Every sum is added in the same order as without buckets. Raises GraphError if the
        gradients are in buckets already.
        """
        if any(node.has("bucket") for node in graph.nodes):
            raise GraphError("the gradients are in buckets already: run the overlap pass once")
        last = micro_batch_count(graph) - 1
        functions = list(graph.functions)
        buckets: dict[int, list[tuple[IndexedPort, ...]]] = {}
        stages = {node.integer("stage") for node in nodes_of(graph, OpName.GRADIENTS)}
        for stage, count in enumerate(replica_counts(graph)):
            if count > 1 and stage in stages:
                op = weight_gradient_op(graph, stage, last)
                function = graph.function(at(stage, what=op))
                buckets[stage] = cut_buckets(order_gradients(function), self.bucket_bytes)
                if last:
                    name = at(stage, what=f"last_{op}")
                    functions.append(dataclasses.replace(function, name=name, graph=function.graph.replace(name=name)))
        nodes: list[Node] = []
        for node in graph.nodes:
            stage = node.get("stage")
            final = node.get("micro_batch") == last
            if stage not in buckets:
                nodes.append(node)
            elif node.op == weight_gradient_op(graph, stage, last) and final:
                name = at(stage, what=f"last_{node.op}") if last else node.string("function")
                forward = at(stage, node.integer("replica"), last, OpName.FORWARD)
                nodes.append(node.with_attrs(function=name, inline=True).after(forward, READS))
            elif node.op == OpName.GRADIENTS or (node.op == OpName.ACCUMULATE and final):
                nodes += _cut(node, buckets[stage])
            else:
                nodes.append(node)
        return graph.replace(nodes=tuple(nodes), functions=tuple(functions)).sorted()


def order_gradients(function: Function) -> tuple[IndexedPort, ...]:
    """Return the variables' gradients of a backward function in the order in which they are ready.

    A gradient is ready after the longest chain of ops before it. Of chains of equal length, the gradients of the
    variables that forward uses last come first.
    """
    depths: dict[str, int] = {}
    for node in function.graph.nodes:
        depths[node.name] = 1 + max((depths.get(name, 0) for name in node.predecessors()), default=0)
    ready = [depths[value.node] for value in function.graph.outputs]
    found = [(i, ready[place], port) for i, (place, port) in enumerate(function.output_ports("variable"))]
    return tuple((i, port) for i, _, port in sorted(found, key=lambda entry: (entry[1], -entry[0])))


def cut_buckets(gradients: Iterable[IndexedPort], bucket_bytes: int) -> list[tuple[IndexedPort, ...]]:
    """Return the gradients in this order, cut after each ``bucket_bytes``; an unknown dimension counts as 1."""
    buckets: list[tuple[IndexedPort, ...]] = []
    bucket: list[IndexedPort] = []
    for gradient in gradients:
        bucket.append(gradient)
        if sum(port.type.bytes() for _, port in bucket) >= bucket_bytes:
            buckets.append(tuple(bucket))
            bucket = []
    return [*buckets, tuple(bucket)] if bucket else buckets


def _cut(node: Node, buckets: list[tuple[IndexedPort, ...]]) -> list[Node]:
    """Return a node for each bucket, which takes or gives only the gradients of the bucket."""
    parts = []
    for b, bucket in enumerate(buckets):
        attrs = {**dict(node.attrs), "bucket": b, "variables": tuple(port.name for _, port in bucket)}
        inputs = tuple(node.inputs[i] for i, _ in bucket) if node.inputs else ()
        outputs = tuple(node.outputs[i] for i, _ in bucket) if node.outputs else ()
        controls = node.controls
        if node.op == OpName.GRADIENTS:  # waits for the sum of its own bucket only
            controls = tuple(Control(_bucket_name(control.source, b), control.reason) for control in controls)
        parts.append(make_node(_bucket_name(node.name, b), node.op, inputs, outputs, controls, **attrs))
    return parts


def _bucket_name(name: str, bucket: int) -> str:
    return f"{name}/bucket{bucket}"
