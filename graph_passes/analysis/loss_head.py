"""The loss head of a model: the end of a loss that combines the samples, and runs once a step on the whole batch.

A loss that is no sum or mean over samples (contrastive, Dice, a correlation) cannot be computed from micro-batches. The
model is cut after the last tensors whose row i depends on sample i alone, the *inputs of the loss head*. What follows
is the loss head: it takes the rows of all micro-batches, and gives the gradients of these rows. Attributes of nodes
mark the loss head and its inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, ancestors

_LOSS_HEAD = "loss_head"
_HEAD_INPUTS = "head_inputs"


@dataclass(frozen=True, order=True)
class LossHeadInput:
    """A tensor that the loss head takes: its rows are on ``axis``, in ``outer`` blocks that each have all samples."""

    value: Value
    axis: int = 0
    outer: int = 1


def mark_loss_head(graph: Graph, nodes: Collection[str], head_inputs: Sequence[LossHeadInput]) -> Graph:
    """Return the graph in which ``nodes`` are the loss head, and take the rows of ``head_inputs``."""
    of_node: dict[str, list[int]] = {}
    for entry in head_inputs:
        of_node.setdefault(entry.value.node, []).extend((entry.value.index, entry.axis, entry.outer))

    def mark(node: Node) -> Node:
        if node.name in nodes:
            node = node.with_attrs(**{_LOSS_HEAD: True})
        return node.with_attrs(**{_HEAD_INPUTS: tuple(of_node[node.name])}) if node.name in of_node else node

    return graph.replace(nodes=tuple(map(mark, graph.nodes)))


def find_loss_head(graph: Graph) -> frozenset[str]:
    """Return the names of the nodes that only the loss head runs; empty for a model without a loss head."""
    return frozenset(node.name for node in graph.nodes if node.has(_LOSS_HEAD))


def find_head_inputs(graph: Graph) -> tuple[LossHeadInput, ...]:
    """Return the tensors that the loss head takes, in the order of the graph."""
    found = []
    for node in graph.nodes:
        if node.has(_HEAD_INPUTS):
            numbers = node.integers(_HEAD_INPUTS)
            triples = (numbers[i : i + 3] for i in range(0, len(numbers), 3))
            found += sorted(LossHeadInput(Value(node.name, index), axis, outer) for index, axis, outer in triples)
    return tuple(found)


def outside_of_loss_head(graph: Graph, once: Collection[str]) -> set[str]:
    """Return the nodes that micro-batches run.

    They compute the inputs of the loss head, statistics, and those outputs, writes and other side effects that the
    loss head does not compute.
    """
    loss_head = find_loss_head(graph)
    acting = [node.name for node in graph.nodes if node.effect in (Effect.WRITE, Effect.SIDE)]
    given = (*(entry.value for entry in find_head_inputs(graph)), *find_statistics(graph).values(), *graph.outputs)
    roots = [*(value.node for value in given), *acting]
    return ancestors(graph, [name for name in roots if name not in loss_head], stop=once)


# --- Values whose sums over micro-batches and replicas are used at the end of a step, such as statistics of batch norm


_STATISTIC = "statistic"


def mark_statistics(graph: Graph, names: Mapping[Value, str]) -> Graph:
    """Return the graph in which the values of ``names`` are marked as statistics: each is the only output of its node.

    ``names``: the name of the statistic for each value.
    """
    of_node = {value.node: name for value, name in names.items()}
    return graph.replace(
        nodes=tuple(
            node.with_attrs(**{_STATISTIC: of_node[node.name]}) if node.name in of_node else node
            for node in graph.nodes
        )
    )


def find_statistics(graph: Graph) -> dict[str, Value]:
    """Return the statistics by name, in the order of the graph."""
    return {node.string(_STATISTIC): Value(node.name) for node in graph.nodes if node.has(_STATISTIC)}
