"""Extract nodes of a graph into a function of their own, whose inputs are the values that they take from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence, Set

from dapple_tf.graph_passes.ir.graph import ROLES, Function, Graph, Node, Port, Role, Value, topological

PortOf = Callable[[Value], tuple[Role, str] | None]
"""Maps a value to the role and the name of the input that carries it, or to None if the function computes it."""


def extract_function(
    name: str, graph: Graph, members: set[str], port_of: PortOf, results: Sequence[tuple[Port, Value]]
) -> Function:
    """Return the function ``name`` that runs the nodes ``members`` of ``graph``; ``results``: its outputs, with values.

    Batch arguments and variables among the members become inputs. Control edges between members are kept.
    """
    inputs: dict[Value, tuple[Port, Node]] = {}

    def inside(value: Value) -> Value:
        port = port_of(value)
        if port is None:
            return value
        if value not in inputs:
            made = Port(*port, graph.type_of(value))
            inputs[value] = (made, made.node(f"{made.role}/{len(inputs)}"))
        return Value(inputs[value][1].name)

    body = [
        dataclasses.replace(
            node,
            inputs=tuple(map(inside, node.inputs)),
            controls=tuple(control for control in node.controls if control.source in members),
        )
        for node in graph.nodes
        if node.name in members and node.op not in ("arg", "rows", "variable")
    ]
    given = tuple(inside(value) for _, value in results)
    ordered = sorted(inputs.values(), key=lambda entry: ROLES.index(entry[0].role))
    nodes = topological([*(node for _, node in ordered), *body])
    extracted = Graph(name, nodes, tuple(node.name for _, node in ordered), given)
    return Function(name, extracted, tuple(port for port, _ in ordered), tuple(port for port, _ in results))


def results_of(graph: Graph, role: Role, values: Iterable[Value]) -> list[tuple[Port, Value]]:
    """Return the values, each with a port of this role that is called like the value."""
    return [(Port(role, str(value), graph.type_of(value)), value) for value in values]


def values_between(graph: Graph, sources: Set[str], takers: Iterable[str], results: Iterable[Value]) -> list[Value]:
    """Return the values of the nodes ``sources`` that ``takers`` take, or that are ``results``, in order."""
    taken = {value for name in takers for value in graph.node(name).inputs} | set(results)
    return graph.in_order(value for value in taken if value.node in sources)
