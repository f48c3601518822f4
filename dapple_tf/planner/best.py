"""Planner "best": the plan with the least simulated step among candidates of several origins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dapple_tf.errors import PlanError
from dapple_tf.planner.baselines import (
    equal_replica_candidates,
    fitted_baseline_candidates,
    leading_baselines,
    refit_cuts,
)
from dapple_tf.planner.chunk_search import interleaved_candidates, plan_chunked
from dapple_tf.planner.comparators import (
    comparator_candidates,
    faster_with_even_layers,
    interleaved_comparator_candidates,
    is_beyond_search,
)
from dapple_tf.planner.compute_bound import least_compute_seconds
from dapple_tf.planner.cost_tables import CostTables
from dapple_tf.planner.dapple import choose_by_formula, choose_unequal
from dapple_tf.planner.device_order import worst_connected_server
from dapple_tf.planner.gpipe import plan_gpipe
from dapple_tf.planner.layout_search import counts_contention
from dapple_tf.planner.memory_fit import fit_memory
from dapple_tf.planner.memory_shortage import may_bind
from dapple_tf.planner.micro_batch_sizes import promising_sizes
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.ranking import rank_candidates
from dapple_tf.planner.refine import refine
from dapple_tf.planner.search import search_by_bound
from dapple_tf.planner.search_space import SearchSpace, halve_cluster, reaches_all_assignments
from dapple_tf.planner.searched_order import plan_searched
from dapple_tf.planner.single_moves import move_singly
from dapple_tf.planner.step_simulation import POLICIES, simulate_found_plans
from dapple_tf.planner.unequal_refine import refine_unequal
from dapple_tf.planner.unequal_search import find_unequal_stages, unequal_candidates
from profiler.cluster import Cluster
from profiler.device_costs import profile_on

# The work of one search: labels times what may follow them, plans returned, and simulated events.
_SEARCH_STEPS = 24_000_000
_MAX_WIDTH = 512
_RESULTS = 2048
_EVENTS = 4_000_000
# The work of the steps after it: plans refined, moves tried on each, and micro-batch sizes.
_REFINED = 3
_LOCAL_EVENTS = 1_000_000  # of the local search: times 16, and twice more for each of the 17th to 128th device
_LEAST_DEVICES, _MOST_DEVICES = 16, 128
_UNEQUAL_EVENTS = 6_000_000  # of each local search on devices of different kinds, for each device
# Local searches: at first independent ones, with other random numbers, then some that start from what was found before.
# Reason: which plan a search ends at depends on chance, and several searches are better than one that is longer. On 32
# and 64 equal devices steps were up to 2.2% shorter on average over seeds than with two searches in turn, in the same
# time; on few devices several would take too long. On unequal devices two in turn ended up to 10% above the best known.
_INDEPENDENT_SEARCHES = 2
_LEAST_FOR_SEVERAL = 17  # equal devices; on fewer there is one independent search
_LATER_SEARCHES_UNEQUAL = 3  # on equal devices one, if the searches before have found a faster plan
_SMALL_PROBLEM = 64  # blocks times devices; below that the local search gets proportionally fewer events
_MOVES = 40  # of single cuts and devices, where the local search does not know the schedule or leaves out contention
_MOST_LEFT_OUT = 16  # servers of a cluster that is also planned without the worst connected one
_EQUAL_REPLICA_SIZES = 2
_FEW_SIZES = 4
_AMPLE = 1e30  # bytes of a device that any plan fits


def plan_best(problem: PlanningProblem, *, chunks: Sequence[int] = (2, 4)) -> PlannerResult | None:
    """Return the fastest plan in the simulator; None if nothing fits the memory.

    Where the schedule is "auto", plans with each number of ``chunks``, stages per device, are considered beside those
    with one, under interleaved 1F1B. Any other schedule says itself which stages share devices. Raises PlanError for
    ``chunks`` below 2. On devices of different kinds the plans searched have one stage per device, unless the schedule
    says otherwise; see ``unequal_candidates``.
    """
    if problem.searches_order:
        return plan_searched(problem, plan_best)
    if problem.shares_devices:
        chunked = plan_chunked(problem) if problem.cluster.is_uniform else _plan_chunked_unequal(problem)
        return faster_with_even_layers(problem, chunked)
    if min(chunks, default=2) < 2:
        raise PlanError(f"chunks={list(chunks)}: one stage per device is always considered, so give numbers from 2 on")
    if not problem.cluster.is_uniform:
        candidates = _unequal_candidates(problem, chunks)
        unsearched = 0.0
    else:
        candidates, unsearched = _one_stage_candidates(problem)
    if problem.schedule == "auto" and chunks:
        # Reason: with few micro-batches the bubble of one stage per device is long, and no search above shortens it.
        least = _least_seconds(candidates)
        found = interleaved_candidates(problem, chunks, least) if problem.cluster.is_uniform else []
        candidates += [c for c in found if c.seconds < least * (1 - 1e-9)]
        least = _least_seconds(candidates) * (1 - 1e-9)
        candidates += interleaved_comparator_candidates(problem, chunks, least)
    fastest = min(candidates, key=lambda c: c.seconds, default=None)
    if fastest is not None and is_beyond_search(problem, fastest):
        unsearched = 0.0  # what else there is beyond the search is not known
    return rank_candidates(candidates, unsearched)


def _unequal_candidates(problem: PlanningProblem, chunks: Sequence[int]) -> list[Candidate]:
    """Return plans on devices of different kinds, of every phase below."""
    candidates = leading_baselines(problem)
    stages = find_unequal_stages(problem)
    candidates += unequal_candidates(problem, stages)
    # Reason: no plan of planner "dapple", of other planners, or on one kind of devices may be faster than the result.
    formula = choose_unequal(problem, stages)
    candidates += [formula.chosen] if formula else []
    candidates += _one_kind_candidates(problem, chunks)
    candidates += comparator_candidates(problem, _least_seconds(candidates) * (1 - 1e-9))
    binds = not problem.recompute and may_bind(problem)
    if binds:
        # Reason: backward that computes activations again is longer, but needs less memory.
        again = replace(problem, recompute=True, ceiling=_least_seconds(candidates))
        candidates += leading_baselines(again)
        if not candidates:
            candidates += unequal_candidates(again, find_unequal_stages(again))
    if problem.schedule not in (*POLICIES, "auto"):
        return [*candidates, *(move_singly(problem, c, _MOVES) for c in _fastest_few(candidates))]
    events = int(_UNEQUAL_EVENTS * max(_LEAST_DEVICES, problem.cluster.devices) * _share_of_events(problem))
    found = [
        candidate
        for seed in range(_INDEPENDENT_SEARCHES)
        for candidate in refine_unequal(problem, candidates, events, seed, may_recompute=binds)
    ]
    candidates += found
    for seed in range(_LATER_SEARCHES_UNEQUAL):
        candidates += refine_unequal(problem, candidates, events, _INDEPENDENT_SEARCHES + seed, may_recompute=binds)
    return candidates


def _one_stage_candidates(problem: PlanningProblem) -> tuple[list[Candidate], float]:
    """Return plans of one stage per device, of every phase below, and the least bound (seconds) of those left out.

    The fastest is proven optimal if no plan of a complete search space can be faster, and if that space has every
    assignment of devices (``reaches_all_assignments``). The effects beside the phases are what removing that one phase
    changed on the published profiles (../shared/profiles, configs A, B and C, with and without overlap), before steps
    were simulated with contention: 144 cases of 2 to 16 devices, all with a complete search space, and 20 *partial*
    cases of 32 and 64 devices, whose search spaces are not complete (VGG-19, GNMT-16, BERT-48 and XLNet-36).
    """
    complete = all(space.complete for space in problem.search_spaces)
    # Reason: DP and straight pipelines must never be faster than the result, and the first ceiling of the search comes
    # from them. Without: 2 of 144 steps are longer, by up to 0.7%.
    candidates = leading_baselines(problem)
    if not candidates:
        candidates = _fitting_candidate(problem)
    # Reason: the plan of planner "dapple" must never be faster than the result. Without: none of the 144 is longer.
    candidates += _formula_candidate(problem, candidates)
    # Reason: no planner of another system must be faster than the result. Without: 2 of 33 steps of the published
    # profiles (../shared/profiles with pipedream/, A, B and C) are longer than PipeDream's, by up to 3.5%.
    candidates += comparator_candidates(problem, _least_seconds(candidates) * (1 - 1e-9))
    if not complete:
        # Reason: a partial space may have few cuts; these pipelines are cut between all blocks. Without: no step of the
        # 20 partial cases is longer.
        candidates += fitted_baseline_candidates(problem)
    sizes = promising_sizes(problem, candidates)
    # Reason: finds most plans, and proves the optimum in 115 of 144 cases. Without the search over any number of stages
    # 29 of 144 steps are longer, by up to 56%, and 15 of the 20 partial ones, by up to 12%. The search over two stages
    # has room for more of those; without it none of the 144 is longer.
    found, unsearched = _search_spaces(problem, problem.search_spaces, sizes, candidates)
    candidates += found
    if not complete or len(sizes) < len(problem.micro_batch_sizes):
        unsearched = 0.0
    binds = not problem.recompute and may_bind(problem)
    if binds and unsearched >= _least_seconds(candidates) * (1 - 1e-9):
        # Reason: the plan is proven to be the fastest that fits; only another of more memory could be faster.
        binds = _memory_costs_time(problem, sizes, candidates)
    if binds:
        # Reason: backward that computes activations again is longer, but needs less memory.
        again = replace(problem, recompute=True)
        candidates += leading_baselines(replace(again, ceiling=_least_seconds(candidates)))
        candidates += _search_spaces(again, problem.search_spaces, sizes, candidates)[0]
    if binds or not reaches_all_assignments(problem.cluster):
        unsearched = 0.0
    if not complete:
        # Reason: a partial search may have merged blocks and left out replica counts. Both phases cut between all
        # blocks, and the second takes every equal replica count. Without one of them: no step of the 20 partial cases
        # is longer.
        candidates += [c for candidate in _fastest_few(candidates) for c in refit_cuts(problem, candidate)]
        candidates += equal_replica_candidates(problem, sizes[:_EQUAL_REPLICA_SIZES])
    # Reason: with more devices the step must never be longer. This searches again, which takes about as long, so it is
    # left out where a complete search had many sizes. Without: no step of all 164 is longer.
    if unsearched < _least_seconds(candidates) and (not complete or len(sizes) <= _FEW_SIZES):
        candidates += _half_cluster_candidate(problem, _least_seconds(candidates))
    if unsearched < _least_seconds(candidates):
        # Reason: with a slow link between two servers most layouts on all servers are slow. So the local search often
        # does not find that a plan without one of the two is faster: 4 of 6 seeds ended 9% to 50% above the best known.
        candidates += _well_connected_candidate(problem, _least_seconds(candidates))
    if unsearched < _least_seconds(candidates) * (1 - 1e-9):
        # Reason: a search stops simulating at a bound, and a good plan may be better at another size. Without: 3 of 144
        # steps are longer, by up to 0.3%, and none of the partial ones.
        candidates += _other_sizes(problem, candidates)
        # Reason: the placement policies reach few placements, and a partial search leaves out more.
        several = problem.cluster.devices >= _LEAST_FOR_SEVERAL and problem.schedule in (*POLICIES, "auto")
        searches = _INDEPENDENT_SEARCHES if several else 1
        found = [c for seed in range(searches) for c in _refined_candidates(problem, candidates, binds, seed)]
        if _least_seconds(found) < _least_seconds(candidates):
            candidates += found
            candidates += _refined_candidates(problem, candidates, binds, searches)
    return candidates, unsearched


def _plan_chunked_unequal(problem: PlanningProblem) -> PlannerResult | None:
    """Return the fastest of the even stages and those whose cuts were searched for equal devices.

    Both are simulated on the devices as they are; the search for cuts takes all devices as equal.
    """
    found = [plan_chunked(problem), plan_gpipe(problem)]
    return rank_candidates(c for result in found if result for c in (result.chosen, *result.runners_up))


def _one_kind_candidates(problem: PlanningProblem, chunks: Sequence[int]) -> list[Candidate]:
    """Return the best plan on the devices of each kind alone: using more kinds must never be slower."""
    found = []
    for kind in dict.fromkeys(problem.cluster.device_kinds):
        cluster, devices = problem.cluster.only_kind(kind)
        profile = profile_on(problem.profile, problem.cluster, devices[0])
        result = plan_best(replace(problem, profile=profile, cluster=cluster), chunks=chunks)
        for candidate in (result.chosen,) if result else ():
            stages = [replace(stage, devices=tuple(devices[d] for d in stage.devices)) for stage in candidate.stages]
            origin, schedule = f"only {kind or 'devices without kind'}", candidate.schedule
            size, again = candidate.micro_batch_size, candidate.recompute
            found.append(problem.evaluate(stages, size, origin, schedule, again))
    return [candidate for candidate in found if candidate is not None]


def _fitting_candidate(problem: PlanningProblem) -> list[Candidate]:
    """Return the plan of the fewest devices, whose stages fit the memory where those of equal compute do not."""
    stages = fit_memory(problem)
    if stages is None or sum(stage.replicas for stage in stages) > problem.cluster.devices:
        return []
    found = problem.evaluate(stages, problem.micro_batch_sizes[0], "straight")
    return [found] if found else []


def _formula_candidate(problem: PlanningProblem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return what planner "dapple" chooses."""
    result = choose_by_formula(problem, candidates)
    return [result.chosen] if result else []


