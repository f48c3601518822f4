"""Find the steady state of a pipelined step: a round of nodes that repeats, each time one micro-batch later.

Nodes are of one *kind* if they differ only in their micro-batch. In the middle of a step, the node of a kind for
micro-batch m takes its inputs from nodes of certain kinds for micro-batches at a fixed distance from m. This part of
the step is a loop, with the warm-up before it and the drain after it: iteration t runs the node of kind k for
micro-batch t + o_k. The offsets o_k are chosen so that no node takes anything from a later iteration, as in modulo
scheduling.

Where a device runs several stages in turn, the order of its calls repeats only after several micro-batches. How many is
the *stride* of the loop: each iteration runs that many micro-batches. With a stride of 4, nodes of one kind for the
micro-batches 0, 4, 8 ... are one kind of the loop, those for 1, 5, 9 ... another one, and m counts in steps of 4.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS, MICRO_BATCH, is_collective, nodes_of
from dapple_tf.graph_passes.ir.ops import OpName


@dataclass(frozen=True)
class SteadyState:
    """A loop of ``iterations``, the first of which runs the nodes ``body``, in this order.

    An iteration runs the same nodes for micro-batches that are ``stride`` later than those of the iteration before.
    ``before`` and ``after``: the nodes that run outside of the loop, in order. ``members``: for each node of the kinds
    in ``body`` its kind, by the name of the kind's node in ``body``, and its iteration. Nodes of iterations below 0 are
    in ``before``.
    """

    before: tuple[Node, ...]
    body: tuple[Node, ...]
    after: tuple[Node, ...]
    iterations: int
    members: Mapping[str, tuple[str, int]]
    stride: int = 1

    @property
    def parallel_iterations(self) -> int:
        """The most iterations that TensorFlow may run at the same time.

        With n of them, iteration t begins once iteration t - n has ended.
        """
        return 4 * len({node.device for node in self.body}) + 8

    def find(self, name: str) -> tuple[str, int] | None:
        """Return the kind and the iteration of a node of the loop; None for a node outside of it."""
        kind, iteration = self.members.get(name, ("", -1))
        return (kind, iteration) if 0 <= iteration < self.iterations else None


class _Source(NamedTuple):
    """An edge to a node: its input number ``place`` is output number ``output`` of another node.

    Both numbers are -1 for a control edge. The other node is of kind ``kind``, and its number is ``distance`` less than
    the number of the node that takes its output. Where ``kind`` is None, the edge comes from the one node ``name``.
    """

    place: int
    output: int
    kind: Hashable
    distance: int
    name: str


@dataclass(frozen=True)
class _Kind:
    """The nodes of a kind by number. From ``first`` to ``last`` they take the same ``sources``."""

    nodes: Mapping[int, Node]
    first: int
    last: int
    sources: Set[_Source]

    def __len__(self) -> int:
        return self.last - self.first + 1


def find_steady_state(graph: Graph, kind_of: Callable[[Node], Hashable], fewest: int) -> SteadyState | None:
    """Return the loop of ``graph``, of at least ``fewest`` iterations; None if there is none.

    ``kind_of`` returns a key that is equal for nodes of one kind. For the graph of a rank, None is also returned if the
    rank could wait for other ranks because of the loop in a place where it does not wait without it.
    """
    numbered = _number(graph, kind_of, fewest)
    stride = _find_stride(numbered)
    kinds = _find_kinds(_divide_numbers(numbered, stride), fewest)
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
    # The longest runs of two kinds may be far apart, and then no loop may contain both.
    if iterations < fewest or not all(0 <= count <= iterations for count in earlier):
        return None
    members = {
        node.name: (found.nodes[begin + offsets[kind]].name, number - begin - offsets[kind])
        for kind, found in kinds.items()
        for number, node in found.nodes.items()
    }
    state = _divide(graph, iterations, members, stride)
    return state if state is not None and _keeps_sends(graph, state) else None


_Numbered = Mapping[Hashable, Mapping[int, Node]]
"""The nodes of each kind by their numbers: those of their micro-batches, divided by the stride."""


def _number(graph: Graph, kind_of: Callable[[Node], Hashable], fewest: int) -> _Numbered:
    """Return the nodes by kind and micro-batch, for kinds of at least ``fewest`` nodes, no two for one micro-batch."""
    groups: defaultdict[Hashable, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.has(MICRO_BATCH):
            groups[kind_of(node)].append(node)
    numbered = {kind: {node.integer(MICRO_BATCH): node for node in nodes} for kind, nodes in groups.items()}
    return {kind: nodes for kind, nodes in numbered.items() if len(nodes) == len(groups[kind]) >= fewest}


_LONGEST_STRIDE = 16


def _find_stride(numbered: _Numbered) -> int:
    """Return after how many micro-batches the sources of all kinds repeat in the middle of the step."""
    places, stride = _find_places(numbered), 1
    for nodes in numbered.values():
        middle = sorted(nodes)[len(nodes) // 4 :][: min(len(nodes) // 2, 3 * _LONGEST_STRIDE)]
        sources = [frozenset(_sources(nodes[number], number, places)) for number in middle]
        lengths = range(1, min(len(sources) // 2, _LONGEST_STRIDE) + 1)
        period = next((n for n in lengths if sources[n:] == sources[:-n]), 1)
        stride = math.lcm(stride, period)
    return stride if stride <= _LONGEST_STRIDE else 1


def _divide_numbers(numbered: _Numbered, stride: int) -> _Numbered:
    if stride == 1:
        return numbered
    divided: defaultdict[Hashable, dict[int, Node]] = defaultdict(dict)
    for kind, nodes in numbered.items():
        for number, node in nodes.items():
            divided[kind, number % stride][number // stride] = node
    return divided


def _find_places(numbered: _Numbered) -> Mapping[str, tuple[Hashable, int]]:
    """Return the kind and the number of each node, by name."""
    return {node.name: (kind, number) for kind, nodes in numbered.items() for number, node in nodes.items()}


def _find_kinds(numbered: _Numbered, fewest: int) -> dict[Hashable, _Kind]:
    """Return the kinds whose nodes take the same sources for at least ``fewest`` consecutive numbers."""
    numbered = {kind: nodes for kind, nodes in numbered.items() if len(nodes) >= fewest}
    while True:
        places = _find_places(numbered)
        kinds = {kind: _longest_run(nodes, places) for kind, nodes in numbered.items()}
        if all(len(found) >= fewest for found in kinds.values()):
            return kinds
        # The nodes of a kind that is left out are different sources for each micro-batch. So kinds that take them may
        # have to be left out in the next round.
        numbered = {kind: nodes for kind, nodes in numbered.items() if len(kinds[kind]) >= fewest}


def _longest_run(nodes: Mapping[int, Node], places: Mapping[str, tuple[Hashable, int]]) -> _Kind:
    sources = {number: frozenset(_sources(node, number, places)) for number, node in sorted(nodes.items())}
    runs, begin = [], min(nodes)
    for earlier, number in pairwise(sources):
        if number != earlier + 1 or sources[number] != sources[earlier]:
            runs.append((begin, earlier))
            begin = number
    runs.append((begin, max(nodes)))
    first, last = max(runs, key=lambda run: run[1] - run[0])
    return _Kind(nodes, first, last, sources[first])


def _sources(node: Node, number: int, places: Mapping[str, tuple[Hashable, int]]) -> Iterator[_Source]:
    """Yield the sources of ``node``; ``number``: the number that it has in its kind."""
    edges = [(place, value.index, value.node) for place, value in enumerate(node.inputs)]
    edges += [(-1, -1, control.source) for control in node.controls]
    for place, index, name in edges:
        if name in places:
            kind, other = places[name]
            yield _Source(place, index, kind, number - other, "")
        else:
            yield _Source(place, index, None, 0, name)


_Edges = Set[tuple[Hashable, Hashable, int]]
"""The kind that is taken, the kind that takes it, and the distance of their numbers."""


def _find_offsets(kinds: Sequence[Hashable], edges: _Edges) -> Mapping[Hashable, int]:
    """Return offsets such that no node takes anything from a later iteration, if there are such offsets.

    Where the node of kind k for micro-batch m takes an output of the node of kind s for micro-batch m - d, o_k - o_s
    must be at most d. A kind gets the highest offset that the kinds which it takes from allow. If none of them has an
    offset yet, it gets the lowest one that the kinds which take from it allow, so that it runs in the iteration in
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
    """Add to ``offsets`` the offsets of the kinds that ``edges`` reach from those that have one already.

    For an edge (k, n, d), the offset of n is at most that of k plus d if ``choose`` is min, and at least that if it is
    max. If offsets exist that satisfy all edges, as many ``rounds`` as there are kinds find them (Bellman and Ford).
    """
    fixed = frozenset(offsets)
    for _ in range(rounds):
        for known, kind, distance in edges:
            if known in offsets and kind not in fixed:
                offset = offsets[known] + distance
                offsets[kind] = choose(offset, offsets.get(kind, offset))


