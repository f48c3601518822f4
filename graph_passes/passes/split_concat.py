"""Replicate stages; split and concatenate tensors between different replica counts (DAPPLE, section V.A.2, Fig. 9).

Replica i of r has the samples [n i / r, n (i+1) / r) of a micro-batch of n; where replicas have unequal shares, those
between two of its cut points (``analysis.row_bounds``). Replicas of neighbouring stages exchange the rows that both
have. With equal counts and shares each replica is connected to one other, without extra nodes.

A boundary tensor that does not depend on the batch is *shared*: all replicas have the same value, so a receiver takes
it whole from the first replica that has samples in common with it. The gradient of the tensor goes back to that replica
alone, which adds those of several receivers, and takes zeros where it gets none. AllReduce sums the gradients over the
sending replicas, so each part counts once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import batch_axis
from dapple_tf.graph_passes.analysis.row_bounds import cut_points
from dapple_tf.graph_passes.ir.graph import Control, Graph, Node, Value, make_node, topological
from dapple_tf.graph_passes.ir.names import (
    BACKWARD_OPS,
    BATCH_SIZE_NAME,
    Site,
    at,
    cut_attributes,
    of_replica,
    replica_counts,
    share_attributes,
    without_target,
)
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.batch_loss import LOSS_HEAD_OPS, piece_of_replica, replicate_loss_head
from dapple_tf.wording import format_count

_ADDED = frozenset({OpName.SPLIT, OpName.CONCAT, OpName.ADD})


@dataclass(frozen=True)
class SplitConcat(BuiltInPass):
    """Give stage s ``replicas[s]`` replicas; ``shared`` names the boundary tensors that do not depend on the batch.

    ``shares[s]``: how many rows each replica of stage s takes, as whole numbers in this proportion; empty where all
    take equally many. Without ``shares`` the replicas of each stage take equally many.
    """

    replicas: tuple[int, ...]
    shared: frozenset[str] = frozenset()
    shares: tuple[tuple[int, ...], ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.BATCH_SIZE, OpName.FORWARD}),
        forbids=_ADDED | {OpName.REFRESH, OpName.COMMIT, OpName.ACCUMULATE, OpName.GRADIENTS, OpName.GATHER_SLICES},
        may_produce=_ADDED,
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with the nodes of each stage once for each of its replicas, connected as the module says.

        Raises PartitionError if a stage gets no replica, or has several already, if shares are not one above 0 for each
        replica, or if a tensor without a batch axis would have to be split.
        """
        counts = replica_counts(graph)
        if max(counts) > 1:
            raise PartitionError(
                f"the stages have {counts} replicas already: replicate a graph with one replica a stage"
            )
        stages = len(counts)
        if len(self.replicas) != stages or min(self.replicas) < 1:
            raise PartitionError(f"replicas {self.replicas} do not give each of {stages} stages at least one device")
        shares = self.shares or ((),) * stages
        for stage, (count, own) in enumerate(zip(self.replicas, shares, strict=True)):
            if own and (len(own) != count or min(own) < 1):
                raise PartitionError(
                    f"stage {stage} has {format_count(count, 'replica')}, and the shares {own}: give one above 0 for "
                    "each"
                )
        boundaries = _Boundaries(graph, self.replicas, self.shared, shares)
        nodes: list[Node] = []
        for node in graph.nodes:
            if not node.has("stage"):
                nodes.append(_merge_all(node, graph, self.replicas) if node.op == OpName.MERGE else node)
                continue
            stage = node.integer("stage")
            if node.op in LOSS_HEAD_OPS:
                nodes.append(replicate_loss_head(node, self.replicas[stage]))
                continue
            for replica in range(self.replicas[stage]):
                inputs = tuple(boundaries.source(node, value, replica) for value in node.inputs)
                controls = tuple(_own_control(graph, stage, control, replica) for control in node.controls)
                copy = dataclasses.replace(node, name=of_replica(node.name, replica), inputs=inputs, controls=controls)
                copy = copy.with_attrs(replica=replica)
                if node.op in (OpName.SLICE, OpName.ROW_BOUNDS):
                    copy = copy.with_attrs(replicas=self.replicas[stage])
                if node.op in (OpName.SLICE, OpName.ROW_BOUNDS, OpName.FORWARD):
                    copy = copy.with_attrs(**share_attributes(shares[stage]))
                nodes.append(copy)
        return graph.replace(nodes=topological([*nodes, *boundaries.nodes.values()]))


