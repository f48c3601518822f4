"""The planner's search: dynamic programming over (layers planned, devices used, device set), DAPPLE section IV.C.

A *label* is a plan of the first j blocks whose last stage sits on placement p. Each (j, p) keeps the best ``width``
labels (the paper keeps one), and a label whose bound reaches the ceiling is dropped. Bounds never exceed what they
bound, so below the least bound that was dropped for lack of room the search is exhaustive.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from dapple_tf.planner.cost_tables import CostTables
from dapple_tf.planner.latency import pipeline_latency
from dapple_tf.simulator.compiled import Floats, Integers, compiled


@dataclass(frozen=True)
class FoundPlan:
    """A complete plan: the first block and the placement of each stage, and its score in seconds."""

    score: float
    starts: tuple[int, ...]
    placements: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Plans found, best first; every plan that scores below ``exhaustive_below`` (and the ceiling) is among them.

    One row a plan: score, number of stages, and of each stage the first block and the placement (0 after the last).
    """

    scores: Floats
    stages: Integers
    starts: Integers
    placements: Integers
    exhaustive_below: float

    def __len__(self) -> int:
        return len(self.scores)

    def plan(self, row: int) -> FoundPlan:
        """The plan of one row."""
        s = int(self.stages[row])
        starts, placements = self.starts[row, :s].tolist(), self.placements[row, :s].tolist()
        return FoundPlan(float(self.scores[row]), tuple(starts), tuple(placements))

    @property
    def plans(self) -> tuple[FoundPlan, ...]:
        """All of them."""
        return tuple(self.plan(row) for row in range(len(self)))


def search_by_formula(
    tables: CostTables, *, ceiling: float = np.inf, width: int, results: int = 16, warm: bool = False
) -> SearchResult:
    """Plans over all devices by formulas 1 to 3; a partial plan ranks by its latency with all the rest as last stage.

    DAPPLE, formulas 4 and 5. ``warm``: only plans whose stages can hold the warm-up of policy A, S - i micro-batches,
    without which no pipeline runs as the formulas say.
    """
    return _collect(_search(tables, True, True, ceiling, width, results, len(tables.working), warm))


def search_by_bound(
    tables: CostTables, *, ceiling: float = np.inf, width: int, results: int, max_stages: int | None = None
) -> SearchResult:
    """Plans over any number of devices by a lower bound of their simulated step, those below ``ceiling`` only."""
    stages = len(tables.working) if max_stages is None else max_stages
    return _collect(_search(tables, False, False, ceiling, width, results, stages, False))


def _collect(found: tuple[Floats, Integers, Integers, Integers, float]) -> SearchResult:
    scores, stages, starts, placements, dropped = found
    order = np.lexsort((*starts.T[::-1], stages, scores))
    return SearchResult(scores[order], stages[order], starts[order], placements[order], dropped)


