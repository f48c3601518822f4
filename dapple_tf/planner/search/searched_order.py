"""Plans whose schedule is ``zb-auto``: search the order of actions with their costs, and write it into the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dapple_tf.errors import ScheduleError
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.search.chunk_search import plan_chunked
from dapple_tf.planner.step_simulation import find_substitutes
from dapple_tf.planner.systems.straight import plan_gpipe
from dapple_tf.plans import Plan
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.memory import fit_to_one_limit
from dapple_tf.simulator.order_search import FoundOrder, search_order

_SEARCHED = 5  # candidates whose order is searched for, the fastest ones under the substitutes


def plan_searched(
    problem: PlanningProblem, plan: Callable[[PlanningProblem], PlannerResult | None]
) -> PlannerResult | None:
    """Return the fastest plan of stages that ``plan`` and planner "gpipe" find, each with the best order found for it.

    Searching an order for every possible cut would take too long. So the stages are those that are best under other
    schedules (``find_substitutes``). If there are none, they are those that are best under ``zb-auto`` with the order
    that it has for equal stages. None if nothing fits the memory.
    """
    known: list[Candidate] = []
    for name in find_substitutes(problem.schedule) or (problem.schedule,):
        substitute = dataclasses.replace(problem, schedule=name)
        searched = plan_chunked(problem) if name == problem.schedule else plan(substitute)
        for result in (plan_gpipe(substitute), searched):
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
    return PlannerResult.ranked(found)


def search_plan_order(problem: PlanningProblem, plan: Plan) -> FoundOrder:
    """Return the best order found for the stages of ``plan``, within the memory of the cluster's devices.

    Raises ScheduleError where no order fits.
    """
    costs = stage_costs(plan, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots)
    workers = plan.spec.worker_map(len(plan.stages))
    return search_order(workers, plan.micro_batches, *fit_to_one_limit(plan, costs, problem.cluster))


def with_order(plan: Plan, found: FoundOrder) -> Plan:
    """Return the plan with all actions of the order that was found as its schedule."""
    return dataclasses.replace(plan, schedule=str(found.schedule))