def overlaps(i: int, points: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    """Return the replicas of another stage that have samples in common with replica ``i`` of a stage.

    ``points``: the cut points of the replicas of the stage; ``others``: those of the other stage. The bounds floor(n p
    / p_r) are monotone in p / p_r, so fractions that do not overlap have no row in common.
    """
    low, high = Fraction(points[i], points[-1]), Fraction(points[i + 1], points[-1])
    bounds = [Fraction(point, others[-1]) for point in others]
    return tuple(j for j, (first, end) in enumerate(itertools.pairwise(bounds)) if first < high and low < end)


def _own_control(graph: Graph, stage: int, control: Control, replica: int) -> Control:
    """Return the control edge for ``replica`` of ``stage``: an edge inside of the stage stays on this replica."""
    source = graph.node(control.source)
    if source.get("stage") != stage:
        return control
    return dataclasses.replace(control, source=of_replica(control.source, replica))


def _merge_all(node: Node, graph: Graph, replicas: Sequence[int]) -> Node:
    """Return the merge of the (value, share of the samples) pairs of all replicas, in sample order."""
    if len(node.inputs) == 1:  # an output of the loss head, which runs on one replica
        return node
    inputs: list[Value] = []
    for value, share in zip(node.inputs[::2], node.inputs[1::2], strict=True):
        for replica in range(replicas[graph.node(value.node).integer("stage")]):
            inputs += [Value(of_replica(v.node, replica), v.index) for v in (value, share)]
    return dataclasses.replace(node, inputs=tuple(inputs))


class _Boundaries:
    """Connects the replicas of neighbouring stages.

    ``nodes``: the split, concat and add nodes, made when a replica first needs them, one for all tensors of a boundary.
    """

    def __init__(
        self, graph: Graph, replicas: tuple[int, ...], shared: Set[str], shares: Sequence[tuple[int, ...]]
    ) -> None:
        self.graph = graph
        self.replicas = replicas
        self.shares = shares
        self.points = [cut_points(count, own) for count, own in zip(replicas, shares, strict=True)]
        self.shared = shared
        self.cut = cut_attributes(graph)
        self.nodes: dict[str, Node] = {}
        self._crossing: dict[tuple[str, int, bool], list[Value]] = {}

    def source(self, node: Node, value: Value, replica: int) -> Value:
        """Return what replica ``replica`` of ``node`` takes as ``value``."""
        producer = self.graph.node(value.node)
        if not producer.has("stage"):
            return value
        here, there = node.integer("stage"), producer.integer("stage")
        if producer.op == OpName.CUT_ROWS:
            return piece_of_replica(value, replica, self.replicas[here])
        if here == there or tuple(self.points[here]) == tuple(self.points[there]):
            return Value(of_replica(value.node, replica), value.index)
        if not self._is_shared(value):
            return self._concat(producer, value, here, replica)
        if producer.op in BACKWARD_OPS:
            return self._add(producer, value, here, replica)
        first = overlaps(replica, self.points[here], self.points[there])[0]
        return Value(of_replica(value.node, first), value.index)

    def _add(self, producer: Node, value: Value, here: int, replica: int) -> Value:
        """Return the gradient of a shared ``value`` for ``replica`` of stage ``here``.

        It is the sum over the replicas of the producer that took the value from ``replica``.
        """
        there, m = producer.integer("stage"), producer.integer("micro_batch")
        points = self.points[there], self.points[here]
        senders = [j for j in range(self.replicas[there]) if overlaps(j, *points)[0] == replica]
        if len(senders) == 1:
            return Value(of_replica(value.node, senders[0]), value.index)
        tensors = self._crossing_tensors(producer, here, shared=True)
        name = at(here, replica, m, f"add_{producer.op}")
        inputs = tuple(Value(of_replica(v.node, j), v.index) for v in tensors for j in senders)
        kinds = tuple(self.graph.type_of(v) for v in tensors)
        place = Site(here, replica).attrs
        self.nodes[name] = make_node(name, OpName.ADD, inputs, kinds, **place, micro_batch=m, pieces=len(senders))
        return Value(name, tensors.index(value))

    def _concat(self, producer: Node, value: Value, here: int, replica: int) -> Value:
        """Return the rows of ``value`` that ``replica`` of stage ``here`` takes, from one or several replicas."""
        tensors = self._crossing_tensors(producer, here, shared=False)
        place = tensors.index(value)
        there, m = producer.integer("stage"), producer.integer("micro_batch")
        senders = overlaps(replica, self.points[here], self.points[there])
        pieces = [self._split(producer, tensors, i, replica, here) for i in senders]
        if len(pieces) == 1:
            return pieces[0][place]
        name = at(here, replica, m, f"concat_{producer.op}")
        if name not in self.nodes:
            self.nodes[name] = make_node(
                name,
                OpName.CONCAT,
                (piece[k] for k in range(len(tensors)) for piece in pieces),
                map(self.graph.type_of, tensors),
                **Site(here, replica).attrs,
                axes=tuple(map(self._axis, tensors)),
                micro_batch=m,
                pieces=len(pieces),
            )
        return Value(name, place)

    def _split(self, producer: Node, tensors: Sequence[Value], i: int, replica: int, here: int) -> tuple[Value, ...]:
        """Return the rows of ``tensors`` that replica i of the producer sends to ``replica`` of stage ``here``."""
        there, m = producer.integer("stage"), producer.integer("micro_batch")
        receivers = overlaps(i, self.points[there], self.points[here])
        whole = tuple(Value(of_replica(v.node, i), v.index) for v in tensors)
        if len(receivers) == 1:
            return whole
        name = at(there, i, m, f"split_{producer.op}")
        if name not in self.nodes:
            self.nodes[name] = make_node(
                name,
                OpName.SPLIT,
                (Value(BATCH_SIZE_NAME), *whole),
                (self.graph.type_of(v) for v in tensors for _ in receivers),
                **Site(there, i).attrs,
                axes=tuple(map(self._axis, tensors)),
                micro_batch=m,
                **self.cut,
                receivers=receivers,
                of=self.replicas[here],
                **share_attributes(self.shares[here], "of_shares"),
                replicas=self.replicas[there],
                **share_attributes(self.shares[there]),
            )
        position = receivers.index(replica)
        return tuple(Value(name, k * len(receivers) + position) for k in range(len(tensors)))

    def _crossing_tensors(self, producer: Node, here: int, *, shared: bool) -> list[Value]:
        """Return the outputs of ``producer`` that stage ``here`` takes, in order: the shared ones, or the others."""
        key = producer.name, here, shared
        if key not in self._crossing:
            found = {
                value
                for node in self.graph.nodes
                if node.get("stage") == here
                for value in node.inputs
                if value.node == producer.name
            }
            self._crossing[key] = sorted(value for value in found if self._is_shared(value) == shared)
        return self._crossing[key]

    def _is_shared(self, value: Value) -> bool:
        producer = self.graph.node(value.node)
        if not producer.has("function"):
            return False
        port = self.graph.function(producer.string("function")).outputs[value.index]
        return port.role in ("boundary", "gradient") and without_target(port.name) in self.shared

    def _axis(self, value: Value) -> int:
        axis = batch_axis(self.graph.type_of(value))
        if axis is None:
            producer = self.graph.node(value.node)
            port = self.graph.function(producer.string("function")).outputs[value.index]
            stage = producer.integer("stage")
            raise PartitionError(
                f"{port.name} crosses between stage {stage} and its neighbour, whose replica counts differ "
                f"({self.replicas}) or their shares, but it has no single batch axis to split "
                f"(its shape is {port.type.shape.dims}): cut elsewhere, or give both stages equal replicas and shares"
            )
        return axis