def _search_spaces(
    problem: PlanningProblem,
    spaces: Sequence[SearchSpace],
    sizes: Sequence[int],
    known: Sequence[Candidate],
    memory_bytes: float | None = None,
) -> tuple[list[Candidate], float]:
    """Search every space at every micro-batch size, below the fastest of the ``known`` candidates.

    ``memory_bytes``: of a device, where it is not the cluster's. Returns what is faster, and the least bound (seconds)
    of the plans that were not simulated.
    """
    ceiling, unsearched, candidates = _least_seconds(known), math.inf, list[Candidate]()
    for size in sizes:
        for space in spaces:
            tables = problem.cost_tables(space, size)
            if memory_bytes is not None:
                tables = tables._replace(memory_bytes=memory_bytes)
            for origin, max_stages in (("search", None), ("two stages", 2)):
                found, least = _search(problem, space, size, tables, origin, max_stages, ceiling)
                candidates += found
                if max_stages is None:
                    unsearched = min(unsearched, least)
                if least >= ceiling:
                    break  # every plan below the ceiling was simulated, those of two stages too
                ceiling = min(ceiling, _least_seconds(candidates))
            ceiling = min(ceiling, _least_seconds(candidates))
    return candidates, unsearched


def _search(
    problem: PlanningProblem,
    space: SearchSpace,
    size: int,
    tables: CostTables,
    origin: str,
    max_stages: int | None,
    ceiling: float,
) -> tuple[list[Candidate], float]:
    """Return the fastest plan of one search if it is below the ceiling, and the least bound of those not simulated."""
    width = max(1, min(_MAX_WIDTH, _SEARCH_STEPS // space.search_steps))
    found = search_by_bound(tables, ceiling=ceiling, width=width, results=_RESULTS, max_stages=max_stages)
    fastest = simulate_found_plans(tables, found, ceiling, problem.schedule, _EVENTS, contention=problem.contention)
    least_left = float(found.scores[fastest.simulated]) if fastest.simulated < len(found) else math.inf
    unsearched = min(found.exhaustive_below, least_left)
    if fastest.row < 0:
        return [], unsearched
    stages = problem.stage_plans(space, found.plan(fastest.row))
    return [Candidate(stages, size, fastest.best.schedule, fastest.best.seconds, origin, problem.recompute)], unsearched


def _half_cluster_candidate(problem: PlanningProblem, ceiling: float) -> list[Candidate]:
    """Return the best plan on the first half of the devices, server by server; none if no plan is below ``ceiling``."""
    half = halve_cluster(problem.cluster)
    return _part_candidate(problem, half, range(half.devices), ceiling) if half else []


def _well_connected_candidate(problem: PlanningProblem, ceiling: float) -> list[Candidate]:
    """Return the best plan without one end of the slowest link, if it is slow, and if that may be below ``ceiling``.

    Planning the rest leaves out the next server in turn. So on many servers, where this would take longer than all
    other steps together, there is no such plan.
    """
    server = worst_connected_server(problem.cluster) if len(problem.cluster.servers) <= _MOST_LEFT_OUT else None
    return [] if server is None else _part_candidate(problem, *problem.cluster.without_server(server), ceiling)


def _part_candidate(problem: PlanningProblem, part: Cluster, devices: Sequence[int], ceiling: float) -> list[Candidate]:
    """Return the best plan on a part of the cluster, with these ``devices``; none if no plan is below ``ceiling``."""
    sizes = problem.micro_batch_sizes
    if least_compute_seconds(problem.profile, part.devices, problem.global_batch_size, sizes) >= ceiling:
        return []
    result = plan_best(replace(problem, cluster=part), chunks=())
    if result is None:
        return []
    chosen = result.chosen
    stages = [replace(stage, devices=tuple(devices[d] for d in stage.devices)) for stage in chosen.stages]
    found = problem.evaluate(stages, chosen.micro_batch_size, chosen.origin, recompute=chosen.recompute)
    return [found] if found else []


def _other_sizes(problem: PlanningProblem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest few candidates at other micro-batch sizes, where these are faster."""
    faster = [
        problem.evaluate(found.stages, size, found.origin, recompute=found.recompute, ceiling=found.seconds)
        for found in _fastest_few(candidates)
        for size in problem.micro_batch_sizes
        if size != found.micro_batch_size
    ]
    return [candidate for candidate in faster if candidate is not None]


def _refined_candidates(
    problem: PlanningProblem, candidates: Sequence[Candidate], binds: bool, seed: int
) -> list[Candidate]:
    """Return what local search finds; ``binds``: whether memory rules out plans, so that stages may be re-computed."""
    if problem.schedule in (*POLICIES, "auto"):
        more = max(0, min(problem.cluster.devices, _MOST_DEVICES) - _LEAST_DEVICES)
        events = int(_LOCAL_EVENTS * (_LEAST_DEVICES + 2 * more) * _share_of_events(problem))
        found = refine(problem, candidates, events, seed, may_recompute=binds)
        if counts_contention(problem):
            return found
        # Reason: without contention the cuts of the local search are off by a few blocks.
        busy = [c for c in _fastest_few([*candidates, *found])[:1] if problem.find_flows(c.stages) is not None]
        return [*found, *(move_singly(problem, candidate, _MOVES) for candidate in busy)]
    return [move_singly(problem, candidate, _MOVES) for candidate in _fastest_few(candidates)]


def _share_of_events(problem: PlanningProblem) -> float:
    """Return the share of the events that a local search of this problem gets: less than 1 where it is small."""
    return min(1.0, len(problem.chain.parameter_bytes) * problem.cluster.devices / _SMALL_PROBLEM)


def _memory_costs_time(problem: PlanningProblem, sizes: Sequence[int], known: Sequence[Candidate]) -> bool:
    """Return whether some plan would be faster than the fastest ``known`` if the devices had any amount of memory."""
    found, least = _search_spaces(problem, problem.search_spaces, sizes, known, _AMPLE)
    return bool(found) or least < _least_seconds(known) * (1 - 1e-9)


def _least_seconds(candidates: Iterable[Candidate]) -> float:
    """Return the seconds of the fastest candidate; infinity if there is none."""
    return min((candidate.seconds for candidate in candidates), default=math.inf)


def _fastest_few(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest candidates that differ in replica counts."""
    by_replicas: dict[tuple[int, ...], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        by_replicas.setdefault(tuple(stage.replicas for stage in candidate.stages), candidate)
    return list(by_replicas.values())[:_REFINED]
