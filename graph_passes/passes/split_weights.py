"""Cut each stage's backward in two functions: the gradients of the stage's inputs, and the gradients of its weights.

Other stages wait only for the first, so a schedule may run the second (``W``) at any later time (Qi et al., "Zero
Bubble Pipeline Parallelism", 2023). What both need is computed once, in the first, and *carried* to the second. A stage
that runs the backward of some micro-batches whole keeps that function too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.layers import variables_of
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.extract import extract_function
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Node, Port, Role, Value, ancestors
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import Contract

# Views, constants and values of weights: the second function repeats these ops, which costs nothing, and carries none.
FREE = frozenset({"Identity", "Reshape", "ExpandDims", "Squeeze", "Const", "capture", "ReadVariableOp"})
_OF_VARIABLES: frozenset[Role] = frozenset({"variable", "slices", "indices"})


@dataclass(frozen=True)
class SplitWeights:
    """Add ``stageN/inputs``, and ``stageN/weights`` for the gradients of variables, to stages that split backwards.

    ``split``: stage and micro-batch of each backward that runs as two calls. A stage that splits all of its
    ``micro_batches`` loses its ``stageN/backward``.
    """

    split: frozenset[tuple[int, int]]
    micro_batches: int
    name: str = "split_weights"
    contract: ClassVar[Contract] = Contract(forbids=frozenset({OpName.FORWARD, OpName.BACKWARD}))

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with the functions of both halves in place of, or beside, each backward function."""
        state = find_variables(graph).state
        counts = Counter(at(stage, what=OpName.BACKWARD) for stage, _ in self.split)
        functions: list[Function] = []
        for function in graph.functions:
            functions += [function] if counts[function.name] < self.micro_batches else []
            functions += split_function(function, state) if counts[function.name] else []
        return graph.replace(functions=tuple(functions))


def split_function(function: Function, state: Set[str] = frozenset()) -> tuple[Function, Function]:
    """Return the part of a backward that gives the gradients of the stage's inputs, and the part for its variables.

    Nodes with effects (writes, prints, random draws) and reads of the variables ``state``, which are written during the
    step, belong to the first part: they run once, and in the same order as before. In a stage whose inputs have no
    gradient, such as the first stage, they are all of the first part, and the second part is the whole backward. No
    stage waits for the first stage, and ZB-H1 runs the two parts of its backward one right after the other.
    """
    graph, entering = function.graph, set(function.graph.inputs)
    results = list(zip(function.outputs, graph.outputs, strict=True))
    boundary = [(port, value) for port, value in results if port.role not in _OF_VARIABLES]
    weights = [(port, value) for port, value in results if port.role in _OF_VARIABLES]
    acting = [node.name for node in graph.nodes if _has_effect(function, node, state)]
    first = ancestors(graph, [*(value.node for _, value in boundary), *acting], stop=entering)
    second = ancestors(graph, [value.node for _, value in weights], stop=entering | first)
    second |= _repeated(graph, first - set(acting), second, [value for _, value in weights])
    carried = _carried(graph, first - second, second, [value for _, value in weights])
    carry_ports: dict[Value, tuple[Role, str]] = {value: ("carry", str(value)) for value in carried}
    first_results = [*boundary, *((Port("carry", str(value), graph.type_of(value)), value) for value in carried)]
    stage_name = function.name.removesuffix(f"/{OpName.BACKWARD}")
    return (
        _extract(function, f"{stage_name}/{OpName.INPUTS}", first, {}, first_results),
        _extract(function, f"{stage_name}/{OpName.WEIGHTS}", second, carry_ports, weights),
    )


def _has_effect(function: Function, node: Node, state: Set[str]) -> bool:
    """Return whether the node does more than compute its outputs, or reads variables that the step writes."""
    if node.effect == Effect.READ:
        names = {port.name for name, port in _ports(function).items() if name in variables_of(function.graph, node)}
        return not state.isdisjoint(names)
    return node.effect != Effect.PURE


def _repeated(graph: Graph, first: Set[str], second: Set[str], results: Iterable[Value]) -> set[str]:
    """Return the nodes of ``first`` that ``second`` repeats, since they cost nothing (``FREE``)."""
    found: set[str] = set()
    pending = [*results, *(value for name in second for value in graph.node(name).inputs)]
    while pending:
        node = graph.node(pending.pop().node)
        if node.op in FREE and node.name in first and node.name not in found:
            found.add(node.name)
            pending += node.inputs
    return found


def _carried(graph: Graph, first: Set[str], second: Set[str], results: Iterable[Value]) -> tuple[Value, ...]:
    """Return the values of ``first`` that ``second`` takes or returns, in the order of the graph."""
    taken = {value for name in second for value in graph.node(name).inputs} | set(results)
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return tuple(sorted((v for v in taken if v.node in first), key=lambda v: (position[v.node], v.index)))


def _ports(function: Function) -> dict[str, Port]:
    """Return the ports of a function's inputs by their nodes."""
    return dict(zip(function.graph.inputs, function.inputs, strict=True))


def _extract(
    function: Function,
    name: str,
    members: set[str],
    carry_ports: Mapping[Value, tuple[Role, str]],
    results: Iterable[tuple[Port, Value]],
) -> Function:
    """Return the function of the nodes ``members``, which takes the inputs of ``function`` and the carried values."""
    ports = _ports(function)

    def port_of(value: Value) -> tuple[Role, str] | None:
        if value.node in ports:
            return ports[value.node].role, ports[value.node].name
        return carry_ports.get(value)

    pairs = list(results)
    outputs, values = [port for port, _ in pairs], [value for _, value in pairs]
    return extract_function(name, function.graph, members, port_of, outputs, values)
