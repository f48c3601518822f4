"""AutoPipe's simulator from its printed, renumbered formulas: the slow reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple


class Pipeline(NamedTuple):
    """f_x and b_x of the stages, Comm, and m."""

    f: tuple[float, ...]
    b: tuple[float, ...]
    comm: float
    m: int


Operation = tuple[int, str, int]
"""Stage, "FP" or "BP", micro-batch."""


def iteration_seconds(pipeline: Pipeline) -> float:
    """Return the end of stage 0's last BP by the formulas of the 1F1B and Cooldown phases, for m >= n.

    Blocks y of stage x are renumbered from 0: FP is of micro-batch y + n - 1 - x, BP of y. In the Cooldown phase BP y
    is the (y + 1)-th from the end.
    """
    f, b, comm, m = pipeline
    n = len(f)

    @lru_cache(None)
    def warm_up(x: int, micro_batch: int) -> float:
        """Return the start of an FP of the Warmup phase, or of the first of the 1F1B phase."""
        before = [warm_up(x, micro_batch - 1) + f[x]] if micro_batch else [0.0]
        if x:
            before.append(warm_up(x - 1, micro_batch) + f[x - 1])
        return max(before) + (comm if x else 0.0)

    @lru_cache(None)
    def t(x: int, y: int, z: int) -> float:
        """Return the start of FP (z = 0) or BP (z = 1) of block y of stage x in the 1F1B phase."""
        if z == 0:
            if y == 0:
                return warm_up(x, n - 1 - x)
            before = [t(x, y - 1, 1) + b[x]]
            if x:
                before.append(t(x - 1, y - 1, 0) + f[x - 1])
            return max(before) + (comm if x else 0.0)
        before = [t(x, y, 0) + f[x]]
        if x < n - 1:
            before.append(t(x + 1, y, 1) + b[x + 1])
        return max(before) + (comm if x < n - 1 else 0.0)

    @lru_cache(None)
    def cooldown(x: int, y: int) -> float:
        """Return the start of the BP that is y-th from the end of stage x."""
        own = n - 1 - x  # BPs in the phase
        if y >= own:  # of the 1F1B phase
            return t(x, m - 1 - y, 1)
        return max(cooldown(x, y + 1) + b[x], cooldown(x + 1, y) + b[x + 1]) + comm

    return cooldown(0, 0) + b[0]


def master_stage(pipeline: Pipeline) -> int:
    """Return the master stage from all longest paths of the AOE network."""
    f, b, comm, m = pipeline
    n = len(f)
    orders = [
        [(x, "FP", k) for k in range(min(n - 1 - x, m))]
        + [op for k in range(m - min(n - 1 - x, m)) for op in ((x, "FP", k + min(n - 1 - x, m)), (x, "BP", k))]
        + [(x, "BP", k) for k in range(m - min(n - 1 - x, m), m)]
        for x in range(n)
    ]
    phase = {op for x, row in enumerate(orders) for op in row[min(n - 1 - x, m) : 2 * m - min(n - 1 - x, m)]}

    def befores(op: Operation) -> Iterator[Operation]:
        x, kind, k = op
        index = orders[x].index(op)
        if index:
            yield orders[x][index - 1]
        other = x - 1 if kind == "FP" else x + 1
        if 0 <= other < n:
            yield (other, kind, k)

    @lru_cache(None)
    def end(op: Operation) -> float:
        x, kind, _ = op
        waits = comm if (x if kind == "FP" else x < n - 1) else 0.0
        return max((end(before) for before in befores(op)), default=0.0) + waits + (f if kind == "FP" else b)[x]

    def paths(op: Operation) -> Iterator[list[Operation]]:
        """Yield the longest paths that end with ``op``, its last operation first."""
        latest = max((end(before) for before in befores(op)), default=0.0)
        found = [before for before in befores(op) if end(before) == latest]
        if not found:
            yield [op]
        for before in found:
            yield from ([op, *path] for path in paths(before))

    # Closest to the last stage: of two paths, the one that is nearer to it where they part.
    critical = max(paths((0, "BP", m - 1)), key=lambda path: [x for x, _, _ in path])
    counts = [sum(x == stage for x, _, _ in set(critical) & phase) for stage in range(n)]
    return max(range(n), key=lambda stage: (counts[stage], stage))


def sums(seconds: Sequence[float], scheme: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds of each stage."""
    return tuple(sum(seconds[first:end]) for first, end in itertools.pairwise(scheme))
