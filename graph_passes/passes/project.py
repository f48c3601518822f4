"""One rank's share of a pipelined graph: its own nodes, and exchanges in place of the edges that leave or enter it.

A rank is one process with one device. What belongs to no stage (inputs, loss, barrier, the optimizer's own steps) runs
on every rank; a stage's reduction and update run on each of its ranks, from equal gradients.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graph_passes.errors import GraphError
from graph_passes.ir.graph import Attr, Graph, Node, TensorType, Value, attributes, tensor
from graph_passes.ir.names import replica_counts

TOKEN = tensor("int64")
SENT = "sent"
# What each rank of a stage does for itself: all have the same inputs.
_ON_EVERY_REPLICA = frozenset(
    {"allreduce", "tied_sum", "reduced", "square_norm", "clip", "update", "commit", "average"}
)
# Have a token as their last output.
TOKENS = frozenset({"exchange", "allreduce", "barrier"})
# Sums over the ranks of a stage: each puts in what its own replica has.
_COLLECTIVE = frozenset({"allreduce", "average"})


@dataclass(frozen=True)
class Project:
    """``ranks[s][r]`` is the rank of replica r of stage s; the graph becomes that of ``rank``."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int
    name: str = "project"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return project(graph, self.ranks, self.rank)


def project(graph: Graph, ranks: Sequence[Sequence[int]], rank: int) -> Graph:
    """The graph of ``rank``, out of one that ``rank_variables`` made.

    An ``exchange`` stands under one name on every rank that takes part in it: ``ranks``. Its inputs are what this rank
    sends (``to`` says where), its outputs what it receives (``source`` says from where) and at last a token. The
    graph's outputs collect the tokens of exchanges, sums and barriers, so that TensorFlow never leaves one out whose
    results this rank does not need but others wait for. Raises GraphError where ``ranks`` do not
    give each replica of each stage a rank of its own.
    """
    _check(graph, ranks)
    homes = _Homes(graph, ranks)
    exchanges = _find_exchanges(graph, homes)
    received: dict[Value, Value] = {}
    nodes: list[Node] = []
    for exchange in exchanges.values():
        node = exchange.node_of(rank, graph)
        if node is not None:
            nodes.append(node)
            values = [need.value for need in exchange.into(rank)]
            received |= dict(zip(values, node.values(), strict=False))
    own = [node for node in graph.nodes if rank in homes.of(node)]
    names = {node.name for node in own}
    nodes += [_localise(node, rank, homes, names, received) for node in own]
    tokens = tuple(node.values()[-1] for node in nodes if node.op in TOKENS)
    if tokens:
        nodes.append(Node(SENT, "sent", tokens, (TOKEN,)))
    outputs = (*graph.outputs, Value(SENT)) if tokens else graph.outputs
    called = {node.string("function") for node in nodes if node.has("function")}
    functions = tuple(function for function in graph.functions if function.name in called)
    return graph.replace(nodes=tuple(nodes), outputs=outputs, functions=functions).sorted()


def _check(graph: Graph, ranks: Sequence[Sequence[int]]) -> None:
    counts, given = replica_counts(graph), tuple(len(stage) for stage in ranks)
    if counts != given:
        raise GraphError(f"the stages have {counts} replicas, but ranks are given for {given}")
    everybody = sorted(rank for stage in ranks for rank in stage)
    if everybody != list(range(len(everybody))):
        raise GraphError(
            f"the stages are on ranks {[list(s) for s in ranks]}: give each of 0 to {len(everybody) - 1} once"
        )


@dataclass(frozen=True)
class _Homes:
    """On which ranks a node runs."""

    graph: Graph
    ranks: Sequence[Sequence[int]]

    def of(self, node: Node) -> tuple[int, ...]:
        if not node.has("stage"):
            return tuple(sorted(rank for stage in self.ranks for rank in stage))
        stage = self.ranks[node.integer("stage")]
        return tuple(stage) if node.op in _ON_EVERY_REPLICA else (stage[node.integer("replica")],)

    def inputs(self, node: Node, rank: int) -> tuple[Value, ...]:
        """What ``node`` takes where it runs on ``rank``: of a sum over replicas only its own part."""
        if node.op not in _COLLECTIVE:
            return node.inputs
        return tuple(value for value in node.inputs if rank in self.of(self.graph.node(value.node)))


@dataclass(frozen=True)
class _Need:
    """A value that ``source`` has and ``to`` needs."""

    value: Value
    source: int
    to: int


