"""AllReduce while backward still runs: the last micro-batch's gradients leave in buckets, last layers' first.

DAPPLE, section VI.C ("DP Overlap"), for any replicated stage: AllReduce of what backward has made hides behind the
rest of it. Only the last micro-batch can hide any: before it the sums are not complete. Where backward has side
effects (reads of variables are none) its gradients wait for these, as those of any TensorFlow function do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from graph_passes.ir.graph import Control, Function, Graph, Node, Port, attributes
from graph_passes.ir.names import at, gradient_function, micro_batch_count, nodes_of, replica_counts

# Large enough that a collective's latency (0.3 to 2 ms) is little beside its transfer (4 ms at 1 GB/s, 40 ms at
# 1 Gbps), small enough that the last bucket, which nothing is left to hide, is short. Horovod fuses small ones that
# are ready together.
BUCKET_BYTES = 4 * 2**20

READS = "overlap: where a call is inlined, its reads of variables wait for none of its inputs"

Indexed = tuple[int, Port]


@dataclass(frozen=True)
class Overlap:
    """Have every replicated stage reduce its gradients in buckets of about ``bucket_bytes``, one by one."""

    bucket_bytes: int = BUCKET_BYTES
    name: str = "overlap"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return overlap_backward(graph, self.bucket_bytes)


def overlap_backward(graph: Graph, bucket_bytes: int = BUCKET_BYTES) -> Graph:
    """The graph with one ``gradients`` node (and ``accumulate``, if there are several micro-batches) for each bucket.

    The last backward call of a replica (where backward is split, the last one for its weights) is marked ``inline``,
    and calls a function of its own where there are others: a call that is not inlined gives all its gradients at its
    end. Every sum has the order that it has without buckets.
    """
    last = micro_batch_count(graph) - 1
    functions = list(graph.functions)
    buckets: dict[int, list[tuple[Indexed, ...]]] = {}
    stages = {node.integer("stage") for node in nodes_of(graph, "gradients")}
    for stage, count in enumerate(replica_counts(graph)):
        if count > 1 and stage in stages:
            function = graph.function(at(stage, what=gradient_function(graph, stage)))
            buckets[stage] = cut_buckets(order_gradients(function), bucket_bytes)
            if last:
                name = at(stage, what=f"last_{gradient_function(graph, stage)}")
                functions.append(dataclasses.replace(function, name=name, graph=function.graph.replace(name=name)))
    nodes: list[Node] = []
    for node in graph.nodes:
        stage = node.integer("stage") if node.has("stage") else -1
        final = node.has("micro_batch") and node.integer("micro_batch") == last
        if stage not in buckets:
            nodes.append(node)
        elif node.op == gradient_function(graph, stage) and final:
            name = at(stage, what=f"last_{node.op}") if last else node.string("function")
            forward = at(stage, node.integer("replica"), last, "forward")
            nodes.append(node.with_attrs(function=name, inline=True).after(forward, READS))
        elif node.op == "gradients" or (node.op == "accumulate" and final):
            nodes += _cut(node, buckets[stage])
        else:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes), functions=tuple(functions)).sorted()


def order_gradients(function: Function) -> tuple[Indexed, ...]:
    """The variables' gradients of a backward function, as they become ready: by the longest chain of ops before each.

    Each with its place among them. Where that does not tell, those of the variables that forward uses last come first.
    """
    depths: dict[str, int] = {}
    for node in function.graph.nodes:
        depths[node.name] = 1 + max((depths.get(name, 0) for name in node.predecessors()), default=0)
    ready = [depths[value.node] for value in function.graph.outputs] or [0] * len(function.outputs)
    found = [(i, ready[place], port) for i, (place, port) in enumerate(function.output_ports("variable"))]
    return tuple((i, port) for i, _, port in sorted(found, key=lambda entry: (entry[1], -entry[0])))


def cut_buckets(gradients: Iterable[Indexed], bucket_bytes: int) -> list[tuple[Indexed, ...]]:
    """The gradients in this order, cut wherever ``bucket_bytes`` are full; an unknown length counts as one."""
    buckets: list[tuple[Indexed, ...]] = []
    bucket: list[Indexed] = []
    for gradient in gradients:
        bucket.append(gradient)
        if sum(port.type.bytes() for _, port in bucket) >= bucket_bytes:
            buckets.append(tuple(bucket))
            bucket = []
    return [*buckets, tuple(bucket)] if bucket else buckets


def _cut(node: Node, buckets: list[tuple[Indexed, ...]]) -> list[Node]:
    """One node for each bucket, which takes, or reads, only the bucket's part."""
    parts = []
    for b, bucket in enumerate(buckets):
        attrs = {**dict(node.attrs), "bucket": b, "variables": tuple(port.name for _, port in bucket)}
        inputs = tuple(node.inputs[i] for i, _ in bucket) if node.inputs else ()
        outputs = tuple(node.outputs[i] for i, _ in bucket) if node.outputs else ()
        controls = node.controls
        if node.op == "gradients":  # waits for the sum of its own bucket only
            controls = tuple(Control(_bucket(control.source, b), control.reason) for control in controls)
        parts.append(Node(_bucket(node.name, b), node.op, inputs, outputs, attributes(attrs), controls))
    return parts


def _bucket(name: str, bucket: int) -> str:
    return f"{name}/bucket{bucket}"
