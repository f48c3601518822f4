"""Prove, before any rank runs, that the graphs of all ranks fit together and cannot deadlock.

A rank may run several stages, and two ranks may share several boundaries. The edges of a rank's graph order its calls,
and each exchange and each sum has a name of its own by which ranks match it. So ranks need not start them in one order:
it is enough that none waits for itself through others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import networkx as nx

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph, Node, TensorType, ancestors
from dapple_tf.graph_passes.ir.names import is_collective, nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.project import OPS_WITH_TOKEN
from dapple_tf.graph_passes.passes.verify_pipeline import verify_commits


def verify_ranks(graphs: Sequence[Graph]) -> None:
    """Check the projected graphs of ranks 0, 1, ... against each other.

    Raises GraphError, which names the collective and the ranks, if a rank lacks a collective or has it with other
    ranks, shapes or dtypes than the others, if TensorFlow could leave a collective out, if variables could change
    before state is merged, or if ranks wait for each other in a cycle.
    """
    collectives: dict[str, dict[int, Node]] = {}
    for rank, graph in enumerate(graphs):
        _check_tokens(rank, graph)
        _check_merges(rank, graph)
        verify_commits(graph)
        for node in collectives_of(graph):
            collectives.setdefault(node.name, {})[rank] = node
    for name, nodes in collectives.items():
        _check_ranks(name, nodes)
        _check_ops(name, nodes)
        if next(iter(nodes.values())).op == OpName.EXCHANGE:
            _check_exchange(name, graphs, nodes)
        else:
            _check_equal_types(name, nodes)
    _check_no_deadlock(graphs)


def collectives_of(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a rank's graph that communicate with other ranks."""
    return filter(is_collective, graph.nodes)


def _check_tokens(rank: int, graph: Graph) -> None:
    """Check that the outputs take each token: TensorFlow drops ops without used results, and other ranks would wait."""
    taken = {value for output in graph.outputs for value in graph.node(output.node).inputs}
    for node in collectives_of(graph):
        if node.op in OPS_WITH_TOKEN and node.values()[-1] not in taken:
            raise GraphError(f"{node.name!r} on rank {rank}: no output of the graph takes its token")


def _check_merges(rank: int, graph: Graph) -> None:
    """Check that state is merged before the barrier and written after it: no variable changes if a merge fails."""
    merges, barriers, commits = (
        [node.name for node in nodes_of(graph, op)] for op in (OpName.MERGE_STATE, OpName.BARRIER, OpName.COMMIT)
    )
    if not merges or not barriers:
        return
    for first, then in (*itertools.product(merges, barriers), *itertools.product(barriers, commits)):
        if first not in ancestors(graph, [then]):
            raise GraphError(f"no path orders {then!r} after {first!r} on rank {rank}: a failure may leave half a step")


def _check_ranks(name: str, nodes: dict[int, Node]) -> None:
    for rank, node in nodes.items():
        if node.integers("ranks") != tuple(sorted(nodes)):
            waits = list(node.integers("ranks"))
            raise GraphError(f"{name!r} on rank {rank} waits for ranks {waits}, but is on ranks {sorted(nodes)}")


def _check_ops(name: str, nodes: dict[int, Node]) -> None:
    first = min(nodes)
    for rank, node in nodes.items():
        if node.op != nodes[first].op:
            raise GraphError(f"{name!r} is {nodes[first].op!r} on rank {first}, but {node.op!r} on rank {rank}")


def _check_exchange(name: str, graphs: Sequence[Graph], nodes: dict[int, Node]) -> None:
    for key in ("dtypes", "header"):
        if len({node.attr(key) for node in nodes.values()}) > 1:
            raise GraphError(f"{name!r} differs in {key!r} between ranks {sorted(nodes)}")
    for source, to in itertools.permutations(nodes, 2):
        sent = _sent(graphs[source], nodes[source], to)
        received = [
            kind for kind, rank in zip(nodes[to].outputs, nodes[to].integers("source"), strict=False) if rank == source
        ]
        if sent != received:
            raise GraphError(
                f"{name!r}: rank {source} sends {_print(sent)} to rank {to}, which expects {_print(received)}"
            )


def _sent(graph: Graph, node: Node, to: int) -> list[TensorType]:
    pairs = zip(node.inputs, node.integers("to"), strict=True)
    return [graph.type_of(value) for value, rank in pairs if rank == to]


def _check_equal_types(name: str, nodes: dict[int, Node]) -> None:
    kinds = {rank: node.outputs for rank, node in nodes.items()}
    first = min(kinds)
    for rank, outputs in kinds.items():
        if outputs != kinds[first]:
            raise GraphError(
                f"{name!r} gives {_print(kinds[first])} on rank {first}, but {_print(outputs)} on rank {rank}"
            )


def _check_no_deadlock(graphs: Sequence[Graph]) -> None:
    """Check that no rank waits for itself through others: a collective is one event of all its ranks."""
    order: nx.DiGraph[str] = nx.DiGraph()
    for rank, graph in enumerate(graphs):
        shared = {node.name for node in collectives_of(graph)}
        for node in graph.nodes:
            here = node.name if node.name in shared else f"rank {rank}: {node.name}"
            order.add_node(here)
            for source in node.predecessors():
                order.add_edge(source if source in shared else f"rank {rank}: {source}", here)
    if not nx.is_directed_acyclic_graph(order):
        cycle = [source for source, _ in nx.find_cycle(order)]
        raise GraphError("the ranks would deadlock, each waiting for another: " + " -> ".join([*cycle, cycle[0]]))


def _print(kinds: Sequence[TensorType]) -> str:
    return "[" + ", ".join(f"{kind.dtype.name}{list(kind.shape.dims or ())}" for kind in kinds) + "]"
