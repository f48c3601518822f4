"""Cut a model's layers into stages (DAPPLE, section V.A: forward stages and their boundary tensors)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from graph_passes.errors import PartitionError
from graph_passes.ir import Effect, Graph, Value
from graph_passes.layers import Layers


@dataclass(frozen=True)
class Stage:
    """One stage: its layers, its own nodes, and the tensors that enter from before and leave to the next.

    A tensor used further down enters and leaves every stage in between: skips are routed through.
    """

    index: int
    first_layer: int
    last_layer: int
    nodes: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class StageGraph:
    """A captured graph and its cut into stages; the graph's first output is the loss, the rest are aux."""

    graph: Graph
    stages: tuple[Stage, ...]
    floating: frozenset[str]

    def stage_of(self, node: str) -> int | None:
        """The stage that holds ``node``, or None for a floating node."""
        return self._homes.get(node)

    @cached_property
    def _homes(self) -> dict[str, int]:
        return {name: stage.index for stage in self.stages for name in stage.nodes}


def partition(layers: Layers, starts: Sequence[int], floating: frozenset[str]) -> StageGraph:
    """Cut before each layer position in ``starts`` (ascending, without 0).

    Raises PartitionError where a cut is out of range, repeated, or impossible (saying why).
    """
    count = len(layers.layers)
    if list(starts) != sorted(set(starts)):
        raise PartitionError(f"stages must start at ascending layers, not {list(starts)}")
    for position in starts:
        if not 0 < position < count:
            raise PartitionError(f"a stage cannot start at layer {position}: the layers are 0 to {count - 1}")
        if problem := layers.cut(position).problem:
            name = layers.layers[position].name
            raise PartitionError(f"no stage can start at layer {name!r}: {problem}{_nearest(layers, position)}")
    bounds = [0, *starts, count]
    stages = []
    for index, (first, end) in enumerate(itertools.pairwise(bounds)):
        nodes = tuple(name for layer in layers.layers[first:end] for name in layer.nodes)
        inputs = layers.cut(first).crossing if first else ()
        outputs = layers.cut(end).crossing if end < count else ()
        stages.append(Stage(index, first, end - 1, nodes, inputs, outputs))
    _check_random(layers.graph, floating)
    return StageGraph(layers.graph, tuple(stages), floating)


def _nearest(layers: Layers, position: int) -> str:
    possible = layers.positions()
    if not possible:
        return ""
    near = sorted(possible, key=lambda p: abs(p - position))[:3]
    return ". Possible nearby: " + ", ".join(repr(layers.layers[p].name) for p in sorted(near))


def _check_random(graph: Graph, floating: frozenset[str]) -> None:
    for name in floating:
        if graph.node(name).effect not in (Effect.PURE, Effect.READ):
            raise PartitionError(f"floating node {name!r} has the effect {graph.node(name).effect!r}")


def balance(costs: Sequence[float], positions: Sequence[int], crossing: Sequence[float], stages: int) -> list[int]:
    """Starts of ``stages`` contiguous stages that minimise the largest stage cost.

    ``costs`` are per layer (any unit), ``positions`` the allowed cuts, ``crossing[i]`` what sending the tensors
    of ``positions[i]`` costs, added to the stage that sends. Equal maxima are decided by the sum of squares.
    Raises PartitionError when there are fewer places than cuts.
    """
    if stages - 1 > len(positions):
        raise PartitionError(
            f"{stages} stages are wanted, but the model can be cut in {len(positions)} places only "
            f"({len(costs)} layers): ask for at most {len(positions) + 1} stages"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    ends = [*positions, len(costs)]
    sending = [*crossing, 0.0]

    def stage(first: int, e: int) -> float:
        return total[ends[e]] - total[first] + sending[e]

    # best[e]: (largest stage cost, sum of squares, starts) of a cut of the layers before ends[e] into k stages
    best: list[tuple[float, float, tuple[int, ...]] | None] = []
    for e in range(len(ends)):
        best.append((stage(0, e), stage(0, e) ** 2, ()))
    for _ in range(stages - 1):
        following: list[tuple[float, float, tuple[int, ...]] | None] = []
        for e in range(len(ends)):
            options = []
            for b in range(e):
                if (prefix := best[b]) is not None:
                    cost = stage(ends[b], e)
                    options.append((max(prefix[0], cost), prefix[1] + cost**2, (*prefix[2], ends[b])))
            following.append(min(options, default=None))
        best = following
    chosen = best[-1]
    assert chosen is not None, "there are enough positions"
    return list(chosen[2])
