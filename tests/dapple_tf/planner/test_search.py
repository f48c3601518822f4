"""The search by DAPPLE's formulas, and its tables."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.planner.api import make_problem
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search.formula_search import (
    CostTables,
    make_cost_tables,
    make_found_stages,
    search_by_formula,
)
from dapple_tf.planner.search.search_space import SearchSpace, find_search_spaces
from dapple_tf.planner.step_simulation import stage_cost_arrays
from dapple_tf.simulator.costs import stage_costs
from tests.dapple_tf.planner.builders import Case, cases
from tests.dapple_tf.planner.exhaustive import Costs as ReferenceCosts
from tests.dapple_tf.planner.exhaustive import divisors, formula_of

ALL = {"width": 2000, "results": 10**6}


def whole_space(problem: PlanningProblem) -> SearchSpace:
    """Return the search space, which is one complete space on so few devices."""
    (space,) = find_search_spaces(problem.chain, problem.cluster)
    return space


# Micro-batches of at least six samples, so that six devices can share one.
by_formula = cases(free=False, tight=False, batches=(12, 24, 36))


def draw_tables(
    case: Case, data: st.DataObject, least: int = 1, schedules: Sequence[str] = ("auto",)
) -> tuple[PlanningProblem, int, CostTables]:
    """Return a problem, a micro-batch size, and the tables for it."""
    profile, cluster, batch, options = case
    schedule = data.draw(st.sampled_from(schedules))
    problem = make_problem(profile, cluster, global_batch_size=batch, schedule=schedule, **options)
    size = data.draw(st.sampled_from([size for size in divisors(batch) if size >= least]))
    return problem, size, make_cost_tables(problem, whole_space(problem), size)


@given(by_formula, st.data())
def test_the_score_of_a_search_by_formula_is_the_latency_of_the_plan(case: Case, data: st.DataObject) -> None:
    problem, size, tables = draw_tables(case, data, 6)
    plans = search_by_formula(tables, width=2000, results=50)
    found = data.draw(st.sampled_from(plans))
    plan = problem.make_plan(make_found_stages(problem, whole_space(problem), found), size, "dapple-a", "test")
    arrays = stage_cost_arrays(stage_costs(plan, problem.profile, problem.cluster, whole_rows=False))
    costs = ReferenceCosts(
        forward=arrays.forward_seconds.tolist(),
        backward=arrays.backward_seconds.tolist(),
        exposed=arrays.rings.exposed.tolist(),
        rings=[((0.0, seconds),) for seconds in arrays.rings.exposed.tolist()],
        send=arrays.send_seconds[:-1].tolist(),
        fixed=arrays.fixed_bytes.tolist(),
        stash=arrays.stash_bytes.tolist(),
    )
    assert sum(plan.replicas) == problem.cluster.devices
    assert found.score == pytest.approx(formula_of(costs, plan.micro_batches), rel=1e-9, abs=1e-9)


@given(by_formula, st.data())
def test_a_ceiling_loses_no_plan_of_a_search_by_formula(case: Case, data: st.DataObject) -> None:
    tables = draw_tables(case, data, 6)[2]
    whole = search_by_formula(tables, **ALL)
    ceiling = data.draw(st.sampled_from(whole)).score
    below = search_by_formula(tables, ceiling=ceiling, **ALL)
    assert set(below) == {plan for plan in whole if plan.score < ceiling}
