"""Planner "pipedream": PipeDream's hierarchical dynamic program (PipeDream, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dapple_tf.planner.costs import make_stages
from dapple_tf.planner.partition import Partition, Ways, partition
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.hierarchy import Hierarchy, Level, derive_hierarchy
from dapple_tf.planner.systems.pipedream_formula import check_minibatch_size, predict_throughput, replicated_seconds
from dapple_tf.profiler.linearise import Chain, without_unsplittable_cuts
from dapple_tf.simulator.arrays import Floats, prefix_sums, runs

_MOST_DEVICES = 4096
_MOST_STEPS = 4_000_000_000  # of the dynamic program: some seconds
_LEAST_BLOCKS = 32


@planner("pipedream", candidate=True)
def plan_pipedream(
    problem: PlanningProblem, *, minibatch_size: int | None = None, flat: bool = False
) -> PlannerResult | None:
    """Return the plan with the highest throughput by PipeDream's formulas; None if it does not fit the memory.

    The formulas are for minibatches of ``minibatch_size`` samples (default: the profile's batch), each computed by one
    replica of a stage, on the levels of ``derive_hierarchy``, or with ``flat`` on one level of all devices, with the
    least bandwidth. The formulas know neither memory nor the micro-batches of a synchronous step: the micro-batch size
    and the schedule are the fastest in the simulator. The model is not cut where tensors cannot be split, and
    blocks of layers are merged where there are too many. Raises PlanError for a ``minibatch_size`` below
    1 and for more than 4096 devices.
    """
    size = problem.profile.batch_size if minibatch_size is None else check_minibatch_size(minibatch_size)
    problem.check_devices("pipedream", _MOST_DEVICES)
    hierarchy = derive_hierarchy(problem.cluster)
    hierarchy = hierarchy.flatten() if flat else hierarchy
    chain = _limit_blocks(without_unsplittable_cuts(problem.chain), hierarchy)
    activations = chain.crossing_bytes * (size / chain.batch_size)
    _, cut = find_stages(np.add(*chain.block_seconds(size)), chain.parameter_bytes, activations, hierarchy)
    bounds = [*(stage.first for stage in cut), len(chain.parameter_bytes)]
    devices = [sorted(hierarchy.devices[index] for index in stage.indices) for stage in cut]
    stages = make_stages(chain, bounds, devices)
    found = problem.evaluate_all_sizes(stages, "PipeDream's formulas")
    if not found:
        return None
    prediction = predict_throughput(stages, problem.profile, hierarchy, size)
    return PlannerResult(min(found, key=lambda c: c.seconds), pipedream=prediction)


def _limit_blocks(chain: Chain, hierarchy: Hierarchy) -> Chain:
    """Return the chain with blocks merged until the dynamic program takes few enough steps."""
    blocks = len(chain.parameter_bytes)
    while blocks > _LEAST_BLOCKS and _count_steps(blocks, hierarchy.levels) > _MOST_STEPS:
        blocks = max(_LEAST_BLOCKS, math.floor(blocks * 0.9))
    return coarsen(chain, blocks)


def _count_steps(blocks: int, levels: Sequence[Level]) -> int:
    """Return the most stages that ``find_stages`` tries for this many blocks, over all levels."""
    rows = [1 if number == len(levels) else blocks for number in range(1, len(levels) + 1)]
    return sum(row * blocks**2 * level.count**2 for row, level in zip(rows, levels, strict=True))


# --- The dynamic program over the levels of a cluster, innermost first


@dataclass(frozen=True)
class FoundStage:
    """A stage: blocks ``first`` to ``end`` (exclusive) on these ``indices`` of the hierarchy's device order."""

    first: int
    end: int
    indices: tuple[int, ...]


def find_stages(
    seconds: Floats, parameter_bytes: Floats, activation_bytes: Floats, hierarchy: Hierarchy
) -> tuple[float, tuple[FoundStage, ...]]:
    """Return A^L(0 -> N, m_L) in seconds, and the stages of a plan that reaches it, in order.

    ``seconds`` [N]: forward and backward of a minibatch (T_l). ``parameter_bytes`` [N]: w_l. ``activation_bytes``
    [N - 1]: of a minibatch, those that cross the cut after each block but the last (a_s).

    A^k(i -> j, m) is the smaller one of two. The first is T^k(i -> j, m): one stage on all m components. The second is
    what section 3.1 prints: a pipeline before one last stage. (With the second alone no level could be a single stage,
    which section 4 has as PipeDream's data parallelism.) Of equally fast plans the single stage is taken, else the one
    with the fewest components for the last stage, then the latest cut. A stage that is a pipeline within each of its
    components becomes several stages, each with replicas in every component. All devices are used; memory and latency
    do not count.
    """
    blocks, parameters = len(seconds), runs(prefix_sums(parameter_bytes))
    inner = runs(prefix_sums(seconds))
    solved = list[list[Partition]]()  # of each level, those of the pipelines that begin with each block
    for number, level in enumerate(hierarchy.levels, 1):
        counts = np.arange(1, level.count + 1)
        rows = np.array([replicated_seconds(inner, parameters, level.bandwidth, int(m)) for m in counts])
        send = np.concatenate([[0.0], 2 * activation_bytes / level.bandwidth, [0.0]])
        first_blocks = blocks if number < len(hierarchy.levels) else 1  # the last level has pipelines from block 0 only
        ways = _level_ways(level.count)
        solved.append([partition(rows, ways, boundary_bytes=send, begin=first) for first in range(first_blocks)])
        inner = np.array([found.values[level.count] for found in solved[-1]])

    def unwind(level: int, first: int, end: int, components: Sequence[tuple[int, ...]]) -> Iterator[FoundStage]:
        """Yield the stages of A^level of the blocks ``first`` to ``end``, which runs in each of the ``components``."""
        if level == 0:
            yield FoundStage(first, end, tuple(sorted(index for component in components for index in component)))
            return
        size, table = hierarchy.sizes[level - 1], solved[level - 1][first]
        for stage in table.stages(hierarchy.levels[level - 1].count, end):
            own = range(table.before[stage.way], table.state[stage.way])
            parts = [whole[c * size : (c + 1) * size] for whole in components for c in own]
            yield from unwind(level - 1, stage.first, stage.end, parts)

    indices = tuple(range(len(hierarchy.devices)))
    return float(inner[0, -1]), tuple(unwind(len(solved), 0, blocks, (indices,)))


def _level_ways(count: int) -> Ways:
    """Return the ways to end with a stage on some of m components: the only stage, on all, or one after others."""
    m, last = (part + 1 for part in np.nonzero(np.tri(count, dtype=np.bool_)))
    alone = m == last
    order = np.lexsort((last, ~alone, m))
    link = np.stack([np.zeros(len(m)), np.where(alone, 0.0, 1.0)], axis=1)  # ``send`` is in seconds
    return Ways.of_arrays(count + 1, m[order], (m - last)[order], last[order] - 1, link=link[order])