@compiled
def _search(
    t: CostTables,
    by_formula: bool,
    all_devices: bool,
    ceiling: float,
    width: int,
    results: int,
    max_stages: int,
    warm: bool,
) -> tuple[Floats, Integers, Integers, Integers, float]:
    n, places, m = len(t.working), len(t.replicas), t.micro_batches
    size = max(0, n - 1) * places * width
    # Of each label: when its last stage ends its first forward, how long after that stage's last backward begins all
    # is done, and its bound and rank. By formula: the sum of its forwards and backwards, and the least steady phase
    # with which a later stage stays pivot (Formula 3 compares with the pivot alone and the sum of what lies between).
    front, tail, bound, rank = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    parent, begin, depth = np.empty(size, np.int32), np.empty(size, np.int16), np.empty(size, np.int16)
    stage = np.empty((size if by_formula else 0, 4))  # forward, backward, AllReduce, transfer into it
    filled = np.zeros(max(0, n - 1) * places, np.int32)
    path = np.empty((3, 2 * n + 1))
    heap = [(0.0, -1, -1, -1)]
    heap.pop()
    limit, dropped = ceiling, np.inf
    rest_pair = np.full(places, -1, np.int64)  # the pair that gives all that is left to the next stage
    for p in range(places):
        for e in range(t.first[p], t.first[p + 1]):
            if t.left[t.following[e]] == 0:
                rest_pair[p] = e
    for j in range(n):
        for p in range(places if j else 1):
            at = p if j else places
            for slot in range(filled[(j - 1) * places + p] if j else 1):
                label = ((j - 1) * places + p) * width + slot if j else -1
                if j and bound[label] >= limit:
                    continue
                stages = depth[label] + 1 if j else 1
                for e in range(t.first[at], t.first[at + 1]):
                    q = t.following[e]
                    r = t.replicas[q]
                    if r > t.micro_batch_size or (j and r != t.replicas[p] and not t.splittable[j]):
                        continue
                    send = t.latency[e] + t.rate[e] * t.crossing[j] if j else 0.0
                    before = front[label] + (2 * send if by_formula else send) if j else 0.0
                    behind = (0.0 if by_formula else tail[label] + send) if j else 0.0
                    known = bound[label] if j else 0.0
                    hold = 0.0  # by formula: as tail, with the network into this stage
                    if by_formula and j:
                        hold = max((m - 1) * 2 * send, tail[label] - 2 * send)
                        if (m - 1) * 2 * send >= tail[label]:
                            known = max(known, (before + (m - 1) * 2 * send) * (1 - 1e-12))
                    work = 0.0
                    for end in range(j + 1, n + 1):
                        work = max(work, t.working[end - 1])
                        if not fits(t, j, end, r, work):
                            break
                        row = t.row[q]
                        f, b = t.forward[row, end] - t.forward[row, j], t.backward[row, end] - t.backward[row, j]
                        steady = (m - 1) * (f + b)
                        # By formula a stage bounds the latency only where none before it takes over as pivot.
                        if max(known, before + steady if steady >= hold else 0.0) >= limit:
                            break
                        if end < n and (t.left[q] == 0 or stages == max_stages):
                            continue
                        if end == n and all_devices and t.left[q] > 0:
                            continue
                        if end == n and warm and not _holds_warm_up(t, parent, begin, label, width, j, q):
                            continue
                        if t.exposed.size:
                            ring = t.exposed[t.exposed_class[q], j, end]
                        else:
                            ring = t.ring[q] * (t.parameters[end] - t.parameters[j])
                        share = t.rest[end] / t.left[q] if end < n else 0.0  # some later stage has as much to do
                        if by_formula:
                            after, late = before + f + b, max(steady, hold - f - b)
                            low = after + steady if steady >= hold else 0.0
                            if (m - 1) * share >= late:
                                low = max(low, after + (m - 1) * share)
                            if m == 1:  # nothing takes over from the last stage as pivot, so all stages count
                                low = max(low, after + share)
                        else:
                            # w: gradients of weights that a schedule puts off; no other stage waits for them.
                            w = t.weights[row, end] - t.weights[row, j]
                            after, late = before + f, b - w + max(w + ring, behind)
                            low = max(after + steady + b + ring, after + (m - 1) * (f + b - w) + late)
                            if j:  # channels: the last transfer forward, the first transfer back
                                low = max(low, front[label] + m * send + f + late)
                                low = max(low, after + b - w + m * send + tail[label])
                            low = max(low, after + m * share + late)
                        low = max(known, low * (1 - 1e-12))  # sums in another order than what they bound
                        if low >= limit:
                            continue
                        new = -1
                        if end < n:
                            bucket = (end - 1) * places + q
                            new = _find_room(rank, filled, bucket, width)
                            if filled[bucket] == width and rank[new] <= low:
                                dropped = min(dropped, low)
                                continue
                        value = low
                        if by_formula:
                            value = _formula(t, stage, parent, label, path, f, b, ring, send, end, q, rest_pair[q])
                        if end == n:
                            if value < limit:
                                heapq.heappush(heap, (-value, label, q, j))
                                if len(heap) > results:
                                    heapq.heappop(heap)
                                    limit = min(limit, -heap[0][0])
                                    dropped = min(dropped, limit)  # from now on nothing above is kept
                            continue
                        if filled[bucket] < width:
                            filled[bucket] += 1
                        elif rank[new] <= value:
                            dropped = min(dropped, low)
                            continue
                        else:
                            dropped = min(dropped, bound[new])
                        front[new], tail[new], bound[new], rank[new] = after, late, low, value
                        parent[new], begin[new], depth[new] = label, j, stages
                        if by_formula:
                            stage[new, 0], stage[new, 1], stage[new, 2], stage[new, 3] = f, b, ring, send
    return _unwind(heap, parent, begin, places, width, dropped)


