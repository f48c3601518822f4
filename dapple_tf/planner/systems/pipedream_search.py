"""PipeDream's dynamic program over the levels of a cluster, innermost first (PipeDream, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.systems.hierarchy import Hierarchy, Level
from dapple_tf.planner.systems.pipedream_formula import replicated_seconds
from dapple_tf.simulator.arrays import Floats, Integers, prefix_sums, run_sums
from dapple_tf.simulator.compiled import compiled

# A little less than 1: a bound computed with it is below the seconds that it bounds, however these are rounded.
_BELOW = 1 - 1e-9


class BlockCosts(NamedTuple):
    """Costs of N blocks of layers.

    ``seconds`` [N]: forward and backward of a minibatch (T_l). ``parameter_bytes`` [N]: w_l. ``activation_bytes``
    [N - 1]: of a minibatch, those that cross the cut after each block but the last (a_s).
    """

    seconds: Floats
    parameter_bytes: Floats
    activation_bytes: Floats


@dataclass(frozen=True)
class FoundStage:
    """A stage: blocks ``first`` to ``last`` (inclusive) on these ``indices`` of the hierarchy's device order."""

    first: int
    last: int
    indices: tuple[int, ...]


class _Solved(NamedTuple):
    """A^k(i -> j, m) of one level: arrays [rows, N, m_k + 1], where row i is the first block.

    ``cut``: the last block before the last stage (s), -1 where one stage is best. ``last_count``: its components (m').
    """

    seconds: Floats
    cut: Integers
    last_count: Integers


def find_stages(costs: BlockCosts, hierarchy: Hierarchy) -> tuple[float, tuple[FoundStage, ...]]:
    """Return A^L(0 -> N, m_L) in seconds, and the stages of a plan that reaches it, in order.

    A^k(i -> j, m) is the least of T^k(i -> j, m), one stage on all m components, and of what section 3.1 prints, a
    pipeline before one last stage. (Printed is only the second, by which no level could be one stage: PipeDream's data
    parallelism, section 4.) Of equally fast plans the single stage is taken, else the one with the fewest components
    for the last stage, then the latest cut. A stage that is a pipeline within each of its components becomes several
    stages, each with replicas in every component. All devices are used; memory and latency have no part in it.
    """
    blocks = len(costs.seconds)
    inner = compute = run_sums(costs.seconds)
    parameters = prefix_sums(costs.parameter_bytes)
    solved = list[_Solved]()
    for number, level in enumerate(hierarchy.levels, 1):
        rows = 1 if number == len(hierarchy.levels) else blocks  # the last level is asked for pipelines from block 0
        send = 2 * costs.activation_bytes / level.bandwidth
        least = compute / hierarchy.sizes[number - 1] * _BELOW
        inner = np.ascontiguousarray(inner)  # with another layout Numba would compile the search again
        arrays = _solve_level(inner, least, parameters, send, rows, level.count, float(level.bandwidth))
        solved.append(_Solved(*arrays))
        inner = solved[-1].seconds[:, :, level.count]
    indices = tuple(range(len(hierarchy.devices)))
    return float(inner[0, -1]), tuple(_unwind(solved, hierarchy, len(solved), 0, blocks - 1, (indices,)))


def count_steps(blocks: int, levels: Sequence[Level]) -> int:
    """Return the most stages that ``find_stages`` tries for this many blocks, over all levels."""
    rows = [1 if number == len(levels) else blocks for number in range(1, len(levels) + 1)]
    return sum(row * blocks**2 * level.count**2 for row, level in zip(rows, levels, strict=True))


@compiled
def _solve_level(
    inner: Floats, least: Floats, parameters: Floats, send: Floats, rows: int, count: int, bandwidth: float
) -> tuple[Floats, NDArray[np.int32], NDArray[np.int32]]:
    """Return the fields of ``_Solved``.

    ``inner`` [N, N]: A^(k-1)(i -> j, m_(k-1)). ``least`` [N, N]: at most that, and it never grows with i. ``send``:
    2 a_s / B_k. ``parameters``: prefix sums.
    """
    blocks = inner.shape[1]
    seconds = np.full((rows, blocks, count + 1), np.inf)
    cut = np.full((rows, blocks, count + 1), -1, np.int32)
    last_count = np.zeros((rows, blocks, count + 1), np.int32)
    for i in range(rows):
        for j in range(i, blocks):
            for m in range(1, count + 1):
                best = replicated_seconds(inner[i, j], parameters[j + 1] - parameters[i], bandwidth, m)
                best_cut, best_last = -1, m
                for last in range(1, m):
                    for s in range(j - 1, i - 1, -1):
                        weights = parameters[j + 1] - parameters[s + 1]
                        if replicated_seconds(least[s + 1, j], weights, bandwidth, last) * _BELOW >= best:
                            break  # the earlier the cut, the longer takes the last stage
                        before = max(seconds[i, s, m - last], send[s])
                        if before >= best:
                            continue
                        slowest = max(before, replicated_seconds(inner[s + 1, j], weights, bandwidth, last))
                        if slowest < best:
                            best, best_cut, best_last = slowest, s, last
                seconds[i, j, m], cut[i, j, m], last_count[i, j, m] = best, best_cut, best_last
    return seconds, cut, last_count


def _unwind(
    solved: Sequence[_Solved],
    hierarchy: Hierarchy,
    level: int,
    first: int,
    last: int,
    components: Sequence[tuple[int, ...]],
) -> Iterator[FoundStage]:
    """Yield the stages of A^level(first -> last, m_level), which runs in each of these ``components`` of ``level``."""
    if level == 0:
        yield FoundStage(first, last, tuple(sorted(index for component in components for index in component)))
        return
    table, size, left = solved[level - 1], hierarchy.sizes[level - 1], hierarchy.levels[level - 1].count
    groups = list[tuple[int, int, int, int]]()  # first and last block, first component and the one after the last
    end = last
    while True:
        cut, count = int(table.cut[first, end, left]), int(table.last_count[first, end, left])
        groups.append((cut + 1 if cut >= 0 else first, end, left - count, left))
        if cut < 0:
            break
        end, left = cut, left - count
    for begin, end, low, high in reversed(groups):
        parts = [whole[c * size : (c + 1) * size] for whole in components for c in range(low, high)]
        yield from _unwind(solved, hierarchy, level - 1, begin, end, parts)
