"""Planner "dapple": the paper's own, by its formulas (DAPPLE, section IV)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from dapple_tf.planner.baselines import baseline_candidates, baseline_stages, data_parallel
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.row_shares import share_rows
from dapple_tf.planner.search.fit_cuts import ORIGIN as UNEQUAL
from dapple_tf.planner.search.fit_cuts import find_unequal_stages
from dapple_tf.planner.search.formula_search import make_cost_tables, make_found_stages, search_by_formula
from dapple_tf.planner.search.search_space import SearchSpace, find_search_spaces
from dapple_tf.plans import StagePlan
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.interrupts import check_stop

_SEARCH_STEPS = 2_000_000  # of one search: the width (labels of a state) times the steps of a search of width 1
_MOST_SEARCH_STEPS = 300_000_000  # over all sizes
_MAX_WIDTH = 512
_KNOWN = 3  # known candidates whose latency is computed for the ceiling of the search


@planner("dapple", unequal=True, native=True)
def plan_dapple(problem: PlanningProblem) -> PlannerResult | None:
    """Return the plan with the least latency by formulas 1 to 3; None if nothing fits the memory.

    DP and straight plans are in the search space. The formulas do not model waiting for memory. So if there are plans
    whose stages can hold the warm-up of policy A, only these count; else those whose stages can hold one micro-batch.
    The schedule is the fastest policy in the simulator. The paper does not have devices of different kinds. For these
    the plan with the least latency is chosen among DP, even pipelines and the stages of ``find_unequal_stages``.
    """
    if not problem.cluster.is_uniform:
        return _plan_unequal(problem)
    known = baseline_candidates(problem)  # plans that fit; the search looks for less than their least latency
    spaces = find_search_spaces(problem.chain, problem.cluster)
    sizes = _promising_sizes(problem, spaces, known)
    fractions = replace(problem, whole_rows=False)  # the formulas and the search's tables count fractions of rows
    ceiling = _least_latency(fractions, [c for c in known if ":D=" not in c.schedule])
    for require_warm_up, limit in ((True, ceiling), (True, math.inf), (False, math.inf)):
        if found := _search(problem, spaces, sizes, limit, require_warm_up):
            candidate, latency = found
            return PlannerResult(candidate, tuple(c for c in known if c.origin == "DP"), formula_seconds=latency)
    return None


def _plan_unequal(problem: PlanningProblem) -> PlannerResult | None:
    """Return the result of ``plan_dapple`` on unequal devices.

    Plans are simulated in the order of their latency, until one is found that can hold the warm-up of policy A.
    """
    alone = replace(problem, contention=False)  # the formulas do not model contention, and simulating it takes long
    fractions = replace(alone, whole_rows=False)
    known = [(size, stages, origin) for stages, origin in baseline_stages(alone) for size in alone.micro_batch_sizes]
    known += [(size, stages, UNEQUAL) for size, stages in find_unequal_stages(problem)]
    ranked = sorted(((formula_latency(fractions, stages, size), i) for i, (size, stages, _) in enumerate(known)))
    limited: tuple[float, Candidate] | None = None  # the first plan whose warm-up is limited by memory
    for latency, i in ranked:
        size, stages, origin = known[i]
        if (candidate := alone.evaluate(stages, size, origin)) is not None:
            if ":D=" not in candidate.schedule:
                break
            limited = limited or (latency, candidate)
    else:
        if limited is None:
            return None
        latency, candidate = limited
    whole = (alone.evaluate(data_parallel(alone), size, "DP") for size in alone.micro_batch_sizes)
    others = (c for c in whole if c is not None and c.stages != candidate.stages)
    chosen, *runners_up = (_simulate_again(problem, c) for c in (candidate, *itertools.islice(others, 1)))
    return PlannerResult(chosen, tuple(runners_up), formula_seconds=latency)


def _simulate_again(problem: PlanningProblem, candidate: Candidate) -> Candidate:
    """Return a candidate that fits under the fastest policy of this problem."""
    found = problem.evaluate(
        candidate.stages, candidate.micro_batch_size, candidate.origin, recompute=candidate.recompute
    )
    assert found is not None, "it fits, and contention changes only its seconds"
    return found


def _promising_sizes(
    problem: PlanningProblem, spaces: Sequence[SearchSpace], candidates: Iterable[Candidate]
) -> tuple[int, ...]:
    """Return the micro-batch sizes in the order in which to search them.

    The size of the fastest known candidate is first. A good plan found early lowers the ceiling of all later searches.
    If searching every size takes too long, only the first sizes are returned, but at least two.
    """
    best = dict.fromkeys(problem.micro_batch_sizes, math.inf)
    for candidate in candidates:
        best[candidate.micro_batch_size] = min(best[candidate.micro_batch_size], candidate.seconds)
    count = max(2, _MOST_SEARCH_STEPS // sum(space.search_steps for space in spaces))
    return tuple(sorted(best, key=lambda size: (best[size], size)))[:count]


def _search(
    problem: PlanningProblem,
    spaces: Sequence[SearchSpace],
    sizes: Iterable[int],
    ceiling: float,
    require_warm_up: bool,
) -> tuple[Candidate, float] | None:
    """Return the plan with the least latency below ``ceiling``, and its latency (seconds)."""
    best: tuple[Candidate, float] | None = None
    for size in sizes:
        for space in spaces:
            check_stop()
            width = max(1, min(_MAX_WIDTH, _SEARCH_STEPS // space.search_steps))
            tables = make_cost_tables(problem, space, size)
            for found in search_by_formula(tables, ceiling=ceiling, width=width, require_warm_up=require_warm_up):
                candidate = problem.evaluate(make_found_stages(problem, space, found), size, "DAPPLE's formulas")
                if candidate is not None:
                    best, ceiling = (candidate, found.score), found.score
    return best


def _least_latency(problem: PlanningProblem, candidates: Iterable[Candidate]) -> float:
    """Return a little more than the least latency of the fastest few ``candidates`` that use all devices."""
    total = problem.cluster.devices
    on_all_devices = [c for c in candidates if sum(stage.replicas for stage in c.stages) == total]
    fastest = sorted(on_all_devices, key=lambda c: c.seconds)[:_KNOWN]
    return min((formula_latency(problem, c.stages, c.micro_batch_size) for c in fastest), default=math.inf) * (1 + 1e-9)


def formula_latency(problem: PlanningProblem, stages: Sequence[StagePlan], micro_batch_size: int) -> float:
    """Return the latency of stages by formulas 1 to 3 (seconds).

    Stages without shares get them by the speeds of their devices. Replicas compute fractions of rows, as in the paper,
    unless the problem has ``whole_rows``.
    """
    shared = share_rows(stages, micro_batch_size, problem.profile, problem.cluster)
    plan = problem.make_plan(shared, micro_batch_size, "dapple-a", "dapple")
    costs = problem.costs.stage_costs(plan, optimizer_slots=problem.optimizer_slots)
    rows = [(c.forward_seconds, c.backward_seconds, c.exposed_seconds) for c in costs]
    networks = [(c.send_forward_seconds, c.send_backward_seconds, 0.0) for c in costs[:-1]]
    for index, network in enumerate(networks):
        rows.insert(2 * index + 1, network)
    forward, backward, allreduce = np.array(rows).T.copy()
    return pipeline_latency(forward, backward, allreduce, plan.micro_batches)


# --- The pipeline latency, formulas 1 to 3. Arrays have an entry for each stage in pipeline order: compute stages at
# even indices, and between them network stages at odd indices, whose AllReduce is 0 (section IV.A). The search has the
# same in C++ (formula.h); a test holds both equal.


def pivot_stage(forward: Floats, backward: Floats, micro_batches: int) -> int:
    """Return Q, the stage with the fewest bubbles, by formula 3: from the last stage to the first.

    A stage takes over from Q if its steady phase, (M - 1)(F + B), is longer than that of Q and the F + B between them.
    The comparison has a tolerance for rounding errors, so of stages with equal F + B the last one is Q: their sums over
    layers may differ in the last digits.
    """
    last = len(forward) - 1
    pivot, steady, between = last, (micro_batches - 1) * (forward[last] + backward[last]), 0.0
    for stage in range(last - 1, -1, -1):
        both = forward[stage] + backward[stage]
        if (micro_batches - 1) * both > (steady + between) * (1 + 1e-12):
            pivot, steady, between = stage, (micro_batches - 1) * both, 0.0
        else:
            between += both
    return pivot


def pipeline_latency(forward: Floats, backward: Floats, allreduce: Floats, micro_batches: int) -> float:
    """Return L = Tw + Ts + Te, the seconds of one step (formulas 1 and 2).

    As printed, formula 2 subtracts the backward of the pivot stage from its own AllReduce (its case s >= Q includes
    s = Q). With one stage that would lose the last backward, so here s = Q belongs to the other case, as in Fig. 4.
    """
    pivot = pivot_stage(forward, backward, micro_batches)
    warm_up = np.cumsum(forward[: pivot + 1])[-1]
    steady = (micro_batches - 1) * (forward[pivot] + backward[pivot])
    before = allreduce[pivot::-1] + np.cumsum(backward[pivot::-1])
    behind = allreduce[pivot + 1 :] - np.cumsum(backward[pivot:])[1:]
    return float(warm_up + steady + max(0.0, *before, *behind))
