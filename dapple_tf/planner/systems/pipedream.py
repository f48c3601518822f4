"""Planner "pipedream": PipeDream's hierarchical dynamic program (PipeDream, section 3.1)."""

from __future__ import annotations

import math

from dapple_tf.errors import PlanError
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.hierarchy import Hierarchy, derive_hierarchy
from dapple_tf.planner.systems.pipedream_formula import check_minibatch_size, predict_throughput
from dapple_tf.planner.systems.pipedream_search import BlockCosts, count_steps, find_stages
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.linearise import Chain, without_unsplittable_cuts

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
    least bandwidth. They know neither memory nor the micro-batches of a synchronous step: the micro-batch size and the
    schedule are the fastest in the simulator. Cuts that only stages of equal replica counts could have are not used,
    and blocks of layers are merged where there are too many. Raises PlanError for a ``minibatch_size`` below 1 and for
    more than 4096 devices.
    """
    size = problem.profile.batch_size if minibatch_size is None else check_minibatch_size(minibatch_size)
    if problem.cluster.devices > _MOST_DEVICES:
        raise PlanError(
            f"the cluster has {problem.cluster.devices} devices; planner 'pipedream' is for at most {_MOST_DEVICES}: "
            "use planner 'best'"
        )
    hierarchy = derive_hierarchy(problem.cluster)
    hierarchy = hierarchy.flatten() if flat else hierarchy
    stages = _find_stages(_limit_blocks(without_unsplittable_cuts(problem.chain), hierarchy), hierarchy, size)
    found = problem.evaluate_all_sizes(stages, "PipeDream's formulas")
    if not found:
        return None
    prediction = predict_throughput(stages, problem.profile, hierarchy, size)
    return PlannerResult(min(found, key=lambda c: c.seconds), pipedream=prediction)


def _find_stages(chain: Chain, hierarchy: Hierarchy, minibatch_size: int) -> tuple[StagePlan, ...]:
    """Return the stages of the dynamic program, with layers and devices."""
    forward, backward = chain.block_seconds(minibatch_size)
    activations = chain.crossing_bytes * (minibatch_size / chain.batch_size)
    _, found = find_stages(BlockCosts(forward + backward, chain.parameter_bytes, activations), hierarchy)
    return tuple(
        StagePlan(
            chain.positions[stage.first],
            chain.positions[stage.last + 1] - 1,
            tuple(sorted(hierarchy.devices[index] for index in stage.indices)),
        )
        for stage in found
    )


def _limit_blocks(chain: Chain, hierarchy: Hierarchy) -> Chain:
    """Return the chain with blocks merged until the dynamic program takes few enough steps."""
    blocks = len(chain.parameter_bytes)
    fewer = blocks
    while fewer > _LEAST_BLOCKS and count_steps(fewer, hierarchy.levels) > _MOST_STEPS:
        fewer = max(_LEAST_BLOCKS, math.floor(fewer * 0.9))
    return chain if fewer == blocks else coarsen(chain, fewer)
