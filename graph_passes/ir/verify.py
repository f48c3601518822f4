"""Verifiers: what must hold of every graph, whatever its level."""

from __future__ import annotations

from graph_passes.errors import GraphError
from graph_passes.ir.graph import Effect, Graph, topological


def verify(graph: Graph) -> None:
    """Check names, edges, types of calls, order and acyclicity.

    Raises GraphError naming the first node that breaks an invariant.
    """
    _verify_names(graph)
    _verify_edges(graph)
    _verify_calls(graph)
    _verify_order(graph)
    for function in graph.functions:
        _verify_names(function.graph)
        _verify_edges(function.graph)
        _verify_order(function.graph)


def _verify_order(graph: Graph) -> None:
    topological(graph.nodes)  # names the nodes of a cycle
    seen: set[str] = set()
    for node in graph.nodes:
        for source in node.predecessors():
            if source not in seen:
                raise GraphError(f"node {node.name!r} stands before {source!r}, which it needs")
        seen.add(node.name)


def _verify_names(graph: Graph) -> None:
    seen: set[str] = set()
    for node in graph.nodes:
        if node.name in seen:
            raise GraphError(f"graph {graph.name!r} has two nodes called {node.name!r}")
        if node.effect not in Effect.ALL:
            raise GraphError(f"node {node.name!r} has the unknown effect {node.effect!r}")
        seen.add(node.name)
    for name in graph.inputs:
        if name not in seen:
            raise GraphError(f"input {name!r} of graph {graph.name!r} is not one of its nodes")


def _verify_edges(graph: Graph) -> None:
    for node in graph.nodes:
        for value in node.inputs:
            if value.node not in graph.by_name:
                raise GraphError(f"node {node.name!r} takes {value}, but there is no such node")
            graph.type_of(value)
        for control in node.controls:
            if control.source not in graph.by_name:
                raise GraphError(f"node {node.name!r} runs after {control.source!r}, but there is no such node")
            if not control.reason:
                raise GraphError(f"the control edge {control.source!r} -> {node.name!r} gives no reason")
    for value in graph.outputs:
        graph.type_of(value)


def _verify_calls(graph: Graph) -> None:
    for node in graph.nodes:
        if not node.has("function"):
            continue
        function = graph.function(node.string("function"))
        ports = [port for port in function.inputs if port.role != "variable"]
        if len(ports) != len(node.inputs):
            raise GraphError(
                f"call {node.name!r} passes {len(node.inputs)} values to {function.name!r}, which takes {len(ports)}"
            )
        for value, port in zip(node.inputs, ports, strict=True):
            given = graph.type_of(value).dtype
            if given != port.type.dtype:
                raise GraphError(
                    f"call {node.name!r} passes {given.name} as {port.role} {port.name!r} of {function.name!r}, "
                    f"which takes {port.type.dtype.name}"
                )
        if tuple(port.type.dtype for port in function.outputs) != tuple(t.dtype for t in node.outputs):
            raise GraphError(f"call {node.name!r} does not have the outputs of {function.name!r}")
