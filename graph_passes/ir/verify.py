"""Check the invariants of every graph: unique names, existing edges, calls that fit their functions, known ops."""

from __future__ import annotations

from operator import attrgetter
from typing import NoReturn

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Function, Graph, Node, TensorType, topological
from dapple_tf.graph_passes.ir.ops import INPUT_OPS, OPS, Op, Operands
from dapple_tf.wording import format_count

_NODE_OF = attrgetter("node")  # of a Value


def verify(graph: Graph, verified: Graph | None = None) -> None:
    """Check the nodes, edges, ops and calls of ``graph``, and those of its stage functions.

    A graph that has an op of the op table is at the call level, and may have no other ops. ``verified``: a graph that
    has passed this check. Node and Function objects that it shares with ``graph`` are not checked again, except for
    names and edges, for nodes that take outputs of new nodes, and for calls if the two graphs differ in a function.
    Raises GraphError that names the first node that breaks an invariant.
    """
    known = {id(item) for item in (*verified.functions, *verified.nodes)} if verified else set()
    new = {node.name for node in graph.nodes if id(node) not in known}
    same_functions = verified is not None and list(map(id, graph.functions)) == list(map(id, verified.functions))
    _verify_nodes(graph)
    call_level = any(node.op in OPS for node in graph.nodes)
    calls = []
    for node in graph.nodes:
        is_known = node.name not in new and new.isdisjoint(map(_NODE_OF, node.inputs))
        if node.op in OPS:
            if node.name in new:
                _verify_attributes(node, OPS[node.op])
            if not is_known:
                _verify_operands(node, "inputs", OPS[node.op].inputs, tuple(map(graph.type_of, node.inputs)))
                _verify_operands(node, "outputs", OPS[node.op].outputs, node.outputs)
        elif call_level or node.op[0].islower():
            _verify_input_op(graph, node, allowed=not call_level)
        if not (is_known and same_functions) and node.has("function"):
            calls.append(node)
    for node in calls:
        _verify_call(graph, node)
    for function in graph.functions:
        if id(function) not in known:
            _verify_function(function)


def _verify_nodes(graph: Graph) -> None:
    """Check names and edges: every edge comes from a node that stands before, and every value exists."""
    counts: dict[str, int] = {}  # of outputs, by the node's name
    for node in graph.nodes:
        if node.name in counts:
            raise GraphError(f"graph {graph.name!r} has two nodes called {node.name!r}")
        for value in node.inputs:
            if value.node not in counts:
                _refuse_source(graph, node, value.node, f"takes {value}")
            if value.index >= counts[value.node]:
                graph.type_of(value)  # raises GraphError
        for control in node.controls:
            if control.source not in counts:
                _refuse_source(graph, node, control.source, f"runs after {control.source!r}")
            if not control.reason:
                raise GraphError(f"the control edge {control.source!r} -> {node.name!r} gives no reason")
        counts[node.name] = len(node.outputs)
    for name in graph.inputs:
        if name not in counts:
            raise GraphError(f"input {name!r} of graph {graph.name!r} is not one of its nodes")
    for value in graph.outputs:
        graph.type_of(value)


def _refuse_source(graph: Graph, node: Node, source: str, needs: str) -> NoReturn:
    """Raise GraphError for an edge to ``node`` from ``source``, which does not stand before it."""
    if source not in graph.by_name:
        raise GraphError(f"node {node.name!r} {needs}, but there is no such node")
    topological(graph.nodes)  # raises GraphError for a cycle
    raise GraphError(f"node {node.name!r} stands before {source!r}, on which it depends")


def _verify_attributes(node: Node, op: Op) -> None:
    for attribute in op.attributes:
        if attribute.required and not node.has(attribute.name):
            raise GraphError(f"node {node.name!r} ({node.op}) lacks the attribute {attribute.name!r}")
    for name, value in node.attrs:
        known = op.attribute(name)
        if known is None:
            names = ", ".join(attribute.name for attribute in op.attributes) or "none"
            raise GraphError(f"node {node.name!r} ({node.op}) has the unknown attribute {name!r}; known are: {names}")
        if not known.accepts(value):
            raise GraphError(f"attribute {name!r} of {node.name!r} ({node.op}) is {value!r}, not of type {known.type}")


def _verify_operands(node: Node, kind: str, operands: Operands, found: tuple[TensorType, ...]) -> None:
    count, expected = operands.count, operands.meaning
    if isinstance(count, str):
        items = node.attr(count)
        assert isinstance(items, tuple)  # its type has been checked
        count, expected = len(items), f"{expected}, one for each item of {count!r}"
    if count is not None and len(found) != count:
        raise GraphError(f"node {node.name!r} ({node.op}) has {len(found)} {kind}, not {count}: {expected}")
    for index, dtype in enumerate(operands.dtypes):
        if index >= len(found) or found[index].dtype.name != dtype:
            is_there = found[index].dtype.name if index < len(found) else "missing"
            raise GraphError(f"{kind}[{index}] of {node.name!r} ({node.op}) is {is_there}, not {dtype}: {expected}")


def _verify_input_op(graph: Graph, node: Node, *, allowed: bool) -> None:
    if not (allowed and node.op in INPUT_OPS):
        where = "" if allowed else "of the call level "
        raise GraphError(
            f"node {node.name!r} of graph {graph.name!r} has the op {node.op!r}, but no op {where}has this name"
        )


def _verify_call(graph: Graph, node: Node) -> None:
    function = graph.function(node.string("function"))
    ports = function.passed
    if len(ports) != len(node.inputs):
        raise GraphError(
            f"call {node.name!r} passes {format_count(len(node.inputs), 'value')} to {function.name!r}, which takes "
            f"{len(ports)}"
        )
    for value, port in zip(node.inputs, ports, strict=True):
        passed = graph.type_of(value).dtype
        if passed != port.type.dtype:
            raise GraphError(
                f"call {node.name!r} passes {passed.name} as {port.role} {port.name!r} of {function.name!r}, "
                f"which takes {port.type.dtype.name}"
            )
    if tuple(port.type.dtype for port in function.outputs) != tuple(t.dtype for t in node.outputs):
        raise GraphError(f"call {node.name!r} does not have the outputs of {function.name!r}")


def _verify_function(function: Function) -> None:
    graph = function.graph
    _verify_nodes(graph)
    for node in graph.nodes:
        if node.op[0].islower():
            _verify_input_op(graph, node, allowed=True)
    roles = tuple(port.role for port in function.inputs)
    ops = tuple(graph.node(name).op for name in graph.inputs)
    if roles != ops:
        raise GraphError(f"function {function.name!r} has inputs of the roles {roles}, but its graph has inputs {ops}")
    if len(function.outputs) != len(graph.outputs):
        raise GraphError(
            f"function {function.name!r} has {format_count(len(function.outputs), 'output')}, but its graph has "
            f"{len(graph.outputs)}"
        )
