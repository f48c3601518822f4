"""Planner "best": the plan with the least simulated step that simulated annealing finds, and simple plans beside it."""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.errors import PlanError, warn_user
from dapple_tf.planner.annealer import ANY_WARM_UP, Annealer
from dapple_tf.planner.baselines import leading_baselines
from dapple_tf.planner.chunk_search import plan_chunked
from dapple_tf.planner.comparators import comparator_candidates, faster_with_even_layers
from dapple_tf.planner.compute_bound import least_compute_seconds
from dapple_tf.planner.gpipe import plan_gpipe
from dapple_tf.planner.memory_fit import fit_memory, may_bind
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.ranking import rank_candidates
from dapple_tf.planner.searched_order import plan_searched
from dapple_tf.planner.single_moves import move_singly
from dapple_tf.planner.step_simulation import POLICIES

# The work of each search on up to 16 devices, half a second on a core, and what each further device adds.
_WORK, _WORK_OF_A_DEVICE = 60_000_000, 2_000_000
_SEARCHES = 3  # with other random numbers each: which plan a search ends at depends on chance
_MOST_WORK = 1_000_000_000
_SMALL, _MANY_BLOCKS = 128, 64  # blocks times devices below which, and blocks above which, the work is in proportion
# K_i = slope (S - 1 - i) + 1 of the search for stages of a given schedule; so large a slope stands for K_i = M.
_SLOPES = {"auto": ANY_WARM_UP, "dapple-a": 1, "dapple-b": 2, "gpipe": 1 << 20}
_REFINED = 3
_MOVES = 40  # of single cuts and devices, under schedules that the search does not simulate
_NO_COMPILER = (
    "planner 'best' chooses among the plans of the other planners: its search is written in C++, and there is no "
    "C++ compiler: install g++ (or set CXX), then plan again"
)


def plan_best(problem: PlanningProblem, *, chunks: Sequence[int] = (2, 4)) -> PlannerResult | None:
    """Return the fastest plan in the simulator; None if nothing fits the memory.

    Where the schedule is "auto", plans with each number of ``chunks``, stages per device, are considered beside those
    with one, under interleaved 1F1B. Any other schedule says itself which stages share devices. Raises PlanError for
    ``chunks`` below 2. Warns where there is no compiler for the search.
    """
    if problem.searches_order:
        return plan_searched(problem, plan_best)
    if problem.shares_devices:
        chunked = plan_chunked(problem) if problem.cluster.is_uniform else _plan_chunked_unequal(problem)
        return faster_with_even_layers(problem, chunked)
    if min(chunks, default=2) < 2:
        raise PlanError(f"chunks={list(chunks)}: one stage per device is always considered, so give numbers from 2 on")
    candidates = leading_baselines(problem) or _fitting_candidate(problem)
    auto = problem.schedule == "auto"
    annealer = Annealer.of(
        problem,
        chunks=chunks if auto else (),
        stages=None if auto else problem.spec.stages,
        may_recompute=may_bind(problem),
        slope=_SLOPES.get(problem.schedule, _SLOPES["dapple-a"]),
    )
    if annealer is None:
        warn_user(_NO_COMPILER)
        candidates += comparator_candidates(problem, chunks if auto else ())
    else:
        candidates += _annealed(problem, annealer)
    if problem.schedule not in (*POLICIES, "auto"):
        candidates += [move_singly(problem, candidate, _MOVES) for candidate in _fastest_few(candidates)]
    return rank_candidates(candidates, least_compute_seconds(problem))


def _annealed(problem: PlanningProblem, annealer: Annealer) -> list[Candidate]:
    """Return the fastest plan that the search finds."""
    work = min(_WORK + max(0, problem.cluster.devices - 16) * _WORK_OF_A_DEVICE, _MOST_WORK)
    blocks = len(problem.chain.parameter_bytes)
    small = min(1.0, blocks * problem.cluster.devices / _SMALL) * max(1.0, blocks / _MANY_BLOCKS)
    for layout in annealer.search(int(work * small), searches=_SEARCHES):
        schedule = layout.schedule if problem.schedule == "auto" else None
        candidate = problem.evaluate(layout.stages, layout.micro_batch_size, "local search", schedule, layout.recompute)
        if candidate is not None:  # under a given schedule it may need more memory than in the search
            return [candidate]
    return []


def _fitting_candidate(problem: PlanningProblem) -> list[Candidate]:
    """Return the plan of the fewest devices, whose stages fit the memory where those of equal compute do not."""
    stages = fit_memory(problem)
    if stages is None or sum(stage.replicas for stage in stages) > problem.cluster.devices:
        return []
    found = problem.evaluate(stages, problem.micro_batch_sizes[0], "straight")
    return [found] if found else []


def _plan_chunked_unequal(problem: PlanningProblem) -> PlannerResult | None:
    """Return the fastest of the even stages and those whose cuts were searched for equal devices.

    Both are simulated on the devices as they are; the search for cuts takes all devices as equal.
    """
    found = [plan_chunked(problem), plan_gpipe(problem)]
    return rank_candidates(c for result in found if result for c in (result.chosen, *result.runners_up))


def _fastest_few(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest candidates that differ in replica counts."""
    by_replicas: dict[tuple[int, ...], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        by_replicas.setdefault(tuple(stage.replicas for stage in candidate.stages), candidate)
    return list(by_replicas.values())[:_REFINED]
