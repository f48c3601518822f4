"""Planners without a search: "gpipe" and "torchgpipe", straight pipelines of balanced stages, and "dp".

Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.planner.baselines import data_parallel, even_stages
from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.balanced_cuts import even_starts
from dapple_tf.planner.search.chunk_shapes import most_stages
from dapple_tf.simulator.arrays import Floats
from dapple_tf.wording import format_count


@planner("gpipe", unequal=True, shares_devices=True)
def plan_gpipe(problem: PlanningProblem, *, stages: int | None = None) -> PlannerResult | None:
    """Return even stages (torchgpipe's block partition) of one device each; by default as many as possible.

    All forwards come first, unless the problem names another schedule, which may have several stages on each device.
    None if it does not fit the memory. Raises PlanError for more stages than the devices can run, or than blocks of
    layers, and ScheduleError for a number of stages that the schedule is not for.
    """
    scheduled = replace(problem, schedule=problem.schedule_or("gpipe"))
    blocks = len(problem.chain.parameter_bytes)
    most = most_stages(scheduled) if scheduled.shares_devices else min(problem.cluster.devices, blocks)
    count = most if stages is None else stages
    if not 1 <= count <= most:
        raise PlanError(
            f"stages={count}: {problem.profile.model!r} on {format_count(problem.cluster.devices, 'device')} can have "
            f"at least 1 and at most {format_count(most, 'stage')}; its "
            f"{format_count(len(problem.profile.layers), 'layer')} form {format_count(blocks, 'block')} that can be a "
            "stage"
        )
    workers = (
        ScheduleSpec.parse(scheduled.schedule).worker_map(count)
        if scheduled.shares_devices
        else WorkerMap.one_per_stage(count)
    )
    found = scheduled.evaluate_all_sizes(even_stages(scheduled, workers), "straight")
    return PlannerResult.fastest(found)


@planner("dp", unequal=True)
def plan_dp(problem: PlanningProblem) -> PlannerResult | None:
    """Return one stage on all devices, with the number of micro-batches that is fastest in the simulator.

    AllReduce comes after the last backward, or runs during it if the problem has ``overlap``. None if it does not fit.
    """
    found = problem.evaluate_all_sizes(data_parallel(problem), "DP")
    return PlannerResult.fastest(found)


_BALANCES = ("time", "size")


@planner("torchgpipe", unequal=True, candidate=True)
def plan_torchgpipe(problem: PlanningProblem, *, by: str = "time", stages: int | None = None) -> PlannerResult | None:
    """Return stages of one device each, the largest as small as possible; None if they do not fit the memory.

    ``by``: "time" is the seconds of forward and backward (``balance_by_time``); "size" is the bytes that a micro-batch
    keeps, plus the bytes of the parameters times the number of values per weight: the weight, its gradient and the
    optimizer's slots (``balance_by_size`` with this number as ``param_scale``). ``stages``: partitions; by default as
    many as there are devices, or blocks of layers if these are fewer. The schedule is GPipe's unless the problem names
    another; the micro-batch size, which users of torchgpipe choose, is the fastest in the simulator.

    torchgpipe solves the block partition by a heuristic of Bárány and Grinberg, which lowers the spread of the sums and
    may miss the optimum; here it is solved exactly. torchgpipe also re-computes all micro-batches but the last. That is
    left out: the problem's ``recompute`` is for all micro-batches. Raises PlanError for another ``by``, and for more
    stages than devices or blocks.
    """
    if by not in _BALANCES:
        raise PlanError(f"by={by!r}: torchgpipe balances by 'time' or 'size'")
    blocks = len(problem.chain.parameter_bytes)
    most = min(problem.cluster.devices, blocks)
    count = most if stages is None else stages
    if not 1 <= count <= most:
        raise PlanError(
            f"stages={count}: {problem.profile.model!r}, with {format_count(blocks, 'block')} of layers, on "
            f"{format_count(problem.cluster.devices, 'device')} can have at least 1 and at most "
            f"{format_count(most, 'stage')}"
        )
    schedule = problem.schedule_or("gpipe")
    found = []
    for size in problem.micro_batch_sizes:
        costs = ChainCosts(problem, problem.chain, size)
        starts = even_starts(_block_costs(costs, by), count)
        balanced = make_stages(costs.chain, [*starts, blocks], ((device,) for device in range(count)))
        found.append(problem.evaluate(balanced, size, "torchgpipe", schedule))
    return PlannerResult.fastest(found)


def _block_costs(costs: ChainCosts, by: str) -> Floats:
    """Return the seconds or the bytes of each block for a micro-batch; ``by``: "time" or "size"."""
    chain = costs.chain
    if by == "time":
        return np.add(*chain.block_seconds(costs.size))
    kept: Floats = chain.stash_bytes * (costs.size / chain.batch_size)
    return kept + chain.parameter_bytes * costs.problem.values_per_weight