@dataclass
class _Exchange:
    name: str
    needs: list[_Need] = field(default_factory=list)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for need in self.needs for rank in (need.source, need.to)}))

    def out_of(self, rank: int) -> list[_Need]:
        """What ``rank`` sends, by receiver; between two ranks the order is that of the needs."""
        return sorted((need for need in self.needs if need.source == rank), key=lambda need: need.to)

    def into(self, rank: int) -> list[_Need]:
        """What ``rank`` receives, by sender."""
        return sorted((need for need in self.needs if need.to == rank), key=lambda need: need.source)

    def node_of(self, rank: int, graph: Graph) -> Node | None:
        if rank not in self.ranks:
            return None
        sends, receives = self.out_of(rank), self.into(rank)
        types = [graph.type_of(need.value) for need in self.needs]
        attrs: dict[str, Attr] = {
            "dtypes": tuple(dict.fromkeys(kind.dtype.name for kind in types)),
            "header": self._needs_header(graph),
            "ranks": self.ranks,
            "source": tuple(need.source for need in receives),
            "to": tuple(need.to for need in sends),
        }
        outputs = (*(graph.type_of(need.value) for need in receives), TOKEN)
        return Node(self.name, "exchange", tuple(need.value for need in sends), outputs, attributes(attrs))

    def _needs_header(self, graph: Graph) -> bool:
        """Whether receivers cannot tell the shapes: of more than one unknown length between two ranks in one dtype.

        Nor does any number of elements tell the length of an empty tensor.
        """
        unknown: dict[tuple[int, int, str], int] = {}
        for need in self.needs:
            kind = graph.type_of(need.value)
            key = (need.source, need.to, kind.dtype.name)
            lengths = _unknown_lengths(kind)
            if lengths and kind.shape.elements() == 0:
                return True
            unknown[key] = unknown.get(key, 0) + lengths
        return max(unknown.values()) > 1


def _unknown_lengths(kind: TensorType) -> int:
    if kind.shape.dims is None:
        raise GraphError(
            "a tensor of unknown rank would have to travel between ranks: give it a shape (tf.ensure_shape)"
        )
    return sum(1 for dim in kind.shape.dims if dim is None or dim < 0)


def _find_exchanges(graph: Graph, homes: _Homes) -> dict[str, _Exchange]:
    """All exchanges of all ranks, by name."""
    found: dict[str, _Exchange] = {}
    known: set[tuple[str, _Need]] = set()
    for node in graph.nodes:
        for need in _needs(node, homes):
            name = _exchange_name(graph, node, need.value)
            if (name, need) not in known:
                known.add((name, need))
                found.setdefault(name, _Exchange(name)).needs.append(need)
    return found


def _needs(node: Node, homes: _Homes) -> Iterator[_Need]:
    for rank in homes.of(node):
        for value in homes.inputs(node, rank):
            there = homes.of(homes.graph.node(value.node))
            if rank not in there:
                yield _Need(value, there[0], rank)


def _exchange_name(graph: Graph, node: Node, value: Value) -> str:
    """One exchange carries all that crosses a boundary in one direction for one micro-batch."""
    producer = graph.node(value.node)
    if node.has("micro_batch") and producer.has("micro_batch"):
        here, there = node.integer("stage"), producer.integer("stage")
        way = "forward" if there < here else "backward"
        return f"exchange/stage{there}_to_stage{here}/mb{node.integer('micro_batch')}/{way}"
    if node.op == "merge":
        return "exchange/outputs"
    return f"exchange/{node.op}" + (f"/stage{node.integer('stage')}" if node.has("stage") else "")


def parse_exchange_name(exchange: str) -> tuple[int, int, int] | None:
    """The stages that an exchange leads from and to, and its micro-batch, by its name; None where it has none."""
    match = re.fullmatch(r"exchange/stage(\d+)_to_stage(\d+)/mb(\d+)/(?:forward|backward)", exchange)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def _localise(node: Node, rank: int, homes: _Homes, names: set[str], received: dict[Value, Value]) -> Node:
    """The node as it stands on ``rank``: inputs from here or from an exchange, controls from here."""
    inputs = tuple(value if value.node in names else received[value] for value in homes.inputs(node, rank))
    controls = tuple(control for control in node.controls if control.source in names)
    node = dataclasses.replace(node, inputs=inputs, controls=controls)
    if node.op in TOKENS:
        node = dataclasses.replace(node, outputs=(*node.outputs, TOKEN))
    if node.op in _COLLECTIVE or node.op == "barrier":
        return node.with_attrs(ranks=tuple(sorted(homes.of(node))))
    return node
