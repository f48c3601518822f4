"""Cut a model's layers into stages (DAPPLE, section V.A: forward stages and their boundary tensors)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from graph_passes.analysis.layers import Layers
from graph_passes.errors import PartitionError
from graph_passes.ir.graph import Graph, Value


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
    """A captured graph and its cut into stages; the graph's first output is the loss, the rest are aux.

    ``floating``: the nodes of no stage. ``shared``: boundary tensors that every replica of a stage has alike.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    floating: frozenset[str]
    shared: frozenset[Value]

    def stage_of(self, node: str) -> int | None:
        """The stage that holds ``node``, or None for a floating node."""
        return self._homes.get(node)

    @cached_property
    def _homes(self) -> dict[str, int]:
        return {name: stage.index for stage in self.stages for name in stage.nodes}


def partition(layers: Layers, starts: Sequence[int]) -> StageGraph:
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
    shared = frozenset(value for stage in stages for value in stage.outputs if value.node in layers.weight_terms)
    return StageGraph(layers.graph, tuple(stages), layers.floating, shared)


def _nearest(layers: Layers, position: int) -> str:
    possible = layers.positions()
    if not possible:
        return ""
    near = sorted(possible, key=lambda p: abs(p - position))[:3]
    return ". Possible nearby: " + ", ".join(repr(layers.layers[p].name) for p in sorted(near))


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

    def cut(limit: float, weigh: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
        """The least (weight, starts) among cuts without a stage above ``limit``."""
        # best[e]: the least of a cut of the layers before ends[e] into k stages, None where there is none
        best: list[tuple[float, tuple[int, ...]] | None] = [
            (weigh(0.0, cost), ()) if (cost := stage(0, e)) <= limit else None for e in range(len(ends))
        ]
        for _ in range(stages - 1):
            following: list[tuple[float, tuple[int, ...]] | None] = []
            for e in range(len(ends)):
                options = [
                    (weigh(prefix[0], cost), (*prefix[1], ends[b]))
                    for b in range(e)
                    if (prefix := best[b]) is not None and (cost := stage(ends[b], e)) <= limit
                ]
                following.append(min(options, default=None))
            best = following
        assert best[-1] is not None, "there are enough positions"
        return best[-1]

    largest, _ = cut(math.inf, max)
    _, starts = cut(largest, lambda weight, cost: weight + cost**2)
    return list(starts)
