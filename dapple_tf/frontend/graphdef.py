"""TensorFlow graphs to IR and back: the only file that knows how attributes and edges are spelled there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2

from dapple_tf import internals
from graph_passes.ir.graph import (
    Attr,
    DType,
    Effect,
    FunctionRef,
    Graph,
    Node,
    Opaque,
    Shape,
    TensorType,
    Value,
    attributes,
    topological,
)

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})
_RANDOM = frozenset(
    {
        "RandomUniform",
        "RandomUniformInt",
        "RandomStandardNormal",
        "TruncatedNormal",
        "ParameterizedTruncatedNormal",
        "RandomShuffle",
        "RandomGamma",
        "RandomPoissonV2",
        "Multinomial",
        "UniformCandidateSampler",
        "LogUniformCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "FixedUnigramCandidateSampler",
    }
)
_CALLS = frozenset(
    {
        "While",
        "StatelessWhile",
        "If",
        "StatelessIf",
        "Case",
        "StatelessCase",
        "PartitionedCall",
        "StatefulPartitionedCall",
    }
)
# Attributes that hold only for the graph they were made in.
_LOCAL_ATTRS = frozenset({"_class", "_read_only_resource_inputs", "_output_shapes"})
# Attributes of the IR's own, unknown to TensorFlow.
_OWN_ATTRS = frozenset({"layer", "within", "writes"})


# --- reading


def read_graph(graph: Any, inputs: Mapping[str, Node], name: str) -> Graph:
    """The IR of a FuncGraph. ``inputs`` gives, by placeholder name, the input node that replaces it.

    Control edges are kept where they order true effects, and dropped where TensorFlow only made the outputs
    wait for reads.
    """
    definition = graph.as_graph_def()
    bodies = {body.signature.name: body for body in definition.library.function}
    nodes = []
    for op in graph.get_operations():
        types = tuple(_type(output) for output in op.outputs)
        if op.name in inputs:
            given = inputs[op.name]
            nodes.append(Node(given.name, given.op, outputs=types, attrs=given.attrs))
            continue
        effect, writes = _effect(op, inputs, bodies)
        attrs = {key: _read_attr(value) for key, value in op.node_def.attr.items() if key not in _LOCAL_ATTRS}
        if writes:
            attrs["writes"] = writes
        values = tuple(Value(_ir_name(t.op.name, inputs), t.value_index) for t in op.inputs)
        nodes.append(Node(op.name, op.type, values, types, attributes(attrs), effect=effect))
    library = tuple((key, bodies[key].SerializeToString(deterministic=True)) for key in sorted(bodies))
    return Graph(name, topological(_with_controls(nodes, graph, inputs)), library=library)


def _ir_name(name: str, inputs: Mapping[str, Node]) -> str:
    return inputs[name].name if name in inputs else name


def _effect(op: Any, inputs: Mapping[str, Node], bodies: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """What an op does besides its outputs, and the names of the variables it writes."""
    if op.type in _READS:
        return Effect.READ, ()
    if op.type in _RANDOM:
        return Effect.RANDOM, ()
    if op.type not in _CALLS and not internals.is_stateful_op(op.type):
        return Effect.PURE, ()  # (TensorFlow counts a call that draws random numbers as stateless now and then)
    resources = [(i, tensor) for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource]
    if resources:
        read_only = set(op.node_def.attr["_read_only_resource_inputs"].list.i) if op.type in _CALLS else set()
        written = tuple(_ir_name(tensor.op.name, inputs) for i, tensor in resources if i not in read_only)
        if written:
            return Effect.WRITE, written
    if op.type in _CALLS:
        acting = _acting(_called(op.node_def), bodies)
        if acting:
            return (Effect.RANDOM if acting <= _RANDOM else Effect.SIDE), ()
        return (Effect.READ if resources else Effect.PURE), ()
    return Effect.SIDE, ()


def _called(node: Any) -> list[str]:
    """Names of the functions that a node calls."""
    names = [value.func.name for value in node.attr.values() if value.func.name]
    return names + [function.name for value in node.attr.values() for function in value.list.func]


def _acting(names: list[str], bodies: Mapping[str, Any]) -> set[str]:
    """The stateful ops, other than reads and calls, that the functions and those they call hold."""
    pending, seen, found = list(names), set(), set()
    while pending:
        name = pending.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        for node in bodies[name].node_def:
            if node.op in _CALLS:
                pending += _called(node)
            elif node.op not in _READS and internals.is_stateful_op(node.op):
                found.add(node.op)
    return found


def _type(tensor: Any) -> TensorType:
    return TensorType(DType(tensor.dtype.base_dtype.name), read_shape(tensor))


def _with_controls(nodes: list[Node], graph: Any, inputs: Mapping[str, Node]) -> list[Node]:
    """The nodes less NoOps, with the control edges that order true effects (also through a NoOp or Identity)."""
    # TensorFlow keeps them in sets: sorted, every process reads the same graph.
    before = {op.name: sorted(source.name for source in op.control_inputs) for op in graph.get_operations()}
    by_name = {node.name: node for node in nodes}

    def sources(name: str) -> Iterable[str]:
        for source in before.get(name, ()):
            yield from reached(source)

    def reached(source: str) -> Iterable[str]:
        if source in inputs:
            return
        if by_name[source].op == "NoOp":
            yield from sources(source)
            return
        yield source
        if by_name[source].op == "Identity":  # an assertion in a function gives its result, not itself
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
    """Why ``second`` must really run after ``first``; "" where TensorFlow only made outputs wait."""
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


def _read_attr(value: attr_value_pb2.AttrValue) -> Attr:
    match value.WhichOneof("value"):
        case "s":
            return bytes(value.s)
        case "i":
            return int(value.i)
        case "f":
            return float(value.f)
        case "b":
            return bool(value.b)
        case "type":
            return _read_dtype(value.type)
        case "shape":
            return _read_shape_proto(value.shape)
        case "func" if not value.func.attr:
            return FunctionRef(value.func.name)
        case "list":
            return _read_list(value)
    return Opaque(value.SerializeToString(deterministic=True))


def _read_list(value: attr_value_pb2.AttrValue) -> Attr:
    items = value.list
    for found, read in _LIST_READERS.items():
        if field := getattr(items, found):
            return tuple(read(item) for item in field)
    return () if items.ByteSize() == 0 else Opaque(value.SerializeToString(deterministic=True))


def _read_dtype(number: int) -> DType:
    return DType(tf.dtypes.as_dtype(number).name)


def _read_shape_proto(proto: Any) -> Shape:
    if proto.unknown_rank:
        return Shape(None)
    return Shape(tuple(None if dim.size < 0 else int(dim.size) for dim in proto.dim))


_LIST_READERS: Mapping[str, Callable[[Any], Attr]] = {
    "s": bytes,
    "i": int,
    "f": float,
    "b": bool,
    "type": _read_dtype,
    "shape": _read_shape_proto,
}


# --- writing


def write_graph(graph: Graph) -> graph_pb2.GraphDef:
    """The GraphDef of an op-level graph.

    Input nodes become placeholders, to be mapped on import. The library goes along.
    """
    result = graph_pb2.GraphDef()
    result.versions.producer = tf.version.GRAPH_DEF_VERSION
    for node in graph.nodes:
        proto = result.node.add(name=node.name, op=node.op)
        if not node.op[0].isupper():
            proto.op = "Placeholder"
            proto.attr["dtype"].type = _dtype_number(node.outputs[0].dtype)
            continue
        proto.input.extend(f"{v.node}:{v.index}" if v.index else v.node for v in node.inputs)
        proto.input.extend("^" + control.source for control in node.controls)
        for key, value in node.attrs:
            if key not in _OWN_ATTRS:
                _write_attr(proto.attr[key], value)
    for _, body in graph.library:
        result.library.function.append(function_pb2.FunctionDef.FromString(body))
    return result


def _dtype_number(dtype: DType) -> int:
    return int(tf.as_dtype(dtype.name).as_datatype_enum)


def _write_attr(proto: attr_value_pb2.AttrValue, value: Attr) -> None:
    match value:
        case bool():
            proto.b = value
        case int():
            proto.i = value
        case float():
            proto.f = value
        case bytes():
            proto.s = value
        case DType():
            proto.type = _dtype_number(value)
        case Shape():
            proto.shape.SetInParent()  # a scalar's shape is there, and empty
            _write_shape(proto.shape, value)
        case FunctionRef(name):
            proto.func.name = name
        case Opaque(data):
            proto.MergeFromString(data)
        case tuple():
            _write_list(proto, value)
        case _:
            raise TypeError(f"{value!r} is no attribute of TensorFlow's")


def _write_list(proto: attr_value_pb2.AttrValue, items: tuple[Attr, ...]) -> None:
    proto.list.SetInParent()
    for item in items:
        match item:
            case bool():
                proto.list.b.append(item)
            case int():
                proto.list.i.append(item)
            case float():
                proto.list.f.append(item)
            case bytes():
                proto.list.s.append(item)
            case DType():
                proto.list.type.append(_dtype_number(item))
            case Shape():
                _write_shape(proto.list.shape.add(), item)
            case _:
                raise TypeError(f"{item!r} is no item of a list attribute of TensorFlow's")


def _write_shape(proto: Any, shape: Shape) -> None:
    if shape.dims is None:
        proto.unknown_rank = True
        return
    for dim in shape.dims:
        proto.dim.add(size=-1 if dim is None else dim)


def import_graph(graph: Graph, inputs: Mapping[str, Any], name: str) -> list[Any]:
    """Import ``graph`` into the TensorFlow graph under construction, and return the tensors of its outputs.

    ``inputs``: the tensors that replace input nodes, by node name. ``name`` is the scope of the imported ops.
    """
    definition = write_graph(graph)
    computed = [value for value in graph.outputs if value.node not in inputs]
    tensors = []
    if definition.node:
        tensors = tf.graph_util.import_graph_def(
            definition,
            input_map={node: tensor for node, tensor in inputs.items() if node in graph.by_name},
            return_elements=[tensor_name(value) for value in computed],
            name=name,
        )
    by_value = dict(zip(computed, tensors, strict=True))
    return [inputs[value.node] if value.node in inputs else by_value[value] for value in graph.outputs]


def tensor_name(value: Value) -> str:
    """Return the name of a value's tensor in TensorFlow: ``node:index``."""
    return f"{value.node}:{value.index}"


