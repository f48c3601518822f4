"""The search: its lower bound, its tables, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dapple_tf.planner.api import make_problem
from dapple_tf.planner.cost_tables import CostTables
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search import FoundPlan, search_by_bound, search_by_formula
from dapple_tf.planner.search_space import SearchSpace
from dapple_tf.planner.step_simulation import stage_cost_arrays, stage_costs_from_tables
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.simulate import simulate
from tests.dapple_tf.planner.builders import AMPLE, Case, cases, make_cluster, make_profile
from tests.dapple_tf.planner.exhaustive import Costs as ReferenceCosts
from tests.dapple_tf.planner.exhaustive import divisors, formula_of, list_plans

SCHEDULES = ("auto", "zb-h1", "zb-h1:D=1")
ALL = {"width": 2000, "results": 10**6}


def whole_space(problem: PlanningProblem) -> SearchSpace:
    """Return the search space, which is one complete space on so few devices."""
    (space,) = problem.search_spaces
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
    return problem, size, problem.cost_tables(whole_space(problem), size)


def draw_plan(
    problem: PlanningProblem, size: int, plans: tuple[FoundPlan, ...], data: st.DataObject
) -> tuple[FoundPlan, Plan]:
    """Draw one of the plans found, under some schedule or the problem's."""
    found = data.draw(st.sampled_from(plans))
    some = ["gpipe", "dapple-a", "dapple-b", "dapple-b:D=2"]
    schedule = data.draw(st.sampled_from(some)) if problem.schedule == "auto" else problem.schedule
    return found, problem.make_plan(problem.stage_plans(whole_space(problem), found), size, schedule, "test")


@given(cases(), st.data())
def test_the_bound_never_exceeds_the_simulated_step(case: Case, data: st.DataObject) -> None:
    problem, size, tables = draw_tables(case, data, schedules=SCHEDULES)
    plans = search_by_bound(tables, **ALL).plans
    assume(plans)
    found, plan = draw_plan(problem, size, plans, data)
    assert found.score <= simulate(plan, problem.profile, problem.cluster).step_seconds


@given(cases(), st.data())
def test_stage_costs_from_the_tables_equal_those_of_the_simulator(case: Case, data: st.DataObject) -> None:
    problem, size, tables = draw_tables(case, data, schedules=SCHEDULES)
    plans = search_by_bound(tables, **ALL).plans
    assume(plans)
    found, plan = draw_plan(problem, size, plans, data)
    costs = stage_costs_from_tables(tables, np.array(found.starts), np.array(found.placements), len(found.starts))
    wanted = stage_cost_arrays(stage_costs(plan, problem.profile, problem.cluster))
    np.testing.assert_allclose(costs, wanted, rtol=1e-12, atol=1e-12)


def fits_one(problem: PlanningProblem, stages: tuple[tuple[int, int, tuple[int, ...]], ...], size: int) -> bool:
    """Return whether each stage can hold one micro-batch, by the simulator."""
    plan = problem.make_plan([StagePlan(*stage) for stage in stages], size, "dapple-a:D=1", "test")
    return all(simulate(plan, problem.profile, problem.cluster).fits)


@given(cases(4), st.data())
def test_every_plan_that_fits_is_found_once(case: Case, data: st.DataObject) -> None:
    problem, size, tables = draw_tables(case, data)
    result = search_by_bound(tables, **ALL)
    assert result.exhaustive_below == np.inf
    found = [problem.stage_plans(whole_space(problem), plan) for plan in result.plans]
    assert len(set(found)) == len(found)
    kept = set(problem.chain.positions)
    expected = {
        tuple((first, end - 1, devices) for first, end, devices in stages)
        for stages in list_plans(problem.profile, problem.cluster)
        if max(len(devices) for _, _, devices in stages) <= size and {first for first, _, _ in stages} <= kept
    }
    plain = {tuple((s.first_layer, s.last_layer, s.devices) for s in stages) for stages in found}
    if problem.cluster.device_memory < AMPLE:
        expected = {stages for stages in expected if fits_one(problem, stages, size)}
    # A layer without work may be a block of its own, where one of its two cuts sends less and the other can be split.
    assert {stages for stages in plain if all(has_work(problem, *stage[:2]) for stage in stages)} == expected


