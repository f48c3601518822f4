"""Plans whose schedule is ``zb-auto``: their order is searched for with their costs, and written out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dapple_tf.errors import ScheduleError
from dapple_tf.plan import Plan
from dapple_tf.planner.chunk_search import plan_chunked
from dapple_tf.planner.gpipe import plan_gpipe
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.ranking import rank_candidates
from dapple_tf.planner.step_simulation import find_stand_ins
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.memory_limit import fit_to_one_limit
from dapple_tf.simulator.order_search import FoundOrder, search_order
from graph_passes.schedules.policies import worker_map_of

_SEARCHED = 5  # candidates whose order is searched for, the fastest ones under the stand-ins


def plan_searched(
    problem: PlanningProblem, plan: Callable[[PlanningProblem], PlannerResult | None]
) -> PlannerResult | None:
    """Return the fastest of the stages that ``plan`` and planner "gpipe" find, each under its best order found.

    A search for each cut would take too long, so the stages are those of stand-ins (``find_stand_ins``), or without
    one those of ``zb-auto`` as it is for equal stages. None if nothing fits the memory.
    """
    known: list[Candidate] = []
    for name in find_stand_ins(problem.schedule) or (problem.schedule,):
        stand_in = dataclasses.replace(problem, schedule=name)
        searched = plan_chunked(problem) if name == problem.schedule else plan(stand_in)
        for result in (plan_gpipe(stand_in), searched):
            known += [] if result is None else [result.chosen, *result.runners_up]
    fastest: dict[object, Candidate] = {}
    for candidate in sorted(known, key=lambda c: c.seconds):
        fastest.setdefault((candidate.stages, candidate.micro_batch_size), candidate)
    found = []
    for candidate in list(fastest.values())[:_SEARCHED]:
        wanted = dataclasses.replace(candidate, schedule=problem.schedule)
        bare = problem.make_plan(
            wanted.stages, wanted.micro_batch_size, wanted.schedule, wanted.origin, wanted.recompute
        )
        try:
            order = search_plan_order(problem, bare)
        except ScheduleError:  # no order fits the memory
            continue
        found.append(dataclasses.replace(wanted, seconds=problem.simulate(with_order(bare, order)).step_seconds))
    return rank_candidates(found)


def search_plan_order(problem: PlanningProblem, plan: Plan) -> FoundOrder:
    """Return the best order found for the stages of ``plan``, within the memory of the cluster's devices.

    Raises ScheduleError where no order fits.
    """
    costs = stage_costs(plan, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots)
    workers = worker_map_of(plan.schedule, len(plan.stages))
    return search_order(workers, plan.micro_batches, *fit_to_one_limit(plan, costs, problem.cluster))


def with_order(plan: Plan, found: FoundOrder) -> Plan:
    """Return the plan with all actions of the order that was found as its schedule."""
    return dataclasses.replace(plan, schedule=str(found.schedule))