def _divide(graph: Graph, iterations: int, members: Mapping[str, tuple[str, int]], stride: int) -> SteadyState | None:
    """Return the loop of these members; None where a node outside of it must run both after and before parts of it."""
    state = SteadyState((), (), (), iterations, members, stride)
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
    return replace(state, before=tuple(before), body=tuple(body), after=tuple(after))


# --- Check that a loop on a rank cannot make the ranks wait for each other
# ``verify_ranks`` proves that the steps of the ranks end, for graphs without loops. With a loop, nodes wait for further
# nodes (see ``_Waits``). The steps still end if this makes no send wait for a receive for which it would not wait
# anyway. The calls of a rank run one after the other, and are numbered here: a send that follows call i may wait for
# what the calls up to i need.

_NEVER = sys.maxsize


def _keeps_sends(graph: Graph, state: SteadyState) -> bool:
    """Return whether each send comes after a call that needs whatever the send waits for because of the loop."""
    if not any(map(is_collective, graph.nodes)):
        return True
    calls = {node.name: i for i, node in enumerate(nodes_of(graph, OpName.FORWARD, *BACKWARD_OPS))}
    latest: dict[str, int] = {}  # the last call that ends before a node can run, or the node itself
    for node in graph.nodes:
        before = max((latest[name] for name in node.predecessors()), default=-1)
        if calls.get(node.name, before + 1) != before + 1:
            return False  # the graph does not order its calls
        latest[node.name] = calls.get(node.name, before)
    needed_by = dict.fromkeys(latest, _NEVER)  # the first call that a node must precede
    for node in reversed(graph.nodes):
        first = calls.get(node.name, needed_by[node.name])
        for name in node.predecessors():
            needed_by[name] = min(first, needed_by[name])
    waits = _Waits(state, needed_by)
    at = {member: graph.node(name) for name, member in state.members.items()}
    for node in state.before:
        waits.add(node)
    for iteration in range(state.iterations):
        for kind in state.body:
            waits.add(at[kind.name, iteration], iteration)
    for node in state.after:
        waits.add(node, state.iterations)
    return all(waits.by_loop[node.name] <= latest[node.name] for node in graph.nodes if _sends(node))


