"""The most that a function's own tensors take while it runs, each freed behind its last reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dapple_tf.memory.execution_order import run_order
from graph_passes.analysis.op_costs import VIEW_OPS
from graph_passes.ir.graph import Graph, Node, Value

Size = Callable[[Value], int]
"""Bytes of a value."""

# Ops of which TensorFlow's kernels write into an input of the result's size that nobody else reads
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
_FREE = frozenset({"Const", "Placeholder", "ReadVariableOp"})  # what is there anyway


@dataclass
class _Buffer:
    """Memory that one or several values share; ``readers``: how often they are yet to be read.

    ``mine``: allocated by this function, so it may be written over.
    """

    bytes: int
    readers: int
    mine: bool


def source_of(node: Node, index: int, size: Size) -> Value | None:
    """The input in whose memory output ``index`` of ``node`` lies; None where it has its own.

    Views; sums over nothing; and the parts of a tensor taken apart along axis 0, any of which holds all of it.
    """
    if not node.inputs:
        return None
    if node.op in VIEW_OPS:
        return node.inputs[index if node.op == "IdentityN" else 0]
    if node.op in _REDUCTIONS and size(node.inputs[0]) == size(Value(node.name)):
        return node.inputs[0]
    if node.op == "Unpack" and node.integer("axis") == 0:
        return node.inputs[0]
    return None


def root_of(graph: Graph, value: Value, size: Size) -> Value:
    """The value in whose memory ``value`` lies."""
    while (source := source_of(graph.node(value.node), value.index, size)) is not None:
        value = source
    return value


def allocates(node: Node) -> bool:
    """Whether a node's outputs, where they are no views, are memory of their own, made each time that it runs."""
    return node.op[0].isupper() and node.op not in _FREE


def peak_bytes(graph: Graph, size: Size, owned: Mapping[str, int] | None = None) -> int:
    """The most bytes that the values made in ``graph`` take at once, run in the order of ``run_order``.

    Inputs belong to the caller and count nothing, but for those ``owned`` (bytes by name), which are there from the
    start and freed behind their last reader. Outputs stay to the end. Views, constants and reads of variables take
    nothing; element-wise ops write over an input that nobody reads any more, as TensorFlow's do. What an op needs for
    itself, and what a While or a called function holds inside, is not seen.
    """
    reads = Counter(value for node in graph.nodes for value in node.inputs)
    reads.update(graph.outputs)  # never read by a node, so they stay
    held = {name: taken for name, taken in (owned or {}).items() if reads[Value(name)]}
    buffers = {Value(name): _Buffer(taken, reads[Value(name)], True) for name, taken in held.items()}
    live = peak = sum(held.values())
    for node in run_order(graph):
        if node.name in held:
            continue
        for value in node.values():
            live += _place(graph, node, value, reads[value], buffers, size)
        peak = max(peak, live)
        live -= _release(node.inputs, buffers, 1)
        live -= _release((value for value in node.values() if not reads[value]), buffers, 0)
    return peak


def _place(graph: Graph, node: Node, value: Value, readers: int, buffers: dict[Value, _Buffer], size: Size) -> int:
    """Enter the buffer in which ``value`` lies; the bytes that are new."""
    inside = source_of(node, value.index, size)
    if inside is None and node.op in _IN_PLACE:
        inside = _written_over(graph, node, value, buffers, size)
    if inside is not None:
        buffers[value] = buffers[inside]
        buffers[value].readers += readers
        return 0
    taken = size(value) if allocates(node) else 0
    buffers[value] = _Buffer(taken, readers, bool(taken))
    return taken


def _written_over(graph: Graph, node: Node, value: Value, buffers: Mapping[Value, _Buffer], size: Size) -> Value | None:
    """An input of the type and size of ``value`` whose memory nobody reads after this node."""
    for source, times in Counter(node.inputs).items():
        buffer = buffers[source]
        alike = graph.type_of(source).dtype == graph.type_of(value).dtype and buffer.bytes == size(value)
        if alike and buffer.mine and buffer.readers == times:
            return source
    return None


def _release(values: Iterable[Value], buffers: Mapping[Value, _Buffer], reads: int) -> int:
    """Bytes that are free when each of ``values`` has been read ``reads`` times more."""
    freed = 0
    for value in values:
        buffer = buffers[value]
        buffer.readers -= reads
        if not buffer.readers:
            freed += buffer.bytes
            buffer.bytes = 0
    return freed