def needed_library(graph: Graph, library: Mapping[str, bytes]) -> tuple[tuple[str, bytes], ...]:
    """The bodies that a graph's nodes call, and those that these call in turn."""
    pending = [name for node in graph.nodes for name in _references(node)]
    needed: dict[str, bytes] = {}
    while pending:
        name = pending.pop()
        if name in needed or name not in library:
            continue
        needed[name] = library[name]
        body = function_pb2.FunctionDef.FromString(library[name])
        pending += [called for node in body.node_def for called in _called(node)]
    return tuple(sorted(needed.items()))


def _references(node: Node) -> list[str]:
    names = [value.name for _, value in node.attrs if isinstance(value, FunctionRef)]
    for _, value in node.attrs:
        if isinstance(value, Opaque):
            proto = attr_value_pb2.AttrValue.FromString(value.data)
            names += [proto.func.name] if proto.func.name else []
            names += [function.name for function in proto.list.func]
    return names


def read_shapes(graph: Any, prefix: str) -> dict[str, tuple[Shape, ...]]:
    """Output shapes of the ops whose names start with ``prefix``, by the rest of their names."""
    return {
        op.name.removeprefix(prefix): tuple(read_shape(output) for output in op.outputs)
        for op in graph.get_operations()
        if op.name.startswith(prefix)
    }


def read_shape(tensor: Any) -> Shape:
    """Return the static shape of a tensor."""
    return Shape(None if tensor.shape.rank is None else tuple(tensor.shape.as_list()))
