"""Planner "torchgpipe": a GPipe pipeline balanced by time or by size (Kim et al. 2020, torchgpipe)."""

from __future__ import annotations

import itertools

from dapple_tf.errors import PlanError
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.balanced_cuts import even_starts
from dapple_tf.plans import StagePlan
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.memory import values_per_weight

_BALANCES = ("time", "size")


@planner("torchgpipe", unequal=True, candidate=True)
def plan_torchgpipe(problem: PlanningProblem, *, by: str = "time", stages: int | None = None) -> PlannerResult | None:
    """Return the partition into stages of one device whose largest is least; None if it does not fit the memory.

    ``by``: "time" is the seconds of forward and backward (``balance_by_time``); "size" is the bytes that a micro-batch
    keeps, plus those of the parameters times the values that each weight has, its gradient and the optimizer's slots
    included (``balance_by_size`` with that ``param_scale``). ``stages``: partitions; by default as many as there are
    devices, or blocks of layers if these are fewer. The schedule is GPipe's unless the problem names another; the
    micro-batch size, which users of torchgpipe choose, is the fastest in the simulator.

    torchgpipe solves the block partition by a heuristic of Bárány and Grinberg, which lowers the spread of the sums and
    may miss the optimum; here it is exact. Left out is its checkpointing of all micro-batches but the last: the
    problem's ``recompute`` is of all. Raises PlanError for another ``by``, and for more stages than devices or blocks.
    """
    if by not in _BALANCES:
        raise PlanError(f"by={by!r}: torchgpipe balances by 'time' or 'size'")
    blocks = len(problem.chain.parameter_bytes)
    most = min(problem.cluster.devices, blocks)
    count = most if stages is None else stages
    if not 1 <= count <= most:
        raise PlanError(
            f"stages={count}: {problem.profile.model!r}, with {blocks} blocks of layers, on {problem.cluster.devices} "
            f"devices can have 1 to {most} stages"
        )
    schedule = "gpipe" if problem.schedule == "auto" else problem.schedule
    return PlannerResult.fastest(
        problem.evaluate(_balance(problem, _block_costs(problem, by, size), count), size, "torchgpipe", schedule)
        for size in problem.micro_batch_sizes
    )


def _block_costs(problem: PlanningProblem, by: str, size: int) -> Floats:
    """Return the seconds of each block for a micro-batch of ``size`` samples, or its bytes."""
    chain = problem.chain
    if by == "time":
        forward, backward = chain.block_seconds(size)
        return forward + backward
    return chain.stash_bytes * (size / chain.batch_size) + chain.parameter_bytes * values_per_weight(
        problem.optimizer_slots
    )


def _balance(problem: PlanningProblem, costs: Floats, count: int) -> tuple[StagePlan, ...]:
    """Return ``count`` stages whose largest sum of ``costs`` is least, in the order of the devices."""
    positions = problem.chain.positions
    bounds = [positions[start] for start in even_starts(costs, count)] + [positions[-1]]
    return tuple(StagePlan(first, end - 1, (device,)) for device, (first, end) in enumerate(itertools.pairwise(bounds)))