@compiled
def _holds_warm_up(
    t: CostTables, parent: Integers, begin: Integers, label: int, width: int, first: int, place: int
) -> bool:
    """Whether each stage of a complete plan holds S - i micro-batches; its last stage begins at ``first``."""
    end, held = len(t.working), 1
    while True:
        r, work = t.replicas[place], t.working[first:end].max()
        stash = min(held, t.micro_batches) * stash_bytes(t, first, end)
        if fixed_bytes(t, first, end) + (work_bytes(t, first, end, work) + stash) / r > t.memory:
            return False
        if label < 0:
            return True
        end, first, place = first, begin[label], label // width % len(t.replicas)
        label = parent[label]
        held += 1


@compiled
def _find_room(rank: Floats, filled: Integers, bucket: int, width: int) -> int:
    """The place of a new label: the first free one of its bucket, or that of the label of the worst rank."""
    first, count = bucket * width, filled[bucket]
    if count < width:
        return int(first + count)
    worst = first
    for other in range(first + 1, first + width):
        if rank[other] > rank[worst]:
            worst = other
    return int(worst)


@compiled
def fits(t: CostTables, first: int, end: int, r: int, work: float) -> bool:
    """Whether one of ``r`` devices can hold blocks ``first`` to ``end`` (exclusive) and one micro-batch in flight."""
    return bool(
        fixed_bytes(t, first, end) + work_bytes(t, first, end, work) / r + stash_bytes(t, first, end) / r <= t.memory
    )


@compiled
def fixed_bytes(t: CostTables, first: int, end: int) -> float:
    """Weights, gradients and slots of blocks ``first`` to ``end``."""
    return float((t.parameters[end] - t.parameters[first]) * t.bytes_per_parameter_byte)


@compiled
def stash_bytes(t: CostTables, first: int, end: int) -> float:
    """What a micro-batch in flight keeps, over all replicas."""
    return float(t.crossing[first] if t.recompute else t.stash[end] - t.stash[first])


@compiled
def work_bytes(t: CostTables, first: int, end: int, work: float) -> float:
    """The largest working set, over all replicas; with recompute what forward makes again counts too."""
    return float(work + (t.stash[end] - t.stash[first] if t.recompute else 0.0))


@compiled
def _formula(
    t: CostTables,
    stage: Floats,
    parent: Integers,
    label: int,
    path: Floats,
    f: float,
    b: float,
    ring: float,
    send: float,
    end: int,
    q: int,
    rest_pair: int,
) -> float:
    """Formula 5: the latency of the label's stages, the new one, and all that is left as the last."""
    top = path.shape[1]
    low = top
    n = len(t.working)
    if end < n:
        last = t.following[rest_pair]
        row, move = t.row[last], t.latency[rest_pair] + t.rate[rest_pair] * t.crossing[end]
        low -= 1
        path[0, low], path[1, low] = t.forward[row, n] - t.forward[row, end], t.backward[row, n] - t.backward[row, end]
        if t.exposed.size:
            path[2, low] = t.exposed[t.exposed_class[last], end, n]
        else:
            path[2, low] = t.ring[last] * (t.parameters[n] - t.parameters[end])
        low -= 1
        path[0, low], path[1, low], path[2, low] = move, move, 0.0
    low -= 1
    path[0, low], path[1, low], path[2, low] = f, b, ring
    while label >= 0:
        low -= 1
        path[0, low], path[1, low], path[2, low] = send, send, 0.0
        low -= 1
        path[0, low], path[1, low], path[2, low] = stage[label, 0], stage[label, 1], stage[label, 2]
        send = stage[label, 3]
        label = parent[label]
    return float(pipeline_latency(path[0, low:], path[1, low:], path[2, low:], t.micro_batches))


@compiled
def _unwind(
    heap: list[tuple[float, int, int, int]],
    parent: Integers,
    begin: Integers,
    places: int,
    width: int,
    dropped: float,
) -> tuple[Floats, Integers, Integers, Integers, float]:
    count = len(heap)
    stages = np.zeros(count, np.int64)
    for i in range(count):
        label = heap[i][1]
        stages[i] = 1
        while label >= 0:
            stages[i] += 1
            label = parent[label]
    longest = stages.max() if count else 0
    scores = np.empty(count)
    starts, placements = np.zeros((count, longest), np.int64), np.zeros((count, longest), np.int64)
    for i in range(count):
        value, label, q, j = heap[i]
        scores[i] = -value
        k = stages[i] - 1
        starts[i, k], placements[i, k] = j, q
        while label >= 0:
            k -= 1
            starts[i, k], placements[i, k] = begin[label], label // width % places
            label = parent[label]
    return scores, stages, starts, placements, dropped