class _Waits:
    """For each node, the number of the last call that needs a receive for which the node waits; -1 where there is none.

    ``every`` counts all receives for which a node waits, and ``by_loop`` those for which it waits only because of the
    loop. An iteration waits for the end of an earlier iteration. A node with a control edge from a node of the loop
    also waits for the nodes of that kind in all earlier iterations. A node after the loop waits for the last node of
    each kind whose results it takes. ``needed_by``: the first call that a node precedes.
    """

    def __init__(self, state: SteadyState, needed_by: Mapping[str, int]) -> None:
        self._state = state
        self._needed_by = needed_by
        self._of_kinds: defaultdict[str, list[int]] = defaultdict(list)  # by iteration, together with all earlier ones
        self._ended = [-1] * state.iterations  # each iteration, with all earlier ones
        self.every: dict[str, int] = {}
        self.by_loop: dict[str, int] = {}

    def add(self, node: Node, iteration: int = 0) -> None:
        """Add a node, after all nodes that run before it.

        ``iteration``: the iteration of the node; for a node after the loop, the number of iterations.
        """
        state, by_loop = self._state, -1
        ended = iteration - state.parallel_iterations
        taken = [found for name in node.predecessors() if (found := state.find(name)) is not None]
        if iteration == state.iterations:
            ended = ended if taken else -1  # the loop returns its outputs when one more iteration could begin
            by_loop = max((self._of_kinds[kind][-1] for kind, _ in taken), default=-1)
        else:
            waited = (state.find(control.source) for control in node.controls)
            by_loop = max((self._of_kinds[found[0]][found[1]] for found in waited if found), default=-1)
        if ended >= 0:
            by_loop = max(by_loop, self._ended[ended])
        every = by_loop
        for name in node.predecessors():
            by_loop, every = max(by_loop, self.by_loop[name]), max(every, self.every[name])
        if _receives(node):
            every = max(every, self._needed_by[node.name])
        self.by_loop[node.name], self.every[node.name] = by_loop, every
        member = state.find(node.name)
        if member is not None:
            kind, _ = member
            self._of_kinds[kind].append(max([every, *self._of_kinds[kind][-1:]]))
            earlier = self._ended[iteration - 1] if iteration else -1
            self._ended[iteration] = max(every, earlier, self._ended[iteration])


def _sends(node: Node) -> bool:
    return is_collective(node) and (node.op != OpName.EXCHANGE or bool(node.integers("to")))


def _receives(node: Node) -> bool:
    return is_collective(node) and (node.op != OpName.EXCHANGE or bool(node.integers("source")))
