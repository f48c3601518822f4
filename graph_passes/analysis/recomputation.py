"""Find the nodes that backward recomputes in each stage, and the values that forward must stash for them.

A *run* is a row of consecutive layers of one stage that are recomputed together; its nodes are the stage's own. Where
backward takes a value of a run, the nodes of the run that lead to it run again. They start from the inputs of the run
(which are stashed, unless they come with the micro-batch) and from the results of nodes that cannot run twice:

- nodes that draw random numbers, write a variable or act on the outside world, and reads of variables that forward
  writes. Their result is stashed, or a smaller value computed from it alone: for dropout the mask and not the draw; for
  a draw from a seed (Keras) the seed;
- shapes and sizes, a few bytes each, so that no tensor is recomputed only for its shape.

Nodes that depend on the batch only through its size (constants, reads of weights) belong to no run: backward repeats
them freely.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from dapple_tf.graph_passes.analysis.layers import SHAPE_OPS, written_variables
from dapple_tf.graph_passes.ir.graph import OTHER, Effect, Function, Graph, TensorType, Value

_UNKNOWN_DIMENSION = 256  # such as a batch; only which of two tensors is smaller matters
_UNKNOWN_BYTES = 2**40


@dataclass(frozen=True)
class Recomputation:
    """The nodes of one stage that each run recomputes, those that backward repeats freely, and forward's stash."""

    runs: tuple[frozenset[str], ...]
    free: frozenset[str]
    stash: tuple[Value, ...]


def find_recomputation(forward: Function, runs: Sequence[Set[str]], written: Set[str] = frozenset()) -> Recomputation:
    """Return the nodes of ``forward`` that backward repeats to recompute ``runs``: the names of each run's nodes.

    ``written``: variables that other functions may write before backward runs; it reads none of them again.
    """
    graph = forward.graph
    old_stash = [v for port, v in forward.results if port.role == "stash"]
    run_of = {name: index for index, run in enumerate(runs) for name in run}
    search = _Search(graph, find_run_once(forward, written), run_of)
    search.stash.update(value for value in old_stash if value.node not in run_of)
    for index in reversed(range(len(runs))):  # later runs first: they may take values of earlier ones
        search.recompute([value for value in old_stash if run_of.get(value.node) == index])
    nodes = [frozenset(n for n in search.repeated if run_of.get(n) == i) - search.free for i in range(len(runs))]
    free = frozenset(search.repeated).difference(*nodes)
    return Recomputation(tuple(nodes), free, tuple(graph.in_order(search.stash)))


def find_run_once(forward: Function, written: Set[str] = frozenset()) -> frozenset[str]:
    """Return the nodes of a forward function that must run once: they have effects, or would give other results again.

    ``written``: see ``find_recomputation``.
    """
    graph = forward.graph
    variables = {
        node: port.name for node, port in zip(graph.inputs, forward.inputs, strict=True) if port.role == "variable"
    }
    written = written | written_variables(graph).keys()
    found = {node.name for node in graph.nodes if node.effect not in (Effect.PURE, Effect.READ)}
    for node in graph.nodes:
        if any(variables.get(value.node) in written for value in node.inputs):
            found.add(node.name)
    return frozenset(found)


class _Search:
    """Searches backwards from the values that backward takes; ``repeated`` and ``stash`` grow.

    ``run_once``: see ``find_run_once``. ``run_of``: the run of each node that is in one. ``constant``: nodes that do
    not depend on the batch. ``free``: nodes that depend on it at most through its size.
    """

    def __init__(self, graph: Graph, run_once: Set[str], run_of: dict[str, int]) -> None:
        self.graph = graph
        self.run_once = run_once
        self.run_of = run_of
        self.inputs = set(graph.inputs)
        self.constant, self.free = self._find_free()
        self.draw_bytes = self._count_draw_bytes()
        self.repeated: set[str] = set()
        self.stash: set[Value] = set()

    def _find_free(self) -> tuple[set[str], set[str]]:
        constant = {name for name in self.inputs if self.graph.node(name).op == "variable"}
        free = set(constant)
        for node in self.graph.nodes:
            if node.name in self.inputs or node.name in self.run_once:
                continue
            sources = {value.node for value in node.inputs}
            if sources <= constant:
                constant.add(node.name)
            if sources <= free or node.op in SHAPE_OPS:
                free.add(node.name)
        return constant, free

    def _count_draw_bytes(self) -> dict[str, int]:
        """Return the bytes to stash for each node that runs once, or depends only on such nodes and on free ones."""
        found: dict[str, int] = {}
        for node in self.graph.nodes:
            own = sum(map(_bytes, node.outputs))
            sources = {value.node for value in node.inputs} - self.free
            if node.name in self.run_once:
                found[node.name] = own
            elif sources and sources <= found.keys():
                found[node.name] = min(own, sum(found[name] for name in sources))
        return found

    def recompute(self, values: Sequence[Value]) -> None:
        """Add what recomputes ``values`` to ``repeated``, and to ``stash`` the values that cannot be recomputed."""
        pending = list(values)
        while pending:
            value = pending.pop()
            name = value.node
            if value in self.stash or name in self.repeated or name in self.inputs:
                continue
            node = self.graph.node(name)
            if name in self.free:
                repeat = name in self.constant or node.op not in SHAPE_OPS
            else:
                repeat = name in self.run_of and not self._is_stashed(name)
            if not repeat:
                self.stash.add(value)
                continue
            self.repeated.add(name)
            for source in node.inputs:
                enters_run = source.node not in self.free and self.run_of.get(source.node) != self.run_of.get(name)
                if enters_run and source.node not in self.inputs:
                    self.stash.add(source)
                pending.append(source)

    def _is_stashed(self, name: str) -> bool:
        """Return whether this node's result is stashed: it runs once, or is no larger than the draws it comes from."""
        if name in self.run_once:
            return True
        return name in self.draw_bytes and sum(map(_bytes, self.graph.node(name).outputs)) <= self.draw_bytes[name]


def _bytes(kind: TensorType) -> int:
    """Return the bytes of a tensor, with guesses for what is unknown."""
    if kind.shape.dims is None:
        return _UNKNOWN_BYTES
    lengths = [_UNKNOWN_DIMENSION if dim in (None, OTHER) else dim for dim in kind.shape.dims]
    total = kind.dtype.size
    for length in lengths:
        total *= length or 0
    return total