def has_work(problem: PlanningProblem, first: int, last: int) -> bool:
    """Return whether any of these layers takes time or memory, or no layer of the model does."""
    costs = [(c.forward_seconds, c.backward_seconds, c.stash_bytes, c.parameter_bytes) for c in problem.profile.layers]
    return any(map(any, costs[first : last + 1])) or not any(map(any, costs))


def test_a_layer_without_work_can_be_a_stage_where_the_cut_before_it_cannot_be_split() -> None:
    profile = make_profile((1, 0, 0), (0, 0, 1), (1, 0, 0), batch_size=1, unsplittable=(1,))
    problem = make_problem(profile, make_cluster(6), global_batch_size=1)
    found = search_by_bound(problem.cost_tables(whole_space(problem), 1), **ALL).plans
    assert max(len(plan.starts) for plan in found) == 3


@given(cases(), st.data(), st.sampled_from([1, 3, 20]), st.sampled_from([1, 4, 50]), st.booleans())
def test_no_plan_below_exhaustive_below_is_left_out(
    case: Case, data: st.DataObject, width: int, results: int, ceiled: bool
) -> None:
    tables = draw_tables(case, data)[2]
    whole = search_by_bound(tables, **ALL).plans
    assume(whole)
    ceiling = data.draw(st.sampled_from(whole)).score if ceiled else np.inf
    some = search_by_bound(tables, ceiling=ceiling, width=width, results=results)
    assert len(some.plans) <= results
    below = min(ceiling, some.exhaustive_below)
    assert {plan for plan in whole if plan.score < below} <= set(some.plans) <= {p for p in whole if p.score < ceiling}
    assert list(some.plans) == sorted(some.plans, key=lambda plan: plan.score)


@given(cases(), st.data())
def test_max_stages_limits_the_number_of_stages(case: Case, data: st.DataObject) -> None:
    tables = draw_tables(case, data)[2]
    whole = search_by_bound(tables, **ALL).plans
    for most in (1, 2, 3):
        found = search_by_bound(tables, **ALL, max_stages=most).plans
        assert set(found) == {plan for plan in whole if len(plan.starts) <= most}


@given(by_formula, st.data())
def test_the_score_of_a_search_by_formula_is_the_latency_of_the_plan(case: Case, data: st.DataObject) -> None:
    problem, size, tables = draw_tables(case, data, 6)
    plans = search_by_formula(tables, width=2000, results=50).plans
    found, plan = draw_plan(problem, size, plans, data)
    arrays = stage_cost_arrays(stage_costs(plan, problem.profile, problem.cluster))
    costs = ReferenceCosts(
        forward=arrays.forward_seconds.tolist(),
        backward=arrays.backward_seconds.tolist(),
        exposed=arrays.exposed_seconds.tolist(),
        rings=[((0.0, seconds),) for seconds in arrays.exposed_seconds.tolist()],
        send=arrays.send_seconds[:-1].tolist(),
        fixed=arrays.fixed_bytes.tolist(),
        stash=arrays.stash_bytes.tolist(),
    )
    assert sum(plan.replicas) == problem.cluster.devices
    assert found.score == pytest.approx(formula_of(costs, plan.micro_batches), rel=1e-9, abs=1e-9)


@given(by_formula, st.data())
def test_a_ceiling_loses_no_plan_of_a_search_by_formula(case: Case, data: st.DataObject) -> None:
    tables = draw_tables(case, data, 6)[2]
    whole = search_by_formula(tables, **ALL).plans
    ceiling = data.draw(st.sampled_from(whole)).score
    below = search_by_formula(tables, ceiling=ceiling, **ALL).plans
    assert set(below) == {plan for plan in whole if plan.score < ceiling}
