"""Cut some nodes of a graph out into a function: what they take from outside becomes its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from graph_passes.ir.graph import Function, Graph, Node, Port, Value, attributes, topological

ROLES = ("arg", "boundary", "gradient", "seed", "stash", "carry", "variable")  # the order of a function's inputs

PortOf = Callable[[Value], tuple[str, str] | None]
"""The role and name under which a value enters the function; None for a value that is made inside."""


def extract_function(
    name: str, graph: Graph, members: set[str], port_of: PortOf, outputs: Sequence[Port], values: Sequence[Value]
) -> Function:
    """The function of the nodes ``members`` that gives ``values`` as ``outputs``.

    Batch arguments and variables among the members become inputs; control edges are kept between members.
    """
    inputs: dict[Value, tuple[Port, Node]] = {}

    def take(value: Value) -> Value:
        port = port_of(value)
        if port is None:
            return value
        if value not in inputs:
            kind = graph.type_of(value)
            node = Node(f"{port[0]}/{len(inputs)}", port[0], (), (kind,), attributes({"port": port[1]}))
            inputs[value] = (Port(*port, kind), node)
        return Value(inputs[value][1].name)

    body = [
        dataclasses.replace(
            node,
            inputs=tuple(map(take, node.inputs)),
            controls=tuple(control for control in node.controls if control.source in members),
        )
        for node in graph.nodes
        if node.name in members and node.op not in ("arg", "variable")
    ]
    results = tuple(map(take, values))
    ordered = sorted(inputs.values(), key=lambda entry: ROLES.index(entry[0].role))
    nodes = topological([*(node for _, node in ordered), *body])
    inside = Graph(name, nodes, tuple(node.name for _, node in ordered), results)
    return Function(name, inside, tuple(port for port, _ in ordered), tuple(outputs))
