"""Write an op-level graph of the IR as a GraphDef, and import it into a TensorFlow graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2

from dapple_tf import internals
from dapple_tf.frontend.names import name_set, tensor_name
from dapple_tf.frontend.node_attributes import called_functions, dtype_number, write_attribute
from dapple_tf.graph_passes.ir.graph import Attr, FunctionRef, Graph, Node, Opaque, Value

# Attributes that only the IR has.
_IR_ATTRS = name_set(
    "adds batch_norm captures combines guard head_inputs join layer loss_head once open stands_for statistic "
    "takes_rows within writes"
)
_CHECKED = ("ResourceGatherNd", "ResourceScatterNd")
"""The first letters of the ops for which TensorFlow checks the shape of their variable."""

_FROM_DIAGONALS = frozenset({"MatrixDiagV2", "MatrixDiagV3"})


def write_graph(graph: Graph, *, shapes: bool = False) -> graph_pb2.GraphDef:
    """Return the GraphDef of an op-level graph and its library.

    Input nodes become placeholders, which ``import_graph`` replaces. ``shapes``: an import is to know the shapes of the
    graph, also where Python code set them when it was traced.
    """
    result = graph_pb2.GraphDef()
    result.versions.producer = tf.version.GRAPH_DEF_VERSION
    for node in graph.nodes:
        proto = result.node.add(name=node.name, op=node.op)
        if not node.op[0].isupper():
            proto.op = "Placeholder"
            proto.attr["dtype"].type = dtype_number(node.outputs[0].dtype)
            continue
        proto.input.extend(tensor_name(value) if value.index else value.node for value in node.inputs)
        proto.input.extend("^" + control.source for control in node.controls)
        for key, value in node.attrs:
            if key not in _IR_ATTRS:
                write_attribute(proto.attr[key], value)
        if shapes:
            write_attribute(proto.attr["_output_shapes"], tuple(kind.shape for kind in node.outputs))
    for _, body in graph.library:
        result.library.function.append(function_pb2.FunctionDef.FromString(body))
    return result


def import_graph(graph: Graph, inputs: Mapping[str, Any], name: str) -> list[Any]:
    """Import ``graph`` into the TensorFlow graph under construction, and return the tensors of its outputs.

    ``inputs``: the tensors that replace input nodes, by node name; these nodes are not imported: XLA has no
    placeholders. ``name`` is the scope of the imported ops.
    """
    nodes = tuple(node for node in with_known_diagonals(graph).nodes if node.name not in inputs)
    used = {value.node for node in nodes for value in node.inputs}  # TensorFlow refuses to map what no op takes
    for node in nodes:
        if node.op.startswith(_CHECKED) and node.inputs[0].node in inputs:
            element = node.outputs[0] if node.outputs else graph.type_of(node.inputs[2])
            internals.describe_handle(inputs[node.inputs[0].node], element.dtype.name)
    definition = write_graph(graph.replace(nodes=nodes))
    computed = [value for value in graph.outputs if value.node not in inputs]
    tensors = []
    if definition.node:
        tensors = tf.graph_util.import_graph_def(
            definition,
            input_map={node: tensor for node, tensor in inputs.items() if node in used},
            return_elements=[tensor_name(value) for value in computed],
            name=name,
        )
    by_value = dict(zip(computed, tensors, strict=True))
    return [inputs[value.node] if value.node in inputs else by_value[value] for value in graph.outputs]


def with_known_diagonals(graph: Graph) -> Graph:
    """Return the graph with an EnsureShape before each op that makes matrices from diagonals of a known length.

    TensorFlow refuses the op where it cannot infer that length. It cannot in a function that takes the shape of a
    tensor as an argument, as backward does.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op in _FROM_DIAGONALS:
            kind = graph.type_of(node.inputs[0])
            known = Node(f"{node.name}/known", "EnsureShape", node.inputs[:1], (kind,))
            nodes.append(known.with_attrs(T=kind.dtype, shape=kind.shape))
            node = dataclasses.replace(node, inputs=(Value(known.name), *node.inputs[1:]))
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes)) if len(nodes) > len(graph.nodes) else graph


def needed_library(graph: Graph, library: Mapping[str, bytes]) -> tuple[tuple[str, bytes], ...]:
    """Return the functions of ``library`` that the nodes of ``graph`` call, directly or through other functions."""
    pending = [name for node in graph.nodes for name in _referenced_functions(node)]
    needed: dict[str, bytes] = {}
    while pending:
        name = pending.pop()
        if name in needed or name not in library:
            continue
        needed[name] = library[name]
        body = function_pb2.FunctionDef.FromString(library[name])
        pending += [called for node in body.node_def for called in called_functions(node)]
    return tuple(sorted(needed.items()))


def rename_functions(graph: Graph, suffix: str) -> Graph:
    """Return the graph with ``suffix`` added to the names of all functions of its library.

    TensorFlow keeps the functions that it makes of a loop's body for the gradient, by the body's name, for the whole
    process: a loop that is differentiated twice needs other names the second time.
    """
    names = {name for name, _ in graph.library}

    def renamed(proto: attr_value_pb2.AttrValue) -> None:
        for function in (proto.func, *proto.list.func):
            if function.name in names:
                function.name += suffix

    def of_attr(value: Attr) -> Attr:
        if isinstance(value, FunctionRef) and value.name in names:
            return FunctionRef(value.name + suffix)
        if isinstance(value, Opaque):
            proto = attr_value_pb2.AttrValue.FromString(value.data)
            renamed(proto)
            return Opaque(proto.SerializeToString(deterministic=True))
        return value

    def of_op(op: str) -> str:  # an old-style call has the name of its function
        return op + suffix if op in names else op

    library = []
    for name, body in graph.library:
        definition = function_pb2.FunctionDef.FromString(body)
        definition.signature.name += suffix
        for node in definition.node_def:
            node.op = of_op(node.op)
            for proto in node.attr.values():
                if proto.WhichOneof("value") in ("func", "list"):
                    renamed(proto)
        library.append((name + suffix, definition.SerializeToString(deterministic=True)))
    nodes = [
        dataclasses.replace(node, op=of_op(node.op), attrs=tuple((key, of_attr(value)) for key, value in node.attrs))
        for node in graph.nodes
    ]
    return graph.replace(nodes=tuple(nodes), library=tuple(library))


def _referenced_functions(node: Node) -> list[str]:
    names = [value.name for _, value in node.attrs if isinstance(value, FunctionRef)]
    for _, value in node.attrs:
        if isinstance(value, Opaque):
            proto = attr_value_pb2.AttrValue.FromString(value.data)
            names += [proto.func.name] if proto.func.name else []
            names += [function.name for function in proto.list.func]
    return names
