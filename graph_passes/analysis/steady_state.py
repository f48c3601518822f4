"""Find the steady state of a pipelined step: a round of nodes that repeats, each time one micro-batch later.

Nodes are of one *kind* if they differ only in their micro-batch. In the middle of a step, the node of a kind for
micro-batch m takes its inputs from nodes of certain kinds for micro-batches at a fixed distance from m. This part of
the step is a loop, with the warm-up before it and the drain after it: iteration t runs the node of kind k for
micro-batch t + o_k. The offsets o_k are chosen so that no node takes anything from a later iteration, as in modulo
scheduling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.graph_passes.ir.names import MICRO_BATCH


@dataclass(frozen=True)
class SteadyState:
    """A loop of ``iterations``, the first of which runs the nodes ``body``, in this order.

    ``before`` and ``after``: the nodes that run outside of the loop, in order. ``members``: for each node of the kinds
    in ``body`` its kind, by the name of the kind's node in ``body``, and its iteration. Nodes of iterations below 0 are
    in ``before``.
    """

    before: tuple[Node, ...]
    body: tuple[Node, ...]
    after: tuple[Node, ...]
    iterations: int
    members: Mapping[str, tuple[str, int]]

    def find(self, name: str) -> tuple[str, int] | None:
        """Return the kind and the iteration of a node of the loop; None for a node outside of it."""
        kind, iteration = self.members.get(name, ("", -1))
        return (kind, iteration) if 0 <= iteration < self.iterations else None


@dataclass(frozen=True)
class _Source:
    """An edge to a node: its input number ``place`` is output number ``index`` of another node.

    Both numbers are -1 for a control edge. The other node is of ``kind``, for the micro-batch that is ``distance``
    before the taker's; or, where ``kind`` is None, it is called ``name`` and is the same for all micro-batches.
    """

    place: int
    index: int
    kind: Hashable
    distance: int
    name: str


@dataclass(frozen=True)
class _Kind:
    """The nodes of a kind by micro-batch. From ``first`` to ``last`` they take the same ``sources``."""

    nodes: Mapping[int, Node]
    first: int
    last: int
    sources: Sequence[_Source]

    def __len__(self) -> int:
        return self.last - self.first + 1


def find_steady_state(graph: Graph, kind_of: Callable[[Node], Hashable], fewest: int) -> SteadyState | None:
    """Return the loop of ``graph``, of at least ``fewest`` iterations; None if there is none.

    ``kind_of`` returns what nodes of one kind have in common.
    """
    kinds = _find_kinds(graph, kind_of, fewest)
    if not kinds:
        return None
    edges = {
        (source.kind, kind, source.distance)
        for kind, found in kinds.items()
        for source in found.sources
        if source.kind is not None
    }
    offsets = _find_offsets(list(kinds), edges)
    begin = max(found.first - offsets[kind] for kind, found in kinds.items())
    iterations = min(found.last - offsets[kind] for kind, found in kinds.items()) + 1 - begin
    earlier = [distance + offsets[taken] - offsets[taker] for taken, taker, distance in edges]
    # The longest runs of two kinds may lie apart, and then need not fit one loop.
    if iterations < fewest or not all(0 <= count <= iterations for count in earlier):
        return None
    members = {
        node.name: (found.nodes[begin + offsets[kind]].name, number - begin - offsets[kind])
        for kind, found in kinds.items()
        for number, node in found.nodes.items()
    }
    return _divide(graph, iterations, members)


def _find_kinds(graph: Graph, kind_of: Callable[[Node], Hashable], fewest: int) -> dict[Hashable, _Kind]:
    """Return the kinds that take the same sources for at least ``fewest`` micro-batches one after another."""
    groups: defaultdict[Hashable, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.has(MICRO_BATCH):
            groups[kind_of(node)].append(node)
    numbered = {kind: {node.integer(MICRO_BATCH): node for node in nodes} for kind, nodes in groups.items()}
    numbered = {kind: nodes for kind, nodes in numbered.items() if len(nodes) == len(groups[kind]) >= fewest}
    while True:
        places = {node.name: (kind, number) for kind, nodes in numbered.items() for number, node in nodes.items()}
        kinds = {kind: _longest_run(nodes, places) for kind, nodes in numbered.items()}
        if all(len(found) >= fewest for found in kinds.values()):
            return kinds
        # Without a kind those that take its nodes take other sources for each micro-batch.
        numbered = {kind: nodes for kind, nodes in numbered.items() if len(kinds[kind]) >= fewest}


def _longest_run(nodes: Mapping[int, Node], places: Mapping[str, tuple[Hashable, int]]) -> _Kind:
    sources = {number: tuple(_sources(node, number, places)) for number, node in sorted(nodes.items())}
    runs, begin = [], min(nodes)
    for earlier, number in pairwise(sources):
        if number != earlier + 1 or set(sources[number]) != set(sources[earlier]):
            runs.append((begin, earlier))
            begin = number
    runs.append((begin, max(nodes)))
    first, last = max(runs, key=lambda run: run[1] - run[0])
    return _Kind(nodes, first, last, sources[first])


def _sources(node: Node, number: int, places: Mapping[str, tuple[Hashable, int]]) -> Iterator[_Source]:
    """Yield what the node for micro-batch ``number`` takes."""
    edges = [(place, value.index, value.node) for place, value in enumerate(node.inputs)]
    edges += [(-1, -1, control.source) for control in node.controls]
    for place, index, name in edges:
        if name in places:
            kind, micro_batch = places[name]
            yield _Source(place, index, kind, number - micro_batch, "")
        else:
            yield _Source(place, index, None, 0, name)


_Edges = Set[tuple[Hashable, Hashable, int]]
"""The kind that is taken, the kind that takes it, and how many micro-batches before."""


def _find_offsets(kinds: Sequence[Hashable], edges: _Edges) -> Mapping[Hashable, int]:
    """Return offsets such that no node takes anything from a later iteration, if there are such offsets.

    A node for micro-batch m of kind k takes from kind s for micro-batch m - d: o_k - o_s is at most d. A kind gets the
    highest offset that those before it allow, or else the lowest that those after it allow: it runs in the iteration in
    which its outputs are taken.
    """
    backwards = {(taker, taken, -distance) for taken, taker, distance in edges}
    offsets: dict[Hashable, int] = {}
    for root in kinds:
        if root in offsets:
            continue
        offsets[root] = 0
        known = 0
        while known < len(offsets):
            known = len(offsets)
            _relax(offsets, edges, min, len(kinds))
            _relax(offsets, backwards, max, len(kinds))
    return offsets


def _relax(offsets: dict[Hashable, int], edges: _Edges, choose: Callable[[int, int], int], rounds: int) -> None:
    """Give offsets, which the edges allow, to the kinds that the edges reach from those with ``offsets``.

    An edge (k, n, d) allows n an offset of at most that of k, plus d, if ``choose`` is min, and at least if it is max.
    As many ``rounds`` as there are kinds suffice, where any offsets do (Bellman and Ford).
    """
    fixed = frozenset(offsets)
    for _ in range(rounds):
        for known, kind, distance in edges:
            if known in offsets and kind not in fixed:
                offset = offsets[known] + distance
                offsets[kind] = choose(offset, offsets.get(kind, offset))


def _divide(graph: Graph, iterations: int, members: Mapping[str, tuple[str, int]]) -> SteadyState | None:
    """Return the loop of these members; None where a node outside of it must run both after and before parts of it."""
    state = SteadyState((), (), (), iterations, members)
    before: list[Node] = []
    body: list[Node] = []
    after: list[Node] = []
    later: set[str] = set()  # nodes that run after some node of the loop
    for node in graph.nodes:
        found = state.find(node.name)
        if found is None:
            follows = any(name in later or state.find(name) is not None for name in node.predecessors())
            if follows and members.get(node.name, ("", 0))[1] < 0:
                return None
            (after if follows else before).append(node)
            later |= {node.name} if follows else set()
        elif any(name in later for name in node.predecessors()):
            return None
        elif found[1] == 0:
            body.append(node)
    return SteadyState(tuple(before), tuple(body), tuple(after), iterations, members)
