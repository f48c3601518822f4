"""Planner "autopipe": balanced sub-layer partition and micro-batch slicing (AutoPipe, section III).

Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and Micro-batch Slicing", 2022.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.slicer import count_slices, slice_sizes, sliced_1f1b
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.autopipe_partition import Blocks, Simulated, search_scheme
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.linearise import Chain, cut_chain
from dapple_tf.simulator.arrays import prefix_sums
from dapple_tf.simulator.transfer import link_tables, transfer_cost

_MOST_BLOCKS = 1000


@planner("autopipe", candidate=True)
def plan_autopipe(problem: PlanningProblem, *, stages: int | None = None, sliced: bool = True) -> PlannerResult | None:
    """Return the plan of the heuristic search, sliced as Algorithm 2 says; None if nothing fits the memory.

    All stages have equally many replicas, on consecutive devices. The blocks are those of ``sub_layer_blocks``, and the
    schedule is 1F1B unless the problem names another, which is then not sliced. In the paper the pipeline depth
    (``stages``) and the micro-batch size are given; where they are not, each depth that divides the devices and each
    size is tried, and the fastest step in the simulator is taken, which has the AllReduce that AutoPipe's own simulator
    leaves out. ``sliced``: whether the Slicer is used. Left out: activation checkpointing, which the problem has as
    ``recompute``. More than 1000 blocks are merged. Raises PlanError for a depth that does not divide the devices, or
    with fewer blocks.
    """
    chain = sub_layer_blocks(problem.chain)
    chain = chain if len(chain.parameter_bytes) <= _MOST_BLOCKS else coarsen(chain, _MOST_BLOCKS)
    best: tuple[Candidate, Simulated, Blocks] | None = None
    unsliced = dataclasses.replace(problem, ceiling=math.inf)  # slicing may bring a step below the problem's ceiling
    for depth in _depths(problem, chain, stages):
        for size in problem.micro_batch_sizes:
            replicas = problem.cluster.devices // depth
            if replicas > size:
                continue
            blocks = _make_blocks(problem, chain, depth, size)
            found = search_scheme(blocks, depth)
            schedule = "dapple-a" if problem.schedule == "auto" else problem.schedule
            plans = _stage_plans(chain, found.scheme, replicas)
            ceiling = math.inf if best is None else best[0].seconds
            candidate = unsliced.evaluate(plans, size, "AutoPipe's heuristic", schedule, ceiling=ceiling)
            best = best if candidate is None else (candidate, found, blocks)
    if best is None:
        return None
    candidate, found, blocks = best
    if sliced and problem.schedule == "auto" and candidate.schedule == "dapple-a":
        candidate = _slice(problem, candidate, found, blocks)
    if candidate.seconds >= problem.ceiling:
        return None
    return PlannerResult(candidate, formula_seconds=found.seconds, formula="1F1B by AutoPipe's simulator")


def _depths(problem: PlanningProblem, chain: Chain, stages: int | None) -> list[int]:
    """Return the pipeline depths to try."""
    devices, blocks = problem.cluster.devices, len(chain.parameter_bytes)
    possible = [p for p in range(1, min(devices, blocks) + 1) if devices % p == 0]
    if stages is None:
        return possible
    if stages not in possible:
        raise PlanError(
            f"stages={stages}: on {devices} devices, with equally many for each stage, the {blocks} blocks of "
            f"{problem.profile.model!r} can have {', '.join(map(str, possible))} stages"
        )
    return [stages]


def _stage_plans(chain: Chain, scheme: tuple[int, ...], replicas: int) -> tuple[StagePlan, ...]:
    """Return the stages with their layers and devices."""
    return tuple(
        StagePlan(chain.positions[first], chain.positions[end] - 1, tuple(range(x * replicas, (x + 1) * replicas)))
        for x, (first, end) in enumerate(itertools.pairwise(scheme))
    )


def _make_blocks(problem: PlanningProblem, chain: Chain, depth: int, size: int) -> Blocks:
    """Return the blocks' seconds on one replica, and Comm.

    Comm is one figure for all boundaries: the median of the bytes that cross the cuts, over the slowest of the links
    between consecutive stages.
    """
    replicas = problem.cluster.devices // depth
    forward, backward = chain.block_seconds(size / replicas)
    if problem.recompute:
        backward = backward + forward
    homes, comm = problem.cluster.homes, 0.0
    if depth > 1:
        sent = float(np.median(chain.crossing_bytes)) * size / chain.batch_size
        groups = [homes[x * replicas : (x + 1) * replicas] for x in range(depth)]
        tables = link_tables(problem.cluster)
        pairs = {pair: transfer_cost(*pair, tables) for pair in set(itertools.pairwise(groups))}
        comm = max(latency + per_byte * sent for latency, per_byte in pairs.values())
    return Blocks(forward, backward, comm, problem.global_batch_size // size)


def _slice(problem: PlanningProblem, candidate: Candidate, found: Simulated, blocks: Blocks) -> Candidate:
    """Return the candidate with the first micro-batches of its warm-up as halves (Algorithm 2)."""
    f, b = (np.add.reduceat(seconds, found.scheme[:-1]) for seconds in (blocks.forward, blocks.backward))
    depth = len(f)
    count = min(count_slices(f.tolist(), b.tolist(), blocks.comm), depth, blocks.micro_batches)
    if not count or candidate.micro_batch_size // 2 < candidate.stages[0].replicas:
        return candidate
    # With one measured size time is proportional to the samples: two halves compute as long as one micro-batch. A stage
    # starts after half a micro-batch at the earliest, and its last backward is followed by those of the stages before.
    linear = len(problem.profile.measured_sizes) == 1
    around = prefix_sums(f / 2 + b)[:-1]
    if linear and float((around + blocks.micro_batches * (f + b)).max()) >= problem.ceiling:
        return candidate
    schedule = sliced_1f1b(depth, blocks.micro_batches, count)
    sizes = slice_sizes((candidate.micro_batch_size,) * blocks.micro_batches, count)
    changed = dataclasses.replace(candidate, schedule=str(schedule), sizes=sizes)
    timeline = problem.simulate(problem.plan_of(changed, "autopipe"))
    return dataclasses.replace(changed, seconds=timeline.step_seconds) if all(timeline.fits) else candidate


# --- AutoPipe's sub-layer granularity: the blocks between residual additions (AutoPipe, section III.B and Fig. 3)


def sub_layer_blocks(chain: Chain) -> Chain:
    """Return the chain cut only where no residual block is cut.

    The input of a residual block crosses each cut inside it, beside what the block has made of it so far. So cuts are
    inside one where more bytes cross than at the nearest cuts around them, before and behind, with equal bytes: those
    of the stream. In a transformer the blocks that are left are ResidualAttentionBlocks and ResidualFFNBlocks, and what
    stages send is what they would send between whole layers. A profile without such streams keeps all its cuts.
    """
    crossing = chain.crossing_bytes.tolist()
    inside = [False] * len(crossing)
    before: list[int] = []  # cuts before this one, with rising bytes, that no cut with fewer bytes hides
    for index, sent in enumerate(crossing):
        while before and crossing[before[-1]] > sent:
            before.pop()
        if before and crossing[before[-1]] == sent:
            start = before.pop()
            inside[start + 1 : index] = [True] * (index - start - 1)
        before.append(index)
    inner = zip(chain.positions[1:-1], inside, strict=True)
    return cut_chain(chain.profile, [position for position, hidden in inner if not hidden])
