"""Read a TensorFlow graph into the op-level IR: nodes, side effects, control edges, shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.names import name_set
from dapple_tf.frontend.node_attributes import called_functions, read_attribute
from dapple_tf.frontend.tables import TABLE_READS
from dapple_tf.graph_passes.ir.graph import (
    DType,
    Effect,
    Graph,
    Node,
    Shape,
    TensorType,
    Value,
    attributes,
    topological,
)

_READS = TABLE_READS | {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
HIDDEN_DRAWS = name_set(
    "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal ParameterizedTruncatedNormal RandomShuffle "
    "RandomGamma RandomPoissonV2 Multinomial UniformCandidateSampler LogUniformCandidateSampler "
    "LearnedUnigramCandidateSampler FixedUnigramCandidateSampler"
)
"""Ops that draw from a generator's hidden state."""

# Ops that TensorFlow calls stateful, so that it does not fold them, and that have no effect: memory to be filled.
_STATELESS = frozenset({"Empty"})
# Attributes that are valid only in the graph in which the op was created.
_LOCAL_ATTRS = frozenset({"_class", "_read_only_resource_inputs", "_output_shapes"})


def read_graph(graph: Any, inputs: Mapping[str, Node], name: str, left_out: Collection[str] = frozenset()) -> Graph:
    """Return the IR of a FuncGraph. ``inputs`` maps names of placeholders to the input nodes that replace them.

    ``left_out``: names of ops that are not read; what is read takes none of their outputs.

    Control edges that order side effects are kept; those that only make a function's outputs wait for reads of
    variables are dropped.
    """
    definition = graph.as_graph_def()
    bodies = {body.signature.name: body for body in definition.library.function}
    nodes = []
    for op in graph.get_operations():
        if op.name in left_out:
            continue
        types = tuple(TensorType(DType(out.dtype.base_dtype.name), read_shape(out)) for out in op.outputs)
        if op.name in inputs:
            input_node = inputs[op.name]
            nodes.append(Node(input_node.name, input_node.op, outputs=types, attrs=input_node.attrs))
            continue
        effect, writes = _read_effect(op, inputs, bodies)
        attrs = {key: read_attribute(value) for key, value in op.node_def.attr.items() if key not in _LOCAL_ATTRS}
        if writes:
            attrs["writes"] = writes
        values = tuple(read_value(tensor, inputs) for tensor in op.inputs)
        nodes.append(Node(op.name, op.type, values, types, attributes(attrs), effect=effect))
    library = tuple((key, bodies[key].SerializeToString(deterministic=True)) for key in sorted(bodies))
    return Graph(name, topological(_with_controls(nodes, graph, inputs)), library=library)


def read_value(tensor: Any, inputs: Mapping[str, Node]) -> Value:
    """Return the IR value of a tensor of a graph that was read with these ``inputs``."""
    return Value(node_name(tensor.op.name, inputs), tensor.value_index)


def skip_identities(tensor: Any) -> Any:
    """Return the tensor before the Identity ops at a function's end, which run only when the whole function has."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def read_shape(tensor: Any) -> Shape:
    """Return the static shape of a tensor."""
    return Shape(None if tensor.shape.rank is None else tuple(tensor.shape.as_list()))


def node_name(op_name: str, inputs: Mapping[str, Node]) -> str:
    """Return the name of an op's node in a graph that was read with these ``inputs``."""
    return inputs[op_name].name if op_name in inputs else op_name


def _read_effect(op: Any, inputs: Mapping[str, Node], bodies: Mapping[str, Any]) -> tuple[Effect, tuple[str, ...]]:
    """Return an op's side effect, and the names of the variables that it writes."""
    if op.type in _READS:
        return Effect.READ, ()
    if op.type in HIDDEN_DRAWS:
        return Effect.RANDOM, ()
    if op.type not in internals.CALLING_OPS and not _is_stateful(op.type):
        return Effect.PURE, ()  # calls are checked below: TensorFlow gives some random calls a stateless op
    resources = [(i, tensor) for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource]
    if resources:
        read_only = set(op.node_def.attr["_read_only_resource_inputs"].list.i)  # which calls have
        written = tuple(
            node_name(tensor.op.name, inputs)
            for i, tensor in resources
            if i not in read_only and not _is_table(tensor.op.name, inputs)
        )
        if written:
            return Effect.WRITE, written
    if op.type in internals.CALLING_OPS:
        stateful = find_stateful_ops(called_functions(op.node_def), bodies)
        if stateful:
            return (Effect.RANDOM if stateful <= HIDDEN_DRAWS else Effect.SIDE), ()
        return (Effect.READ if resources else Effect.PURE), ()
    return Effect.SIDE, ()


def _is_table(op_name: str, inputs: Mapping[str, Node]) -> bool:
    """Return whether a resource is a table that is only read: variables have nodes of their own."""
    return op_name in inputs and inputs[op_name].op == "capture"


def _is_stateful(op: str) -> bool:
    return op not in _STATELESS and internals.is_stateful_op(op)


def find_stateful_ops(names: list[str], bodies: Mapping[str, Any]) -> set[str]:
    """Return the types of the stateful ops, except reads and calls, in these functions and in those they call."""
    pending, seen, found = list(names), set(), set()
    while pending:
        name = pending.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        for node in bodies[name].node_def:
            if node.op in internals.CALLING_OPS:
                pending += called_functions(node)
            elif node.op not in _READS and _is_stateful(node.op):
                found.add(node.op)
    return found


def _with_controls(nodes: list[Node], graph: Any, inputs: Mapping[str, Node]) -> list[Node]:
    """Return the nodes without NoOps, with the control edges that order side effects.

    An edge may lead through a NoOp, through an op that is left out, or through an Identity: an assertion in a function
    returns an Identity of the call's result.
    """
    # TensorFlow keeps control inputs in sets: sort them, so that every process reads the same graph.
    before = {op.name: sorted(source.name for source in op.control_inputs) for op in graph.get_operations()}
    by_name = {node.name: node for node in nodes}

    def sources(name: str) -> Iterable[str]:
        for source in before.get(name, ()):
            yield from reached(source)

    def reached(source: str) -> Iterable[str]:
        if source in inputs:
            return
        if source not in by_name or by_name[source].op == "NoOp":
            yield from sources(source)
            return
        yield source
        if by_name[source].op == "Identity":
            yield from reached(by_name[source].inputs[0].node)

    result = []
    for node in nodes:
        if node.op == "NoOp":
            continue
        for source in dict.fromkeys(sources(node.name)):
            if reason := _order_reason(by_name[source], node):
                node = node.after(source, reason)
        result.append(node)
    return result


def _order_reason(first: Node, second: Node) -> str:
    """Return why ``second`` must run after ``first``; "" where TensorFlow only made outputs wait."""
    if first.effect == Effect.SIDE:
        return "effect: ordered after a side effect"
    if second.effect == Effect.PURE:
        return ""
    if first.effect == Effect.WRITE:
        return "effect: ordered after a write"
    if first.effect == Effect.READ and second.effect == Effect.WRITE:
        written = set(second.strings("writes"))
        return "effect: writes what was read before" if written & {v.node for v in first.inputs} else ""
    return ""
