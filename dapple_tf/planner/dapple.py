"""Planner "dapple": the paper's own, by its formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from dapple_tf.planner.baselines import baseline_candidates
from dapple_tf.planner.latency import pipeline_latency
from dapple_tf.planner.micro_batch_sizes import promising_sizes
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.search import search_by_formula
from dapple_tf.simulator.costs import stage_costs

_TRANSITIONS = 2_000_000
_KNOWN = 3


def plan_dapple(problem: PlanningProblem) -> PlannerResult | None:
    """The plan with the least latency by formulas 1 to 3 (DAPPLE, section IV); None where nothing fits.

    DP and straight plans are among those searched. Where some plan's stages can hold the warm-up of policy A, only such
    plans count, since the formulas know no waiting for memory; else those that hold one micro-batch. The schedule is
    the faster policy in the simulator.
    """
    return choose_by_formula(problem, baseline_candidates(problem))


def choose_by_formula(problem: PlanningProblem, known: Sequence[Candidate]) -> PlannerResult | None:
    """``plan_dapple``, with the help of plans that are ``known`` to fit."""
    sizes = promising_sizes(problem, known)
    ceiling = _least_latency(problem, [c for c in known if ":D=" not in c.schedule])
    for warm, limit in ((True, ceiling), (True, math.inf), (False, math.inf)):
        if chosen := _search(problem, sizes, limit, warm):
            candidate, latency = chosen
            return PlannerResult(candidate, tuple(c for c in known if c.origin == "DP"), formula_seconds=latency)
    return None


def _search(
    problem: PlanningProblem, sizes: Iterable[int], ceiling: float, warm: bool
) -> tuple[Candidate, float] | None:
    """The plan with the least latency below ``ceiling``, and its latency."""
    best: tuple[Candidate, float] | None = None
    for size in sizes:
        for space in problem.search_spaces:
            width = max(1, min(512, _TRANSITIONS // space.search_steps))
            tables = problem.cost_tables(space, size)
            for found in search_by_formula(tables, ceiling=ceiling, width=width, results=1, require_warm_up=warm).plans:
                candidate = problem.evaluate(problem.stage_plans(space, found), size, "DAPPLE's formulas")
                if candidate is not None:
                    best, ceiling = (candidate, found.score), found.score
    return best


def _least_latency(problem: PlanningProblem, candidates: Iterable[Candidate]) -> float:
    """The least latency, by formula 2, of the fastest few ``candidates`` that use all devices, and a bit more."""
    total = problem.cluster.devices
    everywhere = [c for c in candidates if sum(stage.replicas for stage in c.stages) == total]
    fastest = sorted(everywhere, key=lambda c: c.seconds)[:_KNOWN]
    return min((_latency(problem, candidate) for candidate in fastest), default=math.inf) * (1 + 1e-9)


def _latency(problem: PlanningProblem, candidate: Candidate) -> float:
    plan = problem.make_plan(candidate.stages, candidate.micro_batch_size, candidate.schedule, "dapple")
    costs = stage_costs(plan, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots)
    rows = [(c.forward_seconds, c.backward_seconds, c.exposed_seconds) for c in costs]
    sends = [(c.send_forward_seconds, c.send_backward_seconds, 0.0) for c in costs[:-1]]
    for place, send in enumerate(sends):
        rows.insert(2 * place + 1, send)
    forward, backward, allreduce = np.array(rows).T.copy()
    return pipeline_latency(forward, backward, allreduce, plan.micro_batches)
