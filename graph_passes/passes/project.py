"""One rank's part of a pipelined graph: its own nodes, and exchanges in place of the edges to and from other ranks.

A rank is one process with one device, which runs one stage or several (those of its worker). Tensors between two stages
of one rank stay there. Nodes without a stage (inputs, loss, barrier, the optimizer's shared steps) run on every rank. A
stage's reduction and update run on each of its ranks, from equal gradients; where its update is sharded, each of its
ranks reduces and updates its own variables.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph, Node, TensorType, Value, make_node, tensor
from dapple_tf.graph_passes.ir.names import (
    MICRO_BATCH,
    find_minibatch,
    find_round,
    of_minibatch,
    of_replica,
    of_round,
    replica_counts,
    site_of,
)
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.send_together import boundary_direction, sent_together

TOKEN = tensor("int64")
TOKENS_NAME = "tokens"
"""The node that collects all tokens of a rank's graph; it is the last output."""

OPS_WITH_TOKEN = frozenset({OpName.EXCHANGE, OpName.ALLREDUCE, OpName.BARRIER})
"""Ops that have a token as their last output on a rank."""

# Ops that run on every rank of a stage, with equal inputs on all, unless the stage's update is sharded.
_OF_UPDATE = frozenset(
    {
        OpName.TIED_SUM,
        OpName.ROUND,
        OpName.REDUCED_GRADIENTS,
        OpName.GATHER_SLICES,
        OpName.DENSIFY,
        OpName.SQUARE_NORM,
        OpName.CLIP,
        OpName.UPDATE_TERMS,
        OpName.UPDATE,
    }
)
# Ops that run on every rank of a stage in any case.
_ON_EVERY_REPLICA = frozenset(
    {OpName.ALLREDUCE, OpName.COUNT_UPDATE, OpName.WRITE_STATISTICS, OpName.COMMIT, OpName.MERGE_STATE}
)
# Sums over the ranks of a stage: each rank passes the values of its own replica.
_REDUCTIONS = frozenset({OpName.ALLREDUCE, OpName.MERGE_STATE})


