"""Cut the layers of a model into stages with their boundary tensors (DAPPLE, section V.A)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.analysis.loss_head import find_statistics
from dapple_tf.graph_passes.ir.graph import Graph, Role, Value
from dapple_tf.wording import format_count


@dataclass(frozen=True)
class Stage:
    """A stage: its layers, its nodes, and the tensors that it takes from the stage before and gives to the next.

    A tensor that a later stage uses enters and leaves each stage in between.
    """

    index: int
    first_layer: int
    last_layer: int
    nodes: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class StageGraph:
    """The layers of a captured graph, and the stages into which they are cut.

    The tensors that the loss head takes are the outputs of the last stage.
    """

    layers: Layers
    stages: tuple[Stage, ...]

    @property
    def graph(self) -> Graph:
        """The captured graph: its first output is the loss, the others are aux."""
        return self.layers.graph

    @cached_property
    def results(self) -> tuple[tuple[Role, str, Value], ...]:
        """The outputs of the graph, each with the role and the name of the port that carries it."""
        loss, *aux = self.graph.outputs
        return ("loss", "loss", loss), *(("aux", str(i), value) for i, value in enumerate(aux))

    @cached_property
    def statistics(self) -> Mapping[str, Value]:
        """Values of stages, by name, whose sums over micro-batches and replicas are used at the end of a step."""
        return find_statistics(self.graph)

    def stage_of(self, node: str) -> int | None:
        """Return the stage of ``node``, or None for a floating node."""
        return self._stages_by_node.get(node)

    @cached_property
    def shared(self) -> frozenset[Value]:
        """The boundary tensors that are equal on all replicas of a stage."""
        return frozenset(v for stage in self.stages for v in stage.outputs if v.node in self.layers.weight_terms)

    @cached_property
    def _stages_by_node(self) -> dict[str, int]:
        return {name: stage.index for stage in self.stages for name in stage.nodes}


def partition(layers: Layers, starts: Sequence[int]) -> StageGraph:
    """Cut before each layer position in ``starts`` (ascending, without 0).

    Raises PartitionError that says why a cut is out of range, out of order, repeated, or impossible.
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
        outputs = layers.cut(end).crossing if end < count else tuple(entry.value for entry in layers.head_inputs)
        stages.append(Stage(index, first, end - 1, nodes, inputs, outputs))
    return StageGraph(layers, tuple(stages))


def _nearest(layers: Layers, position: int) -> str:
    possible = layers.positions()
    if not possible:
        return ""
    near = sorted(possible, key=lambda p: abs(p - position))[:3]
    return ". Possible nearby: " + ", ".join(repr(layers.layers[p].name) for p in sorted(near))


def _elsewhere(problems: Sequence[str]) -> str:
    found = list(dict.fromkeys(problems))
    more = f"; and {format_count(len(found) - 3, 'more reason')}" if len(found) > 3 else ""
    return f". It cannot be cut elsewhere: {'; '.join(found[:3])}{more}" if found else ""


def balance(
    costs: Sequence[float],
    positions: Sequence[int],
    crossing: Sequence[float],
    stages: int,
    problems: Sequence[str] = (),
) -> list[int]:
    """Return the first layers of all stages but the first, for ``stages`` stages whose largest cost is minimal.

    ``costs``: the cost of each layer, in any unit; ``positions``: the layers before which the model can be cut;
    ``crossing[i]``: the cost of sending the tensors that cross at ``positions[i]``, which is added to the stage that
    sends them. If several cuts have the same largest cost, the one with the least sum of squares is taken. Raises
    PartitionError if there are fewer positions than cuts; its message has some of the ``problems``, the reasons why the
    model cannot be cut elsewhere. ``dapple_tf.planner.search.balanced_cuts.even_starts`` is a faster version without
    crossing costs; test_balanced_cuts.py asserts that the largest stages of both are equal.
    """
    if stages - 1 > len(positions):
        raise PartitionError(
            f"{stages} stages are wanted, but the model can be cut in {format_count(len(positions), 'place')} only "
            f"({format_count(len(costs), 'layer')}): ask for at most "
            f"{format_count(len(positions) + 1, 'stage')}{_elsewhere(problems)}"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    ends = [*positions, len(costs)]
    sending = [*crossing, 0.0]

    def stage(first: int, e: int) -> float:
        return total[ends[e]] - total[first] + sending[e]

    def cut(limit: float, weigh: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
        """Return the least (weight, starts) of the cuts without a stage above ``limit``."""
        # best[e]: the least of the cuts of the layers before ends[e] into k stages, None where there is none
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
