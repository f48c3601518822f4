"""Resources that a loss may use beside variables: lookup tables, which it only reads."""

from __future__ import annotations

from typing import Any

from dapple_tf import internals
from dapple_tf.frontend.node_attributes import called_functions
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, tensor

FIND = "LookupTableFindV2"
TABLE_READS = frozenset({FIND, "LookupTableSizeV2", "LookupTableExportV2"})
"""The ops that read a lookup table and do not change it."""


def with_known_shapes(graph: Graph) -> Graph:
    """Return a copy of the graph for shape inference, in which the result of a lookup has the shape of its keys.

    TensorFlow gives a lookup its shape in Python, when it is traced; the op alone has none. A lookup is replaced by its
    default, broadcast to the shape of the keys. Lookups of vectors, and by vectors, stay as they are.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == FIND and _is_entry_by_entry(graph, node):
            _, keys, default = node.inputs
            rank = len(graph.type_of(keys).shape.dims or ())
            lengths = Node(f"{node.name}/lengths", "Shape", (keys,), (tensor("int32", rank),))
            lengths = lengths.with_attrs(T=graph.type_of(keys).dtype, out_type=lengths.outputs[0].dtype)
            filled = Node(node.name, "BroadcastTo", (default, Value(lengths.name)), node.outputs)
            filled = filled.with_attrs(T=node.outputs[0].dtype, Tidx=lengths.outputs[0].dtype)
            nodes += [lengths, filled]
        else:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


def _is_entry_by_entry(graph: Graph, node: Node) -> bool:
    keys, default, found = (graph.type_of(value).shape.dims for value in (*node.inputs[1:], Value(node.name)))
    return default == () and keys is not None and found is not None and len(keys) == len(found)


def find_misuse(tensor: Any) -> str | None:
    """Return the type of an op that uses a resource other than by reading a table; None where there is none.

    ``tensor``: the resource in a FuncGraph. Functions that it is passed to, such as branches and bodies of loops, are
    searched too.
    """
    users = ((op, i) for op in tensor.consumers() for i, taken in enumerate(op.inputs) if taken is tensor)
    for op, index in users:
        if op.type in TABLE_READS:
            continue
        if op.type == "Identity":
            found = find_misuse(op.outputs[0])
        else:
            position = index - (op.type in internals.CONDITION_OPS)
            called = (internals.function_graph(tensor.graph, name) for name in called_functions(op.node_def))
            inner = [body.inputs[position] for body in called]
            found = next(filter(None, map(find_misuse, inner)), None) if inner else op.type
        if found:
            return found
    return None