@dataclass(frozen=True)
class Project(BuiltInPass):
    """Reduce the graph to that of ``rank``; ``ranks[s][r]`` is the rank of replica r of stage s.

    Stages of one worker have the same ranks. ``sharded``: the stages whose update is sharded.
    """

    ranks: tuple[tuple[int, ...], ...]
    rank: int
    sharded: frozenset[int] = frozenset()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.EXCHANGE, OpName.COLLECT_TOKENS, OpName.TIMESTAMP}),
        may_produce=frozenset({OpName.EXCHANGE, OpName.COLLECT_TOKENS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph of ``rank``, from a graph that ``RankVariables`` returned.

        An ``exchange`` has the same name on each rank that takes part in it (``ranks``). Its inputs are the tensors
        that this rank sends (``to``: the receivers), its outputs those that it receives (``source``: the senders), and
        a token. An exchange that is for a single micro-batch has the attribute ``micro_batch``.

        Of the graph's outputs a rank has those that it computes: the loss and the aux, which every rank has, and the
        gradients of its stages (see ``ExposeGradients``). The last output collects the tokens of exchanges, sums and
        barriers, so that TensorFlow leaves out none of them: other ranks may wait for one whose results this rank does
        not need. Raises GraphError unless any two stages have the same ranks, in the same order, or no rank in common.
        """
        _check_ranks(graph, self.ranks)
        placement = _Placement(graph, self.ranks, self.sharded)
        received: dict[Value, Value] = {}
        nodes: list[Node] = []
        for exchange in _find_exchanges(graph, placement).values():
            node = exchange.node_of(self.rank, graph)
            if node is not None:
                nodes.append(node)
                values = [transfer.value for transfer in exchange.received_by(self.rank)]
                received |= dict(zip(values, node.values(), strict=False))
        own = [node for node in graph.nodes if self.rank in placement.ranks_of(node)]
        names = {node.name for node in own}
        nodes += [_on_rank(node, self.rank, placement, names, received) for node in own]
        with_token = [node for node in nodes if node.op in OPS_WITH_TOKEN]
        with_token.sort(key=lambda node: node.get(MICRO_BATCH, math.inf))
        tokens = tuple(node.values()[-1] for node in with_token)
        if tokens:
            nodes.append(Node(TOKENS_NAME, OpName.COLLECT_TOKENS, tokens, (TOKEN,)))
        outputs = tuple(value for value in graph.outputs if value.node in names)
        outputs = (*outputs, Value(TOKENS_NAME)) if tokens else outputs
        called = {node.string("function") for node in nodes if node.has("function")}
        functions = tuple(function for function in graph.functions if function.name in called)
        return graph.replace(nodes=tuple(nodes), outputs=outputs, functions=functions).sorted()


def _check_ranks(graph: Graph, ranks: Sequence[Sequence[int]]) -> None:
    replicas, rank_counts = replica_counts(graph), tuple(len(stage) for stage in ranks)
    if replicas != rank_counts:
        raise GraphError(f"the stages have {replicas} replicas, but there are {rank_counts} ranks for them")
    # If stages of one worker were on different ranks, the control edges that order their calls would be lost.
    all_ranks = sorted(rank for worker in {tuple(stage) for stage in ranks} for rank in worker)
    if all_ranks != list(range(len(all_ranks))):
        raise GraphError(
            f"the stages are on ranks {[list(s) for s in ranks]}: use all ranks from 0 on, each for the replicas of "
            "one stage, or of several stages whose ranks are the same, in the same order"
        )


@dataclass(frozen=True)
class _Placement:
    """The ranks on which each node runs."""

    graph: Graph
    ranks: Sequence[Sequence[int]]
    sharded: Set[int]

    def ranks_of(self, node: Node) -> tuple[int, ...]:
        if not node.has("stage"):
            return self.every_rank
        stage, replica = site_of(node)
        shared = node.op in _ON_EVERY_REPLICA or (node.op in _OF_UPDATE and stage not in self.sharded)
        return tuple(self.ranks[stage]) if shared else (self.ranks[stage][replica],)

    @cached_property
    def every_rank(self) -> tuple[int, ...]:
        return tuple(sorted({rank for stage in self.ranks for rank in stage}))

    def inputs(self, node: Node, rank: int) -> tuple[Value, ...]:
        """Return the inputs of ``node`` on ``rank``: for a sum over replicas, only those of its own replica."""
        if node.op not in _REDUCTIONS:
            return node.inputs
        return tuple(value for value in node.inputs if rank in self.ranks_of(self.graph.node(value.node)))


@dataclass(frozen=True)
class _Transfer:
    """A value that the rank ``source`` has and the rank ``to`` needs."""

    value: Value
    source: int
    to: int


@dataclass
class _Exchange:
    name: str
    transfers: list[_Transfer] = field(default_factory=list)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for transfer in self.transfers for rank in (transfer.source, transfer.to)}))

    def sent_by(self, rank: int) -> list[_Transfer]:
        """Return what ``rank`` sends, by receiver; between two ranks the order is that of the transfers."""
        return sorted((t for t in self.transfers if t.source == rank), key=lambda transfer: transfer.to)

    def received_by(self, rank: int) -> list[_Transfer]:
        """Return what ``rank`` receives, by sender."""
        return sorted((t for t in self.transfers if t.to == rank), key=lambda transfer: transfer.source)

    def node_of(self, rank: int, graph: Graph) -> Node | None:
        """Return the node of the exchange on ``rank``, or None if the rank takes no part in it."""
        if rank not in self.ranks:
            return None
        sent, received = self.sent_by(rank), self.received_by(rank)
        types = [graph.type_of(transfer.value) for transfer in self.transfers]
        node = make_node(
            self.name,
            OpName.EXCHANGE,
            (transfer.value for transfer in sent),
            (*(graph.type_of(transfer.value) for transfer in received), TOKEN),
            dtypes=tuple(dict.fromkeys(kind.dtype.name for kind in types)),
            header=self._needs_header(graph),
            ranks=self.ranks,
            source=tuple(transfer.source for transfer in received),
            to=tuple(transfer.to for transfer in sent),
        )
        match = re.search(r"/mb(\d+)/", self.name)
        return node if match is None else node.with_attrs(**{MICRO_BATCH: int(match[1])})

    def _needs_header(self, graph: Graph) -> bool:
        """Return whether the shapes must be sent, since receivers cannot compute them from the number of elements.

        They cannot where the tensors of one dtype between two ranks have more than one unknown dimension, or where a
        tensor with an unknown dimension is empty.
        """
        unknown: dict[tuple[int, int, str], int] = {}
        for transfer in self.transfers:
            kind = graph.type_of(transfer.value)
            key = (transfer.source, transfer.to, kind.dtype.name)
            dims = _unknown_dims(kind)
            if dims and kind.shape.elements() == 0:
                return True
            unknown[key] = unknown.get(key, 0) + dims
        return max(unknown.values()) > 1


def _unknown_dims(kind: TensorType) -> int:
    if kind.shape.dims is None:
        raise GraphError(
            "a tensor with an unknown number of axes would have to be sent between ranks: give it a shape "
            "(tf.ensure_shape)"
        )
    return sum(1 for dim in kind.shape.dims if dim is None or dim < 0)


def _find_exchanges(graph: Graph, placement: _Placement) -> dict[str, _Exchange]:
    """Return all exchanges of all ranks, by name."""
    found: dict[str, _Exchange] = {}
    known: set[tuple[str, _Transfer]] = set()
    for node in graph.nodes:
        for transfer in _transfers(node, placement):
            name = _exchange_name(graph, node, transfer.value)
            if (name, transfer) not in known:
                known.add((name, transfer))
                found.setdefault(name, _Exchange(name)).transfers.append(transfer)
    return found


def _transfers(node: Node, placement: _Placement) -> Iterator[_Transfer]:
    """Yield a transfer for each input that a rank of ``node`` does not compute itself."""
    for rank in placement.ranks_of(node):
        for value in placement.inputs(node, rank):
            sources = placement.ranks_of(placement.graph.node(value.node))
            if rank not in sources:
                yield _Transfer(value, sources[0], rank)


def _exchange_name(graph: Graph, node: Node, value: Value) -> str:
    """Return the name of the exchange that carries ``value`` to ``node``.

    One exchange carries all tensors that cross a boundary in one direction for one micro-batch, or for those that
    travel together (AutoPipe, section III.C), or all that replicas join after one part of a call. Its name says the
    stages, since several boundaries may be between the same ranks.
    """
    producer = graph.node(value.node)
    if node.op == OpName.JOIN:  # all replicas exchange values with each other
        return f"exchange/{of_replica(node.name, 0, node.integer('replica'))}".replace("/replica0", "")
    direction = boundary_direction(graph, node, value)
    if direction is not None:
        here, there = node.integer("stage"), producer.integer("stage")
        micro_batches = sent_together(graph, producer)
        which = "-".join(map(str, dict.fromkeys((micro_batches[0], micro_batches[-1]))))
        return f"exchange/stage{there}_to_stage{here}/mb{which}/{direction}"
    if node.op == OpName.MERGE:
        return "exchange/returned" if producer.op == OpName.UPDATE else "exchange/outputs"
    if producer.op == OpName.RUN_ONCE:
        return f"exchange/{producer.op}/stage{producer.integer('stage')}"
    minibatch = find_minibatch(node.name)
    name = "exchange" if minibatch is None else of_minibatch(minibatch, "exchange")
    name = f"{of_round(find_round(node.name), name)}/{node.op}" + (
        f"/stage{node.integer('stage')}" if node.has("stage") else ""
    )
    return f"{name}/bucket{node.integer('bucket')}" if node.op == OpName.REDUCE and node.has("bucket") else name


class StageExchange(NamedTuple):
    """An exchange from stage ``source`` to ``target`` of the tensors of micro-batches ``first`` to ``last``."""

    source: int
    target: int
    first: int
    last: int


def parse_exchange_name(name: str) -> StageExchange | None:
    """Return which stages and micro-batches the exchange of this name is for; None if it is not between two stages."""
    match = re.fullmatch(r"exchange/stage(\d+)_to_stage(\d+)/mb(\d+)(?:-(\d+))?/(?:forward|backward)", name)
    if match is None:
        return None
    return StageExchange(int(match[1]), int(match[2]), int(match[3]), int(match[4] or match[3]))


def _on_rank(node: Node, rank: int, placement: _Placement, names: set[str], received: dict[Value, Value]) -> Node:
    """Return ``node`` as it is on ``rank``: inputs from the rank or an exchange, control edges from the rank only."""
    inputs = tuple(value if value.node in names else received[value] for value in placement.inputs(node, rank))
    controls = tuple(control for control in node.controls if control.source in names)
    node = dataclasses.replace(node, inputs=inputs, controls=controls)
    if node.op in OPS_WITH_TOKEN:
        node = dataclasses.replace(node, outputs=(*node.outputs, TOKEN))
    if node.op in _REDUCTIONS or node.op == OpName.BARRIER:
        return node.with_attrs(ranks=tuple(sorted(placement.ranks_of(node))))
    return node
