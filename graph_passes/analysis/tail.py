"""The tail of a model: the end of a loss that combines the samples, and runs once a step on the whole batch.

A loss that is no sum or mean over samples (contrastive, Dice, a correlation) cannot be computed from micro-batches. The
model is cut after the last tensors whose row i depends on sample i alone, the *frontier*. What follows is the tail: it
takes the rows of all micro-batches, and gives the gradients of these rows. Attributes of nodes mark the frontier and
the tail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from graph_passes.analysis.statistics import find_statistics
from graph_passes.ir.graph import Effect, Graph, Node, Value, ancestors

_TAIL = "tail"
_FRONTIER = "frontier"


@dataclass(frozen=True, order=True)
class TailInput:
    """A tensor that the tail takes: its rows are on ``axis``, in ``outer`` blocks that each have all samples."""

    value: Value
    axis: int = 0
    outer: int = 1


def mark_tail(graph: Graph, nodes: Collection[str], frontier: Sequence[TailInput]) -> Graph:
    """Return the graph in which ``nodes`` are the tail, and take the rows of ``frontier``."""
    of_node: dict[str, list[int]] = {}
    for entry in frontier:
        of_node.setdefault(entry.value.node, []).extend((entry.value.index, entry.axis, entry.outer))

    def mark(node: Node) -> Node:
        if node.name in nodes:
            node = node.with_attrs(**{_TAIL: True})
        return node.with_attrs(**{_FRONTIER: tuple(of_node[node.name])}) if node.name in of_node else node

    return graph.replace(nodes=tuple(map(mark, graph.nodes)))


def find_tail(graph: Graph) -> frozenset[str]:
    """Return the names of the nodes that only the tail runs; empty for a model without a tail."""
    return frozenset(node.name for node in graph.nodes if node.has(_TAIL))


def find_frontier(graph: Graph) -> tuple[TailInput, ...]:
    """Return the tensors that the tail takes, in the order of the graph."""
    found = []
    for node in graph.nodes:
        if node.has(_FRONTIER):
            numbers = node.integers(_FRONTIER)
            triples = (numbers[i : i + 3] for i in range(0, len(numbers), 3))
            found += sorted(TailInput(Value(node.name, index), axis, outer) for index, axis, outer in triples)
    return tuple(found)


def outside_of_tail(graph: Graph, once: Collection[str]) -> set[str]:
    """Return the nodes that micro-batches run.

    They compute the frontier, statistics, and the outputs, writes and other side effects that are not in the tail.
    """
    tail = find_tail(graph)
    acting = [node.name for node in graph.nodes if node.effect in (Effect.WRITE, Effect.SIDE)]
    given = (*(entry.value for entry in find_frontier(graph)), *find_statistics(graph).values(), *graph.outputs)
    roots = [*(value.node for value in given), *acting]
    return ancestors(graph, [name for name in roots if name not in tail], stop=once)
