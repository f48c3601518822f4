"""Planner "best": every candidate there is, ranked by the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dapple_tf.planner.baselines import baseline_candidates, equal_replica_candidates, fitted_baseline_candidates, refit
from dapple_tf.planner.cost_tables import CostTables
from dapple_tf.planner.dapple import choose_by_formula
from dapple_tf.planner.micro_batch_sizes import promising_sizes
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.pricing import simulate_found_plans
from dapple_tf.planner.refine import refine
from dapple_tf.planner.search import SearchResult, search_by_bound
from dapple_tf.planner.search_space import SearchSpace, halve_cluster

# How much work a search may do: labels x what may follow them, and simulated events.
_TRANSITIONS = 24_000_000
_EVENTS = 4_000_000
_RESULTS = 2048
_REFINED, _TRIES = 3, 40
_UNEVEN_SIZES, _FEW_SIZES = 2, 4
_TRIES_OF_A_PART = 40_000  # over the number of devices, where only a part was searched


def plan_best(problem: PlanningProblem) -> PlannerResult | None:
    """The plan with the least simulated step among DP, straight, every two-stage split and the search's plans.

    The search (DAPPLE's, section IV.C, over any number of devices) goes by a lower bound of the simulated step, so it
    says whether some plan that it left out could be better; where one could, the best are refined by small moves. None
    where nothing fits the memory.
    """
    candidates = baseline_candidates(problem)
    if by_formula := choose_by_formula(problem, candidates):
        candidates.append(by_formula.chosen)
    whole = all(space.complete for space in problem.search_spaces)
    if not whole:
        candidates += fitted_baseline_candidates(problem)
    sizes = promising_sizes(problem, candidates)
    unseen = math.inf if whole and len(sizes) == len(problem.micro_batch_sizes) else 0.0
    for size in sizes:
        for space in problem.search_spaces:
            tables = problem.cost_tables(space, size)
            width = max(1, min(512, _TRANSITIONS // space.search_steps))
            for origin, stages in (("search", None), ("two stages", 2)):
                ceiling = min((c.seconds for c in candidates), default=math.inf)
                found = search_by_bound(tables, ceiling=ceiling, width=width, results=_RESULTS, max_stages=stages)
                better, least_unseen = _price(problem, space, tables, size, found, ceiling, origin)
                candidates += better
                if stages is None:
                    unseen = min(unseen, least_unseen)
                if least_unseen >= ceiling:
                    break  # nothing was left out, plans of two stages neither
    if not whole:
        candidates += [c for found in _fastest(candidates) for c in refit(problem, found)]
        candidates += equal_replica_candidates(problem, sizes[:_UNEVEN_SIZES])
    # Searching again takes about as long as searching did: where that was long, only what was searched in part is.
    if (not whole or len(sizes) <= _FEW_SIZES) and unseen < min((c.seconds for c in candidates), default=math.inf):
        candidates += _on_fewer(problem)
    if unseen < min((c.seconds for c in candidates), default=math.inf) * (1 - 1e-9):
        candidates += [
            c for found in _fastest(candidates) for c in problem.evaluate_all_sizes(found.stages, found.origin)
        ]
        tries = _TRIES if whole else _TRIES_OF_A_PART // problem.cluster.devices
        candidates += [refine(problem, candidate, tries) for candidate in _fastest(candidates)]
    return rank_candidates(candidates, unseen)


def _on_fewer(problem: PlanningProblem) -> list[Candidate]:
    """The best on the first part of the devices, server by server: more devices shall never make a plan slower."""
    fewer = halve_cluster(problem.cluster)
    if fewer is None:
        return []
    decision = plan_best(replace(problem, cluster=fewer))
    found = decision and problem.evaluate(
        decision.chosen.stages, decision.chosen.micro_batch_size, decision.chosen.origin
    )
    return [found] if found else []


def _fastest(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest few, of different numbers of replicas."""
    kinds: dict[tuple[int, ...], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        kinds.setdefault(tuple(stage.replicas for stage in candidate.stages), candidate)
    return list(kinds.values())[:_REFINED]


def _price(
    problem: PlanningProblem,
    space: SearchSpace,
    tables: CostTables,
    size: int,
    found: SearchResult,
    ceiling: float,
    origin: str,
) -> tuple[list[Candidate], float]:
    """The best of the plans found, if it is below the ceiling, and the least bound of those not looked at."""
    fastest = simulate_found_plans(tables, found, ceiling, problem.schedule, _EVENTS)
    least_left = found.scores[fastest.simulated] if fastest.simulated < len(found) else math.inf
    unseen = min(found.exhaustive_below, least_left)
    if fastest.row < 0:
        return [], unseen
    stages = problem.stage_plans(space, found.plan(fastest.row))
    return [Candidate(stages, size, fastest.best.schedule, fastest.best.seconds, origin)], unseen


def rank_candidates(candidates: Iterable[Candidate], unseen: float) -> PlannerResult | None:
    """The fastest, and the fastest of every other origin; ``unseen``: the least bound of what was not looked at."""
    ranked = sorted(candidates, key=lambda c: (c.seconds, len(c.stages), sum(stage.replicas for stage in c.stages)))
    if not ranked:
        return None
    kinds: dict[str, Candidate] = {}
    for candidate in ranked[1:]:
        if candidate.stages != ranked[0].stages:
            kinds.setdefault(candidate.origin, candidate)
    return PlannerResult(ranked[0], tuple(kinds.values()), proven_optimal=unseen >= ranked[0].seconds * (1 - 1e-9))
