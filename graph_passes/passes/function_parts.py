"""Cut a stage function into parts between which the replicas of the stage join values, such as batch norm's statistics.

A node with the attribute ``join`` gives its input as it is where a stage has one replica, and where its function runs
by itself (profiling). With several replicas its output combines the inputs on all replicas. The function of one replica
does not have the others, so it ends at the join, and another part goes on after it. A part holds the nodes that depend
on equally many joins, one after the other. Joins that do not depend on each other come after the same part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from dapple_tf.graph_passes.analysis.layers import variables_of, written_variables
from dapple_tf.graph_passes.ir.extract import extract_function, results_of
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Node, Role, Value, ancestors

JOIN = "join"
"""The attribute of a node that says how it joins the values of all replicas: see ``OpName.JOIN``."""


@dataclass(frozen=True)
class FunctionParts:
    """A function in parts.

    ``functions``: the parts in order; a part takes inputs of the whole function, and values of earlier parts and joins
    (``carry``). ``results``: for each part the values that it returns, named as in the whole function. ``joins``: for
    each part the nodes that join values after it, in the order of the graph.
    """

    functions: tuple[Function, ...]
    results: tuple[tuple[Value, ...], ...]
    joins: tuple[tuple[Node, ...], ...]


def has_joins(function: Function) -> bool:
    """Return whether replicas must join a value inside of ``function``."""
    return any(node.has(JOIN) for node in function.graph.nodes)


def cut_function(function: Function) -> FunctionParts:
    """Return the parts of ``function``, called ``stage0/forward/part0``, ``stage0/forward/part1`` and so on."""
    graph = function.graph
    repeated = _find_repeated(graph)
    part_of = _find_parts(graph, repeated)
    joins = [node for node in graph.nodes if node.has(JOIN)]
    count = 1 + max((part for name, part in part_of.items() if not graph.node(name).has(JOIN)), default=0)
    results = _find_results(graph, part_of, count)
    functions = tuple(_extract(function, part, part_of, repeated, results[part]) for part in range(count))
    after = tuple(tuple(node for node in joins if part_of[node.name] == part) for part in range(count))
    return FunctionParts(functions, results, after)


def _find_repeated(graph: Graph) -> frozenset[str]:
    """Return the nodes that every part repeats where it needs them: constants, reads of weights, what they determine.

    So no part passes a constant to another as a tensor, which TensorFlow could not optimise as a constant.
    """
    written = written_variables(graph)
    found = {name for name in graph.inputs if graph.node(name).op == "variable"}
    variables = frozenset(found)
    for node in graph.nodes:
        if node.name in graph.inputs or node.controls or node.effect not in (Effect.PURE, Effect.READ):
            continue
        writes = any(graph.node(name).string("port") in written for name in variables_of(graph, node))
        if not writes and all(value.node in found for value in node.inputs):
            found.add(node.name)
    return frozenset(found - variables)


def _find_parts(graph: Graph, repeated: Set[str]) -> dict[str, int]:
    """Return the part of each node that is in one part only; for a join, the part after which it comes."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.name not in graph.inputs and node.name not in repeated:
            before = [name for name in node.predecessors() if name in found]
            found[node.name] = max((found[name] + graph.node(name).has(JOIN) for name in before), default=0)
    return found


def _find_results(graph: Graph, part_of: Mapping[str, int], count: int) -> tuple[tuple[Value, ...], ...]:
    """Return the values that each part gives: outputs of the function, and what joins and later parts take.

    The first part gives outputs that are constants.
    """
    wanted = {value for value in graph.outputs if value.node not in graph.inputs}
    for node in graph.nodes:
        for value in node.inputs:
            if node.has(JOIN) or part_of.get(node.name, 0) > part_of.get(value.node, len(graph.nodes)):
                wanted.add(value)
    given = graph.in_order(
        value for value in wanted if value.node not in graph.inputs and not graph.node(value.node).has(JOIN)
    )
    return tuple(tuple(value for value in given if part_of.get(value.node, 0) == part) for part in range(count))


def _extract(
    function: Function, part: int, part_of: Mapping[str, int], repeated: Set[str], results: Iterable[Value]
) -> Function:
    """Return one part as a function, with the repeated nodes that it needs."""
    graph, given = function.graph, tuple(results)
    own = {name for name, found in part_of.items() if found == part and not graph.node(name).has(JOIN)}
    needed = [*(value.node for value in given), *(source for name in own for source in graph.node(name).predecessors())]
    members = own | ancestors(graph, needed, stop=graph.by_name.keys() - repeated)

    def port_of(value: Value) -> tuple[Role, str] | None:
        found = function.input_key(value)
        return ("carry", str(value)) if found is None and value.node not in members else found

    carried = results_of(graph, "carry", given)
    return extract_function(f"{function.name}/part{part}", graph, members, port_of, carried)
