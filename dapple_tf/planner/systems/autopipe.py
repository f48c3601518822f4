"""Planner "autopipe": balanced sub-layer partition and micro-batch slicing (AutoPipe, section III).

Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and Micro-batch Slicing", 2022.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.slicer import count_slices, slice_sizes, sliced_1f1b
from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.partition import Partition, Ways, partition
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.profiler.linearise import Chain, cut_chain
from dapple_tf.simulator.arrays import Floats, prefix_sums, runs
from dapple_tf.simulator.native.library import address, load_library
from dapple_tf.simulator.transfer import link_tables, transfer_cost
from dapple_tf.wording import format_count

_MOST_BLOCKS = 1000


@planner("autopipe", candidate=True, native=True)
def plan_autopipe(problem: PlanningProblem, *, stages: int | None = None, sliced: bool = True) -> PlannerResult | None:
    """Return the plan of the heuristic search, sliced as Algorithm 2 says; None if nothing fits the memory.

    All stages have equally many replicas, on consecutive devices. The blocks are those of ``sub_layer_blocks``, and the
    schedule is 1F1B unless the problem names another, which is then not sliced. In the paper the pipeline depth
    (``stages``) and the micro-batch size are given. Where they are not given here, each depth that divides the devices
    and each size is tried, and the plan with the fastest step in the simulator is taken. (This simulator counts
    AllReduce, which AutoPipe's own one leaves out.) ``sliced``: whether the Slicer is used. Activation checkpointing is
    left out; the problem's ``recompute`` is that. More than 1000 blocks are merged. Raises PlanError for a depth that
    does not divide the devices, or with fewer blocks.
    """
    chain = coarsen(sub_layer_blocks(problem.chain), _MOST_BLOCKS)
    best: tuple[Candidate, Simulated, Blocks] | None = None
    for depth in _depths(problem, chain, stages):
        for size in problem.micro_batch_sizes:
            replicas = problem.cluster.devices // depth
            if replicas > size:
                continue
            blocks = _make_blocks(ChainCosts(problem, chain, size), depth)
            found = search_scheme(blocks, depth)
            schedule = problem.schedule_or("dapple-a")
            plans = make_stages(chain, found.scheme, [range(x * replicas, (x + 1) * replicas) for x in range(depth)])
            ceiling = math.inf if best is None else best[0].seconds
            candidate = problem.evaluate(plans, size, "AutoPipe's heuristic", schedule, ceiling=ceiling)
            best = best if candidate is None else (candidate, found, blocks)
    if best is None:
        return None
    candidate, found, blocks = best
    if sliced and problem.schedule == "auto" and candidate.schedule == "dapple-a":
        candidate = _slice(problem, candidate, found, blocks)
    return PlannerResult(candidate, formula_seconds=found.seconds, formula="1F1B by AutoPipe's simulator")


def _depths(problem: PlanningProblem, chain: Chain, stages: int | None) -> list[int]:
    """Return the pipeline depths to try."""
    devices, blocks = problem.cluster.devices, len(chain.parameter_bytes)
    possible = [p for p in range(1, min(devices, blocks) + 1) if devices % p == 0]
    if stages is None:
        return possible
    if stages not in possible:
        raise PlanError(
            f"stages={stages}: on {format_count(devices, 'device')}, with equally many for each stage, the "
            f"{format_count(blocks, 'block')} of {problem.profile.model!r} can have {', '.join(map(str, possible))} "
            "stages"
        )
    return [stages]


def _make_blocks(costs: ChainCosts, depth: int) -> Blocks:
    """Return the blocks' seconds on one replica, and Comm.

    Comm is one number of seconds for all boundaries: those of the median of the bytes that cross the cuts, over the
    slowest link between consecutive stages.
    """
    cluster, comm = costs.problem.cluster, 0.0
    replicas = cluster.devices // depth
    if depth > 1:
        sent = float(np.median(costs.chain.crossing_bytes)) * costs.size / costs.chain.batch_size
        groups = [cluster.homes[x * replicas : (x + 1) * replicas] for x in range(depth)]
        tables = link_tables(cluster)
        pairs = {pair: transfer_cost(*pair, tables) for pair in set(itertools.pairwise(groups))}
        comm = max(latency + per_byte * sent for latency, per_byte in pairs.values())
    return Blocks(*costs.block_seconds(costs.size / replicas), comm, costs.micro_batches)


def _slice(problem: PlanningProblem, candidate: Candidate, found: Simulated, blocks: Blocks) -> Candidate:
    """Return the candidate with the first micro-batches of its warm-up as halves (Algorithm 2)."""
    f, b = (np.add.reduceat(seconds, found.scheme[:-1]) for seconds in (blocks.forward, blocks.backward))
    depth = len(f)
    count = min(count_slices(f.tolist(), b.tolist(), blocks.comm), depth, blocks.micro_batches)
    if not count or candidate.micro_batch_size // 2 < candidate.stages[0].replicas:
        return candidate
    schedule = sliced_1f1b(depth, blocks.micro_batches, count)
    sizes = slice_sizes((candidate.micro_batch_size,) * blocks.micro_batches, count)
    changed = dataclasses.replace(candidate, schedule=str(schedule), sizes=sizes)
    timeline = problem.simulate(problem.plan_of(changed, "autopipe"))
    return dataclasses.replace(changed, seconds=timeline.step_seconds) if all(timeline.fits) else candidate


# --- AutoPipe's sub-layer granularity: the blocks between residual additions (AutoPipe, section III.B and Fig. 3)


def sub_layer_blocks(chain: Chain) -> Chain:
    """Return the chain with cuts only between residual blocks, not inside them.

    At each cut inside a residual block two things cross: the input of the block, and what the block has computed from
    it so far. So if equally many bytes cross two cuts, and more bytes cross every cut between them, the cuts between
    them are inside a block. In a transformer the remaining blocks are ResidualAttentionBlocks and ResidualFFNBlocks,
    and stages send as much as between whole layers. A profile without residual blocks keeps all its cuts.
    """
    crossing = chain.crossing_bytes.tolist()
    inside = [False] * len(crossing)
    before: list[int] = []  # the earlier cuts, of rising bytes, after which no cut with fewer bytes has come
    for index, sent in enumerate(crossing):
        while before and crossing[before[-1]] > sent:
            before.pop()
        if before and crossing[before[-1]] == sent:
            start = before.pop()
            inside[start + 1 : index] = [True] * (index - start - 1)
        before.append(index)
    inner = zip(chain.positions[1:-1], inside, strict=True)
    return cut_chain(chain.profile, [position for position, hidden in inner if not hidden])


# --- Algorithm 1, and the heuristic that moves the master stage (AutoPipe, section III.B.2)


Scheme = tuple[int, ...]
"""A partition scheme: the first block of each stage, and the number of blocks."""

_MOST_SCHEMES = 400  # simulated in one search, which then ends


class Blocks(NamedTuple):
    """f and b of each block (seconds of a micro-batch), Comm, and m."""

    forward: Floats
    backward: Floats
    comm: float
    micro_batches: int


class Simulated(NamedTuple):
    """A partition scheme with its iteration time (seconds) and its master stage."""

    scheme: Scheme
    seconds: float
    master: int


def search_scheme(blocks: Blocks, stages: int) -> Simulated:
    """Return the fastest scheme that the heuristic finds for this number of stages, p.

    1) The scheme of Algorithm 1. 2) The stages after the master stage i are cut so that inequality 1 holds where it
    can. 3) Unless i is 0, its first block goes to stage i - 1, or its last block to stage i + 1, each with and without
    Algorithm 1 for the earlier stages. Schemes whose master stage is i or an earlier one continue at 2). 4) The fastest
    of all simulated schemes is taken.

    The paper leaves three things open. How does 2) adjust? Here it gives one stage after the other as many blocks as
    the inequality allows, but at least one, until the master stage changes. Which i does 3) use then? That of the
    adjusted scheme. When does the search end? No scheme is continued twice, and at most 400 are simulated.
    """
    search = _Search(blocks, stages)
    waiting = [search.simulate(search.balanced.bounds(stages))]
    taken_up = {waiting[0].scheme}
    while waiting and len(search.known) < _MOST_SCHEMES:
        found = search.adjust(waiting.pop())
        for scheme in search.shift(found) if found.master else ():
            moved = search.simulate(scheme)
            if moved.master <= found.master and scheme not in taken_up:
                taken_up.add(scheme)
                waiting.append(moved)
    return min(search.known.values(), key=lambda found: found.seconds)


class _Search:
    """The state of one search."""

    def __init__(self, blocks: Blocks, stages: int) -> None:
        self.blocks, self.stages = blocks, stages
        self.forward = prefix_sums(blocks.forward)
        self.backward = prefix_sums(blocks.backward)
        self.balanced = balance(blocks.forward + blocks.backward, stages)
        self.known: dict[Scheme, Simulated] = {}

    def simulate(self, scheme: Scheme) -> Simulated:
        """Return the scheme with its time and master stage."""
        if scheme not in self.known:
            bounds = np.array(scheme)
            f, b = np.diff(self.forward[bounds]), np.diff(self.backward[bounds])
            seconds, master = simulate_1f1b(f, b, self.blocks.comm, self.blocks.micro_batches)
            self.known[scheme] = Simulated(scheme, float(seconds), int(master))
        return self.known[scheme]

    def adjust(self, found: Simulated) -> Simulated:
        """Return the scheme after step 2: the sum of f_j + b_j of the stages i + 1 to s is at most (s - i) b_i."""
        i, n = found.master, self.stages
        total = self.forward + self.backward
        bounds = list(found.scheme)
        least = self.backward[bounds[i + 1]] - self.backward[bounds[i]]  # b_i
        for s in range(i + 1, n - 1):
            limit = total[bounds[i + 1]] + (s - i) * least
            most = int(np.searchsorted(total, limit, side="right")) - 1
            end = max(bounds[s] + 1, min(bounds[s + 1], most))
            if end < bounds[s + 1]:
                bounds[s + 1] = end
                found = self.simulate(tuple(bounds))
                if found.master != i:
                    break
        return found

    def shift(self, found: Simulated) -> Iterator[Scheme]:
        """Yield the schemes of step 3."""
        i, scheme = found.master, found.scheme
        if scheme[i + 1] - scheme[i] == 1:
            return  # its only block cannot move
        first = (*scheme[:i], scheme[i] + 1, *scheme[i + 1 :])
        yield first
        if i > 1:
            yield (*self.balanced.bounds(i - 1, scheme[i - 1]), *first[i:])
        if i + 1 < self.stages:
            last = (*scheme[: i + 1], scheme[i + 1] - 1, *scheme[i + 2 :])
            yield last
            yield (*self.balanced.bounds(i, scheme[i]), *last[i + 1 :])


def balance(work: Floats, stages: int) -> Partition:
    """Return time[i][j] of Algorithm 1, the least largest ``work`` of a stage; state j is j stages."""
    return partition(runs(prefix_sums(work))[None], Ways.in_turn([0] * stages), latest=False)


# --- The pipeline simulator: iteration time, critical path and master stage (AutoPipe, section III.B.1)


def simulate_1f1b(f: Floats, b: Floats, comm: float, micro_batches: int) -> tuple[float, int]:
    """Return the iteration time (seconds) and the master stage.

    Letters: n stages, m micro-batches, f_x and b_x the seconds of FP and BP on stage x, Comm those of one
    communication. Each FP except on stage 0, and each BP except on stage n - 1, starts Comm after the later one of two
    ends: of the stage's previous operation, and of the neighbour's operation on the same micro-batch. (The paper prints
    this for the 1F1B and Cooldown phases: a stage communicates between two operations, without overlap. Of the Warmup
    phase the paper estimates only the first micro-batch's FP; here it is computed in the same way.)

    Of several longest paths the critical one is the path closest to the last stage: if both ends are equal, the path
    comes from the stage nearer to the last one. The master stage is the one on which the critical path has most
    operations of the 1F1B phase; if several have equally many, the last of them. The C++ library must be there.
    """
    library = load_library()
    assert library is not None, "the registry refuses planners that need it"
    simulate = library.dapple_one_forward_one_backward
    simulate.restype, master = ctypes.c_double, ctypes.c_int32()
    rows = [np.ascontiguousarray(row, np.float64) for row in (f, b)]
    seconds = simulate(
        len(f), ctypes.c_int64(micro_batches), *map(address, rows), ctypes.c_double(comm), ctypes.byref(master)
    )
    return float(seconds), master.value
