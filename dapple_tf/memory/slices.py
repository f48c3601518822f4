"""Bytes of sparse gradients: the slices of all micro-batches stay until they are gathered for the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.memory.sizes import FunctionSizes
from graph_passes.analysis.variable_use import Variables
from graph_passes.passes.gather_slices import SparsePart, slice_ports


@dataclass(frozen=True)
class StageSlices:
    """Bytes of the slices of sparse gradients, and of their indices, on one device of a stage.

    ``per_micro_batch``: what its backward gives. ``pieces``: what is gathered for the variables that the stage owns,
    from all micro-batches, replicas and stages. ``complete``: the gathered slices. ``rows``: the most rows that the
    gathered slices of a variable have. ``variables``: the variables that the stage owns and whose gradients are sparse.
    """

    per_micro_batch: int = 0
    pieces: int = 0
    complete: int = 0
    rows: int = 1
    variables: tuple[str, ...] = ()


def find_slices(
    functions: Sequence[Mapping[str, FunctionSizes]],
    parts: Sequence[SparsePart],
    variables: Variables,
    micro_batches: int,
    replicas: Sequence[int],
) -> tuple[StageSlices, ...]:
    """Return the slices of every stage; ``functions``: the sizes in the stages' functions by kind of action."""
    pairs = [[pair for sizes in by_kind.values() for pair in _pair_sizes(sizes)] for by_kind in functions]
    found = []
    for stage in range(len(functions)):
        owned = [part for part in parts if variables.owner(part.variable) == stage]
        pieces = complete = 0
        rows: dict[str, int] = {}
        seen: set[tuple[str, int]] = set()
        for part in owned:
            size, count = pairs[part.stage][part.pair]
            number = micro_batches * replicas[part.stage]
            pieces += number * size
            if (part.variable, part.position) not in seen:
                seen.add((part.variable, part.position))
                kept = 1 if part.combine == "sum" else number
                complete += kept * size
                rows[part.variable] = rows.get(part.variable, 0) + kept * count
        per_micro_batch = sum(size for size, _ in pairs[stage])
        found.append(StageSlices(per_micro_batch, pieces, complete, max(rows.values(), default=1), tuple(rows)))
    return tuple(found)


def _pair_sizes(sizes: FunctionSizes) -> list[tuple[int, int]]:
    """Return for each pair of slices and indices that a function gives its bytes, and its number of rows."""
    graph, found = sizes.function.graph, []
    for slices, indices in slice_ports(sizes.function):
        of_slices, of_indices = (sizes.bytes_of(graph.outputs[place]) for place in (slices, indices))
        found.append((of_slices + of_indices, of_indices // sizes.function.outputs[indices].type.dtype.size))
    return found
