"""Peak memory of a function's own tensors while it runs: each is freed after its last reader."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import networkx as nx

from dapple_tf.graph_passes.analysis.op_costs import VIEW_OPS
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value

BytesOf = Callable[[Value], int]
"""Returns the bytes of a value."""

# Ops whose TensorFlow kernels reuse the memory of an input of the output's size that nothing else reads
# (OpKernelContext::forward_input_or_allocate_output).
# fmt: off
_IN_PLACE = frozenset({
    "Abs", "Acos", "Asin", "Atan", "Ceil", "Conj", "Cos", "Elu", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Gelu",
    "Inv", "Invert", "Log", "Log1p", "LogSoftmax", "LeakyRelu", "Neg", "Reciprocal", "Relu", "Relu6", "Rint",
    "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Softsign", "Sqrt", "Square", "Tan",
    "Tanh", "Add", "AddN", "AddV2", "Atan2", "BiasAdd", "Div", "DivNoNan", "Maximum", "Minimum", "Mul", "MulNoNan",
    "Pow", "RealDiv", "SquaredDifference", "Sub", "Xlogy", "EluGrad", "InvGrad", "LeakyReluGrad", "ReciprocalGrad",
    "Relu6Grad", "ReluGrad", "RsqrtGrad", "SeluGrad", "SigmoidGrad", "SoftplusGrad", "SoftsignGrad", "SqrtGrad",
    "TanhGrad", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits",
})
# fmt: on
_REDUCTIONS = frozenset({"All", "Any", "Max", "Mean", "Min", "Prod", "Sum"})
_PACKED_LENGTH = 832
"""Entries of the summed axis that Eigen's matrix product packs at once: two slices of it, whose length follows the
processor's first-level cache (with 48 KiB, 672 to 840 of an axis of 1024 to 8192 were measured)."""
_WITHOUT_ALLOCATION = frozenset({"Const", "Placeholder", "ReadVariableOp"})


@dataclass
class _Buffer:
    """Memory that one or several values share.

    ``pending_reads``: reads that are still to come. ``reusable``: this function allocated it, so an in-place op may
    overwrite it.
    """

    bytes: int
    pending_reads: int
    reusable: bool


def aliased_input(node: Node, index: int, bytes_of: BytesOf) -> Value | None:
    """Return the input whose memory output ``index`` of ``node`` shares; None where it has memory of its own.

    Shared are: views; reductions over axes of length 1; parts of a tensor that is unpacked along axis 0 (each part
    keeps the whole tensor alive).
    """
    if not node.inputs:
        return None
    if node.op in VIEW_OPS:
        return node.inputs[index if node.op == "IdentityN" else 0]
    if node.op in _REDUCTIONS and bytes_of(node.inputs[0]) == bytes_of(Value(node.name)):
        return node.inputs[0]
    if node.op == "Unpack" and node.integer("axis") == 0:
        return node.inputs[0]
    return None


def buffer_value(graph: Graph, value: Value, bytes_of: BytesOf) -> Value:
    """Return the value that owns the memory of ``value``: ``value`` itself, unless it is a view."""
    while (source := aliased_input(graph.node(value.node), value.index, bytes_of)) is not None:
        value = source
    return value


def allocates(node: Node) -> bool:
    """Return whether a node allocates memory for its outputs (those that are no views) each time it runs."""
    return node.op[0].isupper() and node.op not in _WITHOUT_ALLOCATION


def peak_bytes(graph: Graph, bytes_of: BytesOf, *, packs: bool = False) -> int:
    """Return the peak bytes of the values computed in ``graph``, run in the order of ``execution_order``.

    Inputs belong to the caller and count nothing. Outputs stay live to the end. Views, constants and reads of variables
    take no memory; element-wise ops reuse an input that nothing else reads, as TensorFlow's kernels do. ``packs``: a
    matrix product copies its operands (see ``packed_bytes``). Other scratch memory of kernels, and tensors inside a
    While or a called function, are not counted.
    """
    reads = Counter(value for node in graph.nodes for value in node.inputs)
    reads.update(graph.outputs)  # one read that no node performs: outputs stay live
    buffers: dict[Value, _Buffer] = {}
    live = peak = 0
    for node in execution_order(graph):
        for value in node.values():
            live += _allocate(graph, node, value, reads[value], buffers, bytes_of)
        peak = max(peak, live + packs * packed_bytes(graph, node, bytes_of))
        live -= _release(node.inputs, buffers, 1)
        live -= _release((value for value in node.values() if not reads[value]), buffers, 0)
    return peak


def packed_bytes(graph: Graph, node: Node, bytes_of: BytesOf) -> int:
    """Return the bytes of the copies of both operands that Eigen's product of two matrices makes; 0 for other ops.

    On several threads it copies the operands in slices of the axis that is summed. At any time it holds slices that
    have at most ``_PACKED_LENGTH`` entries of this axis together.
    """
    if node.op != "MatMul":
        return 0
    operands = [bytes_of(value) for value in node.inputs]
    result = bytes_of(Value(node.name)) * graph.type_of(Value(node.name)).dtype.size
    summed = math.isqrt(math.prod(operands) // max(1, result))  # of [m, k] and [k, n] to [m, n], the length k
    return sum(operands) * min(summed, _PACKED_LENGTH) // max(1, summed)


def _allocate(
    graph: Graph, node: Node, value: Value, reads: int, buffers: dict[Value, _Buffer], bytes_of: BytesOf
) -> int:
    """Assign a buffer to ``value``, which is read ``reads`` times; return the bytes newly allocated."""
    shared = aliased_input(node, value.index, bytes_of)
    if shared is None and node.op in _IN_PLACE:
        shared = _overwritable_input(graph, node, value, buffers, bytes_of)
    if shared is not None:
        buffers[value] = buffers[shared]
        buffers[value].pending_reads += reads
        return 0
    size = bytes_of(value) if allocates(node) else 0
    buffers[value] = _Buffer(size, reads, bool(size))
    return size


def _overwritable_input(
    graph: Graph, node: Node, value: Value, buffers: Mapping[Value, _Buffer], bytes_of: BytesOf
) -> Value | None:
    """Return an input with the dtype and size of ``value`` whose memory nothing reads after this node, or None."""
    for source, count in Counter(node.inputs).items():
        buffer = buffers[source]
        fits = graph.type_of(source).dtype == graph.type_of(value).dtype and buffer.bytes == bytes_of(value)
        if fits and buffer.reusable and buffer.pending_reads == count:
            return source
    return None


def _release(values: Iterable[Value], buffers: Mapping[Value, _Buffer], reads: int) -> int:
    """Count ``reads`` more reads of each of ``values``; return the bytes that this frees."""
    freed = 0
    for value in values:
        buffer = buffers[value]
        buffer.pending_reads -= reads
        if not buffer.pending_reads:
            freed += buffer.bytes
            buffer.bytes = 0
    return freed


# --- The order in which TensorFlow's executor runs the ops of a function


def execution_order(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes in the order of one executor thread: nodes without inputs, then first ready, first run.

    This differs from the order of the graph: all weight gradients that are ready at a point are computed one after the
    other, and their inputs stay live. Several threads follow the same order approximately.
    """
    order: nx.DiGraph[str] = nx.DiGraph()
    order.add_nodes_from(node.name for node in graph.nodes)
    order.add_edges_from((source, node.name) for node in graph.nodes for source in node.predecessors())
    return tuple(map(graph.node, nx.topological_sort(order)))
