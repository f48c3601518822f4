"""Cut each stage's backward in two functions: the gradients of the stage's inputs, and the gradients of its weights.

Other stages wait only for the first, so a schedule may run the second (``W``) at any later time (Qi et al., "Zero
Bubble Pipeline Parallelism", 2023). What both need is computed once, in the first, and *carried* to the second. A stage
that runs the backward of some micro-batches whole keeps that function too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.layers import variables_of
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.extract import PortOf, extract_function, results_of, values_between
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Node, Port, Role, Value, ancestors
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract

# Views, constants and values of weights: the second function repeats these ops, which costs nothing, and carries none.
FREE = frozenset({"Identity", "Reshape", "ExpandDims", "Squeeze", "Const", "capture", "ReadVariableOp"})
_OF_VARIABLES: frozenset[Role] = frozenset({"variable", "slices", "indices"})


@dataclass(frozen=True)
class SplitWeights(BuiltInPass):
    """Add ``stageN/inputs``, and ``stageN/weights`` for the gradients of variables, to stages that split backwards.

    ``split``: stage and micro-batch of each backward that runs as two calls. A stage that splits all of its
    ``micro_batches`` loses its ``stageN/backward``.
    """

    split: frozenset[tuple[int, int]]
    micro_batches: int
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
    boundary = [result for result in function.results if result[0].role not in _OF_VARIABLES]
    weights = [result for result in function.results if result[0].role in _OF_VARIABLES]
    acting = [node.name for node in graph.nodes if _has_effect(graph, node, state)]
    first = ancestors(graph, [*(value.node for _, value in boundary), *acting], stop=entering)
    second = ancestors(graph, [value.node for _, value in weights], stop=entering | first)
    free = {node.name for node in graph.nodes if node.op in FREE} & first - {*acting}
    taken = [value.node for name in second for value in graph.node(name).inputs]
    roots = [*(value.node for _, value in weights), *taken]
    second |= ancestors(graph, roots, stop=graph.by_name.keys() - free, by_controls=False)
    carried = values_between(graph, first - second, second, [value for _, value in weights])
    boundary += results_of(graph, "carry", carried)

    def port_of(value: Value) -> tuple[Role, str] | None:
        return ("carry", str(value)) if value in carried else function.input_key(value)

    def extract(op: OpName, members: set[str], find: PortOf, results: Sequence[tuple[Port, Value]]) -> Function:
        name = f"{function.name.removesuffix(f'/{OpName.BACKWARD}')}/{op}"
        return extract_function(name, graph, members, find, results)

    return (
        extract(OpName.INPUTS, first, function.input_key, boundary),
        extract(OpName.WEIGHTS, second, port_of, weights),
    )


def _has_effect(graph: Graph, node: Node, state: Set[str]) -> bool:
    """Return whether the node does more than compute its outputs, or reads variables that the step writes."""
    if node.effect == Effect.READ:
        return any(graph.node(name).string("port") in state for name in variables_of(graph, node))
    return node.effect != Effect.PURE
