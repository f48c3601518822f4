"""What backward makes again where a stage is re-computed, and what it must be given for that.

A *run* is a row of layers of one stage that are re-computed together; its nodes are the stage's own. Where a value that
backward takes is made by a run, its nodes run again, back to what enters the run (which is stashed, unless it came
with the micro-batch) and to what cannot run twice:

- what draws random numbers, writes a variable or acts on the outside, and reads of what forward writes. Its result is
  stashed, or what is computed from nothing else where that is smaller: of dropout the mask, not the draw; of a draw
  from a seed (Keras) the seed;
- sizes, a few bytes each, which are stashed so that no tensor is made again for its shape alone.

What depends on no sample but through its size (constants, reads of weights) belongs to no run and is repeated freely.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from graph_passes.analysis.layers import SHAPE_OPS, written_variables
from graph_passes.ir.graph import OTHER, Effect, Function, Graph, TensorType, Value

_UNKNOWN_LENGTH = 256  # of a batch, say: only which of two tensors is smaller matters
_UNKNOWN_BYTES = 2**40


@dataclass(frozen=True)
class Recomputation:
    """Of one stage: nodes that each run makes again, nodes all may repeat, and the whole stash of forward."""

    runs: tuple[frozenset[str], ...]
    free: frozenset[str]
    stash: tuple[Value, ...]


def find_recomputation(forward: Function, runs: Sequence[Set[str]]) -> Recomputation:
    """What backward repeats of ``forward`` where the nodes of these ``runs`` (in order) are made again."""
    graph = forward.graph
    kept = [v for port, v in zip(forward.outputs, graph.outputs, strict=True) if port.role == "stash"]
    homes = {name: index for index, run in enumerate(runs) for name in run}
    walk = _Walk(graph, find_run_once(forward), homes)
    walk.stash.update(value for value in kept if value.node not in homes)
    for index in reversed(range(len(runs))):  # a run's turn comes when it is known what later ones take of it
        walk.make([value for value in kept if homes.get(value.node) == index])
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    stash = sorted(walk.stash, key=lambda value: (position[value.node], value.index))
    made = [frozenset(n for n in walk.made if homes.get(n) == i) - walk.light for i in range(len(runs))]
    return Recomputation(tuple(made), frozenset(walk.made).difference(*made), tuple(stash))


def find_run_once(forward: Function) -> frozenset[str]:
    """Nodes of a forward function that may not run a second time, or would give something else if they did."""
    graph = forward.graph
    variables = {
        node: port.name for node, port in zip(graph.inputs, forward.inputs, strict=True) if port.role == "variable"
    }
    written = written_variables(graph)
    found = {node.name for node in graph.nodes if node.effect not in (Effect.PURE, Effect.READ)}
    for node in graph.nodes:
        if any(variables.get(value.node) in written for value in node.inputs):
            found.add(node.name)
    return frozenset(found)


class _Walk:
    """Goes back from what backward takes; ``made`` and ``stash`` grow."""

    def __init__(self, graph: Graph, once: Set[str], homes: dict[str, int]) -> None:
        self.graph = graph
        self.once = once
        self.homes = homes
        self.inputs = set(graph.inputs)
        self.constant, self.light = self._find_light()
        self.drawn: dict[str, int] = self._weigh_draws()
        self.made: set[str] = set()
        self.stash: set[Value] = set()

    def _find_light(self) -> tuple[set[str], set[str]]:
        """Nodes that depend on no sample, and those that do through sizes only (the former among them)."""
        constant = {name for name in self.inputs if self.graph.node(name).op == "variable"}
        light = set(constant)
        for node in self.graph.nodes:
            if node.name in self.inputs or node.name in self.once:
                continue
            sources = {value.node for value in node.inputs}
            if sources <= constant:
                constant.add(node.name)
            if sources <= light or node.op in SHAPE_OPS:
                light.add(node.name)
        return constant, light

    def _weigh_draws(self) -> dict[str, int]:
        """For what is computed from nothing but draws (and the like) and sizes: the bytes to stash for it."""
        weights: dict[str, int] = {}
        for node in self.graph.nodes:
            own = sum(map(_weight, node.outputs))
            sources = {value.node for value in node.inputs} - self.light
            if node.name in self.once:
                weights[node.name] = own
            elif sources and sources <= weights.keys():
                weights[node.name] = min(own, sum(weights[name] for name in sources))
        return weights

    def make(self, values: Sequence[Value]) -> None:
        """Have ``values`` made again, as far as they can be."""
        pending = list(values)
        while pending:
            value = pending.pop()
            name = value.node
            if value in self.stash or name in self.made or name in self.inputs:
                continue
            node = self.graph.node(name)
            if name in self.light:
                again = name in self.constant or node.op not in SHAPE_OPS
            else:
                again = name in self.homes and not self._stops(name)
            if not again:
                self.stash.add(value)
                continue
            self.made.add(name)
            for source in node.inputs:
                apart = source.node not in self.light and self.homes.get(source.node) != self.homes.get(name)
                if apart and source.node not in self.inputs:
                    self.stash.add(source)  # it enters the run
                pending.append(source)

    def _stops(self, name: str) -> bool:
        """Whether it is this node's result that is stashed, for what it was drawn from is no smaller."""
        if name in self.once:
            return True
        return name in self.drawn and sum(map(_weight, self.graph.node(name).outputs)) <= self.drawn[name]


def _weight(kind: TensorType) -> int:
    """Bytes of a tensor, as far as they are known."""
    if kind.shape.dims is None:
        return _UNKNOWN_BYTES
    lengths = [_UNKNOWN_LENGTH if dim in (None, OTHER) else dim for dim in kind.shape.dims]
    total = kind.dtype.size
    for length in lengths:
        total *= length or 0
    return total
