"""Cut each stage's backward in two: gradients of what entered the stage, and gradients of its weights.

Only the first are waited for by other stages, so a schedule may run the second (``W``) at any later time (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023). What both need is computed once, in the first, and *carried* to the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from graph_passes.analysis.layers import variables_of
from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.extract import extract_function
from graph_passes.ir.graph import Effect, Function, Graph, Node, Port, Value, ancestors

# Other names for a tensor that is there, constants and values of weights: made again, for nothing, rather than carried.
FREE = frozenset({"Identity", "Reshape", "ExpandDims", "Squeeze", "Const", "capture", "ReadVariableOp"})
_BACKWARD = "/backward"


@dataclass(frozen=True)
class SplitWeights:
    """Replace each ``stageN/backward`` by one of that name without gradients of variables, and ``stageN/weights``."""

    name: str = "split_weights"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        state = find_variables(graph).state
        functions: list[Function] = []
        for function in graph.functions:
            functions += split_function(function, state) if function.name.endswith(_BACKWARD) else [function]
        return graph.replace(functions=tuple(functions))


def split_function(function: Function, state: Set[str] = frozenset()) -> tuple[Function, Function]:
    """The part of a backward that gives the gradients of the stage's inputs, and the part that gives its variables'.

    Whatever acts on something (writes, prints, draws), and reads of the variables in ``state``, which are written
    during the step, belong to the first part: they run once, and in the order in which they did. A stage whose inputs
    want no gradient, such as the first, has nothing but these there: its weights' part is all of its backward. Nothing
    waits for that stage, and ZB-H1 runs the parts of a first stage one right after the other.
    """
    graph, entering = function.graph, set(function.graph.inputs)
    given = list(zip(function.outputs, graph.outputs, strict=True))
    boundary = [(port, value) for port, value in given if port.role != "variable"]
    weights = [(port, value) for port, value in given if port.role == "variable"]
    acting = [node.name for node in graph.nodes if _acts(function, node, state)]
    first = ancestors(graph, [*(value.node for _, value in boundary), *acting], stop=entering)
    second = ancestors(graph, [value.node for _, value in weights], stop=entering | first)
    second |= _repeated(graph, first - set(acting), second, [value for _, value in weights])
    carried = _crossing(graph, first - second, second, [value for _, value in weights])
    results = [*boundary, *((Port("carry", str(value), graph.type_of(value)), value) for value in carried)]
    stage = function.name.removesuffix(_BACKWARD)
    return (
        _close(function, function.name, first, {}, results),
        _close(function, f"{stage}/weights", second, {value: ("carry", str(value)) for value in carried}, weights),
    )


def _acts(function: Function, node: Node, state: Set[str]) -> bool:
    """Whether the node does more than compute its outputs, or what it computes depends on when it runs."""
    if node.effect == Effect.READ:
        names = {port.name for name, port in _ports(function).items() if name in variables_of(function.graph, node)}
        return not state.isdisjoint(names)
    return node.effect != Effect.PURE


def _repeated(graph: Graph, first: Set[str], second: Set[str], wanted: Iterable[Value]) -> set[str]:
    """The nodes of ``first`` that ``second`` makes again, since they are FREE."""
    found: set[str] = set()
    pending = [*wanted, *(value for name in second for value in graph.node(name).inputs)]
    while pending:
        node = graph.node(pending.pop().node)
        if node.op in FREE and node.name in first and node.name not in found:
            found.add(node.name)
            pending += node.inputs
    return found


def _crossing(graph: Graph, first: Set[str], second: Set[str], wanted: Iterable[Value]) -> tuple[Value, ...]:
    """Values of ``first`` that ``second`` takes or gives, in the order of the graph."""
    taken = {value for name in second for value in graph.node(name).inputs} | set(wanted)
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return tuple(sorted((v for v in taken if v.node in first), key=lambda v: (position[v.node], v.index)))


def _ports(function: Function) -> dict[str, Port]:
    """The ports of a function by its input nodes."""
    return dict(zip(function.graph.inputs, function.inputs, strict=True))


def _close(
    function: Function,
    name: str,
    members: set[str],
    carried: dict[Value, tuple[str, str]],
    results: Iterable[tuple[Port, Value]],
) -> Function:
    ports = _ports(function)

    def port_of(value: Value) -> tuple[str, str] | None:
        if value.node in ports:
            return ports[value.node].role, ports[value.node].name
        return carried.get(value)

    known = list(results)
    return extract_function(name, function.graph, members, port_of, [port for port, _ in known], [v for _, v in known])
