"""Replicate stages, and put split and concat between neighbours of different counts (DAPPLE, V.A.2, Fig. 9).

Replica i of r holds samples [n i / r, n (i+1) / r) of a micro-batch of n. Two replicas exchange the rows that
their intervals share: neighbours with equal counts are wired one to one and get no extra nodes.

What does not depend on the batch is *shared*: every replica has it alike, so a receiver takes it whole from the first
that overlaps. Its gradient goes back to that one alone, which adds what comes from several; where none comes, it is
zeros. The producers' gradients are summed by AllReduce in any case, so each part counts once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

from graph_passes.analysis.layers import batch_axis
from graph_passes.errors import PartitionError
from graph_passes.ir.graph import Attr, Graph, Node, Value, attributes, topological
from graph_passes.ir.names import at, micro_batch_count, replica_counts


@dataclass(frozen=True)
class SplitConcat:
    """Give stage s ``replicas[s]`` replicas; ``shared`` names the boundary tensors that all replicas have alike."""

    replicas: tuple[int, ...]
    shared: frozenset[str] = frozenset()
    name: str = "split_concat"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return replicate(graph, self.replicas, self.shared)


def overlaps(i: int, r: int, q: int) -> tuple[int, ...]:
    """The replicas j of q that share samples with replica i of r.

    The integer bounds floor(n i / r) are monotone in i / r, so fractions that do not overlap share no row.
    """
    low, high = Fraction(i, r), Fraction(i + 1, r)
    return tuple(j for j in range(q) if Fraction(j, q) < high and low < Fraction(j + 1, q))


def replicate(graph: Graph, replicas: Sequence[int], shared: Set[str] = frozenset()) -> Graph:
    """The graph with every stage's nodes once per replica, and exchanges where counts differ; see ``SplitConcat``.

    Raises PartitionError where a tensor without a batch axis would have to be split.
    """
    stages = len(replica_counts(graph))
    if len(replicas) != stages or min(replicas) < 1:
        raise PartitionError(f"replicas {tuple(replicas)} do not give each of {stages} stages at least one device")
    micro_batches = micro_batch_count(graph)
    exchanges = _Exchanges(graph, tuple(replicas), shared, micro_batches)
    nodes: list[Node] = []
    for node in graph.nodes:
        if not node.has("stage"):
            nodes.append(_merge_all(node, graph, replicas) if node.op == "merge" else node)
            continue
        stage = node.integer("stage")
        for replica in range(replicas[stage]):
            inputs = tuple(exchanges.source(node, value, replica) for value in node.inputs)
            copy = dataclasses.replace(node, name=_rename(node.name, replica), inputs=inputs)
            copy = copy.with_attrs(replica=replica)
            if node.op == "slice":
                copy = copy.with_attrs(replicas=replicas[stage])
            nodes.append(copy)
    return graph.replace(nodes=topological([*nodes, *exchanges.nodes.values()]))


def _rename(name: str, replica: int) -> str:
    return name.replace("/replica0/", f"/replica{replica}/")


def _merge_all(node: Node, graph: Graph, replicas: Sequence[int]) -> Node:
    """Loss and aux gather (value, weight) pairs of every replica, in sample order."""
    inputs: list[Value] = []
    for value, weight in zip(node.inputs[::2], node.inputs[1::2], strict=True):
        for replica in range(replicas[graph.node(value.node).integer("stage")]):
            inputs += [Value(_rename(v.node, replica), v.index) for v in (value, weight)]
    return dataclasses.replace(node, inputs=tuple(inputs))


class _Exchanges:
    """Makes split, concat and add nodes on demand, one of each for all tensors of a boundary."""

    def __init__(self, graph: Graph, replicas: tuple[int, ...], shared: Set[str], micro_batches: int) -> None:
        self.graph = graph
        self.replicas = replicas
        self.shared = shared
        self.micro_batches = micro_batches
        self.nodes: dict[str, Node] = {}
        self._crosses: dict[tuple[str, int, bool], list[Value]] = {}

    def source(self, node: Node, value: Value, replica: int) -> Value:
        """Where replica ``replica`` of ``node`` takes ``value`` from."""
        producer = self.graph.node(value.node)
        if not producer.has("stage"):
            return value
        here, there = node.integer("stage"), producer.integer("stage")
        if here == there or self.replicas[here] == self.replicas[there]:
            return Value(_rename(value.node, replica), value.index)
        if not self._is_shared(value):
            return self._exchange(producer, value, here, replica)
        if producer.op == "backward":
            return self._add(producer, value, here, replica)
        first = overlaps(replica, self.replicas[here], self.replicas[there])[0]
        return Value(_rename(value.node, first), value.index)

    def _add(self, producer: Node, value: Value, here: int, replica: int) -> Value:
        """The gradient of a shared ``value``: that of the replicas whose first is ``replica`` of stage ``here``."""
        there, m = producer.integer("stage"), producer.integer("micro_batch")
        r, q = self.replicas[there], self.replicas[here]
        senders = [j for j in range(r) if overlaps(j, r, q)[0] == replica]
        if len(senders) == 1:
            return Value(_rename(value.node, senders[0]), value.index)
        tensors = self._crossing(producer, here, shared=True)
        name = at(here, replica, m, f"add_{producer.op}")
        inputs = tuple(Value(_rename(v.node, j), v.index) for v in tensors for j in senders)
        kinds = tuple(self.graph.type_of(v) for v in tensors)
        attrs: dict[str, Attr] = {"micro_batch": m, "pieces": len(senders), "replica": replica, "stage": here}
        self.nodes[name] = Node(name, "add", inputs, kinds, attributes(attrs))
        return Value(name, tensors.index(value))

    def _exchange(self, producer: Node, value: Value, here: int, replica: int) -> Value:
        tensors = self._crossing(producer, here, shared=False)
        place = tensors.index(value)
        there, m = producer.integer("stage"), producer.integer("micro_batch")
        counts = self.replicas[there], self.replicas[here]
        pieces = [self._piece(producer, tensors, i, replica, here) for i in overlaps(replica, counts[1], counts[0])]
        if len(pieces) == 1:
            return pieces[0][place]
        name = at(here, replica, m, f"concat_{producer.op}")
        if name not in self.nodes:
            inputs = tuple(piece[k] for k in range(len(tensors)) for piece in pieces)
            attrs: dict[str, Attr] = {
                "axes": tuple(self._axis(v) for v in tensors),
                "micro_batch": m,
                "pieces": len(pieces),
                "replica": replica,
                "stage": here,
            }
            kinds = tuple(self.graph.type_of(v) for v in tensors)
            self.nodes[name] = Node(name, "concat", inputs, kinds, attributes(attrs))
        return Value(name, place)

    def _piece(self, producer: Node, tensors: Sequence[Value], i: int, replica: int, here: int) -> tuple[Value, ...]:
        """What replica i of the producer sends to ``replica`` of stage ``here``: one value a tensor."""
        there, m = producer.integer("stage"), producer.integer("micro_batch")
        r, q = self.replicas[there], self.replicas[here]
        receivers = overlaps(i, r, q)
        whole = tuple(Value(_rename(v.node, i), v.index) for v in tensors)
        if len(receivers) == 1:
            return whole
        name = at(there, i, m, f"split_{producer.op}")
        if name not in self.nodes:
            attrs: dict[str, Attr] = {
                "axes": tuple(self._axis(v) for v in tensors),
                "micro_batch": m,
                "micro_batches": self.micro_batches,
                "receivers": receivers,
                "of": q,
                "replica": i,
                "replicas": r,
                "stage": there,
            }
            kinds = tuple(self.graph.type_of(v) for v in tensors for _ in receivers)
            self.nodes[name] = Node(name, "split", (Value("batch/size"), *whole), kinds, attributes(attrs))
        position = receivers.index(replica)
        return tuple(Value(name, k * len(receivers) + position) for k in range(len(tensors)))

    def _crossing(self, producer: Node, here: int, *, shared: bool) -> list[Value]:
        """The outputs of ``producer`` that stage ``here`` takes, in order: those that are shared, or the others."""
        key = producer.name, here, shared
        if key not in self._crosses:
            found = {
                value
                for node in self.graph.nodes
                if node.has("stage") and node.integer("stage") == here
                for value in node.inputs
                if value.node == producer.name
            }
            self._crosses[key] = sorted(value for value in found if self._is_shared(value) == shared)
        return self._crosses[key]

    def _is_shared(self, value: Value) -> bool:
        producer = self.graph.node(value.node)
        if not producer.has("function"):
            return False
        port = self.graph.function(producer.string("function")).outputs[value.index]
        return port.role in ("boundary", "gradient") and port.name in self.shared

    def _axis(self, value: Value) -> int:
        axis = batch_axis(self.graph.type_of(value))
        if axis is None:
            producer = self.graph.node(value.node)
            port = self.graph.function(producer.string("function")).outputs[value.index]
            stage = producer.integer("stage")
            raise PartitionError(
                f"{port.name} crosses between stage {stage} and its neighbour, whose replica counts differ "
                f"({self.replicas}), but it has no single batch axis to split "
                f"(its shape is {port.type.shape.dims}): cut elsewhere, or give both stages equal replicas"
            )
        return axis
