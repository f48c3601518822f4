"""The optimum of PipeDream's objective by trying every pipeline: the slow reference for planner "pipedream".

Plain Python from section 3.1 of the paper. It does not use the recurrence for A^k: it divides the layers of each level
in all ways into stages, and the components in all ways among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Instance(NamedTuple):
    """T_l, w_l and a_l of the layers (a_l of the last one is not read), and (m_k, B_k) of the levels from 1 on."""

    compute: Sequence[float]
    weights: Sequence[float]
    activations: Sequence[float]
    levels: Sequence[tuple[int, float]]


def least_seconds(instance: Instance) -> float:
    """Return A^L(0 -> N, m_L)."""
    return of_component(instance, len(instance.levels), 0, len(instance.compute) - 1)


def of_component(instance: Instance, k: int, i: int, j: int) -> float:
    """Return A^k(i -> j, m_k): the slowest stage of the best pipeline on one whole component of level k."""
    if k == 0:
        return sum(instance.compute[i : j + 1])
    count, bandwidth = instance.levels[k - 1]
    return min(
        max(
            [
                *(one_stage(instance, k, first, last, m) for (first, last), m in zip(runs, counts, strict=True)),
                *(2 * instance.activations[last] / bandwidth for _, last in runs[:-1]),
            ]
        )
        for runs in divide(i, j)
        for counts in compose(count, len(runs))
    )


def one_stage(instance: Instance, k: int, i: int, j: int, m: int) -> float:
    """Return T^k(i -> j, m)."""
    _, bandwidth = instance.levels[k - 1]
    synchronise = 2 * (m - 1) * sum(instance.weights[i : j + 1]) / bandwidth
    return max(of_component(instance, k - 1, i, j), synchronise) / m


def divide(i: int, j: int) -> Iterator[list[tuple[int, int]]]:
    """Yield all divisions of layers i to j into consecutive runs (first, last)."""
    yield [(i, j)]
    for last in range(i, j):
        for rest in divide(last + 1, j):
            yield [(i, last), *rest]


def compose(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of ``parts`` whole numbers from 1 on with this sum."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compose(total - first, parts - 1):
            yield (first, *rest)
