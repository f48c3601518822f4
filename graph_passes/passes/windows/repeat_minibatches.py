"""Repeat the graph of one minibatch for every minibatch of an asynchronous window."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import OTHER, Control, Graph, Node, Shape, TensorType, Value, attributes, make_node
from dapple_tf.graph_passes.ir.names import (
    BATCH_SIZE_NAME,
    at,
    micro_batch_count,
    nodes_of,
    of_minibatch,
    of_replica,
    replica_counts,
)
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.microbatch import MergeKind
from dapple_tf.graph_passes.schedules.window import Window

# Ops of a stage that run on every replica also where replicas take minibatches in turn, since each needs what they
# write.
_ON_ALL_REPLICAS = frozenset({OpName.RUN_ONCE, OpName.ROW_BOUNDS})
_ROWS = "batch"  # the end of the name of the node of a minibatch's rows


@dataclass(frozen=True)
class RepeatMinibatches(BuiltInPass):
    """Make the graph of a window from that of one minibatch, which has no update yet.

    ``aux``: how to merge each aux output. The outputs are then the mean of the minibatches' losses, the aux outputs,
    and the losses as a vector.
    """

    window: Window
    aux: tuple[MergeKind, ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD, OpName.MERGE, OpName.BATCH_SIZE}),
        forbids=frozenset({OpName.MINIBATCH, OpName.REFRESH, OpName.COMMIT, OpName.ALLREDUCE, OpName.BARRIER})
        | {OpName.MERGE_MINIBATCHES},
        produces=frozenset({OpName.MINIBATCH, OpName.MERGE_MINIBATCHES}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with the nodes of one minibatch once for each minibatch, on its rows and its replicas.

        Micro-batches are numbered through the window. Raises GraphError where the graph has other stages, replicas or
        micro-batches than one minibatch of the window.
        """
        found = replica_counts(graph), micro_batch_count(graph)
        wanted = self.window.sharing, self.window.micro_batches
        if found != wanted:
            raise GraphError(f"a minibatch of the window has (replicas, micro-batches) {wanted}, the graph {found}")
        nodes = [node for node in graph.nodes if node.op == OpName.INPUT]
        (size,) = nodes_of(graph, OpName.BATCH_SIZE)
        nodes.append(size)
        for minibatch in range(self.window.minibatches):
            nodes.append(_cut(graph, self.window, minibatch))
            nodes += _Copy(graph, self.window, minibatch).nodes()
        outputs = []
        merges = zip(
            graph.outputs, ("loss", *(f"aux/{i}" for i in range(len(self.aux)))), ("mean", *self.aux), strict=True
        )
        for value, name, kind in [*merges, (graph.outputs[0], "losses", "stack")]:
            inputs = tuple(Value(of_minibatch(t, value.node), value.index) for t in range(self.window.minibatches))
            of_one = graph.type_of(value)
            stacked = TensorType(of_one.dtype, Shape((self.window.minibatches, *(of_one.shape.dims or ()))))
            given = stacked if kind == "stack" else of_one
            nodes.append(make_node(name, OpName.MERGE_MINIBATCHES, inputs, [given], kind=kind))
            outputs.append(Value(name))
        return graph.replace(nodes=tuple(nodes), outputs=tuple(outputs)).sorted()


def _cut(graph: Graph, window: Window, minibatch: int) -> Node:
    """Return the node of a minibatch's rows of the batch's tensors."""
    kinds = []
    for name in graph.inputs:
        kind = graph.type_of(Value(name))
        kinds.append(TensorType(kind.dtype, Shape((OTHER, *(kind.shape.dims or (OTHER,))[1:]))))
    inputs, of = (Value(BATCH_SIZE_NAME), *map(Value, graph.inputs)), window.minibatches
    name = of_minibatch(minibatch, _ROWS)
    return make_node(name, OpName.MINIBATCH, inputs, kinds, minibatch=minibatch, minibatches=of)


class _Copy:
    """Makes the nodes of one minibatch."""

    def __init__(self, graph: Graph, window: Window, minibatch: int) -> None:
        self._graph = graph
        self._window = window
        self._minibatch = minibatch

    def nodes(self) -> Iterator[Node]:
        for node in self._graph.nodes:
            if node.op == OpName.INPUT:
                continue
            for turn in self._turns(node):
                yield self._repeat(node, self._replica(node, turn))

    def _turns(self, node: Node) -> Sequence[int]:
        """Return which of the replicas that take minibatches in turn get a copy of ``node``; 0 if none take turns."""
        if not node.has("stage"):
            return (0,)
        turns = self._window.turns[node.integer("stage")]
        on_all = node.op in _ON_ALL_REPLICAS and not node.has("micro_batch")
        return range(turns) if on_all else (self._minibatch % turns,)

    def _replica(self, node: Node, turn: int) -> int:
        """Return the replica of the copy of ``node`` for a turn."""
        own: int = node.get("replica", 0)
        return turn * self._window.sharing[node.integer("stage")] + own if node.has("stage") else own

    def _repeat(self, node: Node, replica: int) -> Node:
        attrs = dict(node.attrs)
        if node.has("replica"):
            attrs["replica"] = replica
        if node.has("micro_batch"):
            attrs["micro_batch"] = self._number(node.integer("micro_batch"))
        here = (node.integer("stage"), replica) if node.has("stage") else None
        inputs = tuple(self._value(value, here) for value in node.inputs)
        controls = [Control(self._name(self._graph.node(c.source), here), c.reason) for c in node.controls]
        if node.op == OpName.ACCUMULATE and node.attr("first") and self._minibatch:
            place = at(node.integer("stage"), replica, what=OpName.GRADIENTS)
            reason = "accumulate: the sums of the minibatch before have been read"
            controls.append(Control(of_minibatch(self._minibatch - 1, place), reason))
        name = self._name(node, (node.integer("stage"), replica) if node.has("stage") else None)
        return dataclasses.replace(node, name=name, inputs=inputs, attrs=attributes(attrs), controls=tuple(controls))

    def _number(self, micro_batch: int) -> int:
        return self._minibatch * self._window.micro_batches + micro_batch

    def _value(self, value: Value, here: tuple[int, int] | None) -> Value:
        source = self._graph.node(value.node)
        if source.op == OpName.INPUT:
            return Value(of_minibatch(self._minibatch, _ROWS), self._graph.inputs.index(value.node))
        return Value(self._name(source, here), value.index)

    def _name(self, node: Node, here: tuple[int, int] | None) -> str:
        """Return the name of the copy of ``node`` that a node on the stage and replica ``here`` takes."""
        name = node.name
        if node.has("stage"):
            stage, turn = node.integer("stage"), self._turns(node)[0]
            if here is not None and here[0] == stage:
                turn = here[1] // self._window.sharing[stage]
            name = of_replica(name, self._replica(node, turn), self._replica(node, 0))
        if not node.has("micro_batch"):
            return of_minibatch(self._minibatch, name)
        number = node.integer("micro_batch")
        return re.sub(rf"/mb{number}(?=/)", f"/mb{self._number(number)}", name)
