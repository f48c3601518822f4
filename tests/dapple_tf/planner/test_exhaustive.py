"""The planners against an enumeration of all plans: contiguous cuts x replica counts x placement policies.

Layers without seconds, weights or stash ("free") do not make stages of their own, and of the cuts that only they
lie between the planners try the one that the least bytes cross (profiler/linearise.py). Formula 2 gains from a cut that
more bytes cross (what a network costs it takes off the AllReduces that come after the pivot), so by formula there are
none of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple_tf.plan_check import check_plan
from dapple_tf.planner.api import make_problem, predict_plan
from dapple_tf.planner.best import least_plan_seconds, plan_best
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.search.dapple import plan_dapple
from dapple_tf.profiler.cluster import Cluster, Link, Server
from tests.dapple_tf.planner.builders import Case, busy_cases, cases, make_profile
from tests.dapple_tf.planner.exhaustive import find_optimum


def make(case: Case) -> PlanningProblem:
    return make_problem(case.profile, case.cluster, global_batch_size=case.batch, **case.options)


def check_best(case: Case, *, contention: bool = True) -> None:
    optimum = find_optimum(case.profile, case.cluster, case.batch, contention=contention, **case.options)
    problem = replace(make(case), contention=contention)
    decision = plan_best(problem, chunks=())
    if decision is None:
        assert optimum.seconds == math.inf
        return
    # It may be faster: with other K_i, re-computing some stages, or on devices that no policy gives.
    assert decision.chosen.seconds <= optimum.seconds * (1 + 1e-9)
    assert least_plan_seconds(problem) <= min(optimum.seconds, decision.chosen.seconds) * (1 + 1e-9)
    check_decision(problem, decision)
    for other in decision.runners_up:
        assert other.seconds >= decision.chosen.seconds


def check_dapple(case: Case) -> None:
    optimum = find_optimum(case.profile, case.cluster, case.batch, by_formula=True, **case.options)
    problem = make(case)
    decision = plan_dapple(problem)
    if decision is None:
        assert optimum.seconds == math.inf
        return
    assert decision.formula_seconds == pytest.approx(optimum.seconds, rel=1e-9, abs=0)
    check_decision(problem, decision)


def check_decision(problem: PlanningProblem, decision: PlannerResult) -> None:
    """Check that the chosen plan and the runners-up can run, fit, and take as long as was predicted."""
    for candidate in (decision.chosen, *decision.runners_up):
        plan, timeline = predict_plan(problem, candidate, "test")
        check_plan(plan, problem.profile, problem.cluster)
        assert all(timeline.fits)
        assert timeline.step_seconds == pytest.approx(candidate.seconds, rel=1e-9, abs=0)
        assert max(plan.replicas) <= plan.micro_batch_size


@pytest.mark.always  # the only one that tries all plans
@given(cases(8))
def test_planner_best_finds_the_optimum_of_all_plans(case: Case) -> None:
    check_best(case)


@given(busy_cases())
def test_planner_best_finds_the_optimum_where_interfaces_are_busy(case: Case) -> None:
    check_best(case)


def test_layers_that_cost_nothing_prove_nothing() -> None:
    cluster = Cluster((Server("s0", 3), Server("s1", 3)), 1e9, Link(0.5, 0.0), Link(0.5, 0.0))
    check_best(Case(make_profile((0, 0, 0, 0, 0)), cluster, 1, {}))


@given(cases(8))
def test_planner_best_finds_the_optimum_without_contention(case: Case) -> None:
    check_best(case, contention=False)


@given(cases(8, free=False))
def test_planner_dapple_finds_the_optimum_of_the_formulas(case: Case) -> None:
    check_dapple(case)


@given(cases(free=False, tight=False), st.data())
def test_exactly_the_memory_that_a_plan_needs_is_enough(case: Case, data: st.DataObject) -> None:
    timeline = predict_plan(make(case), plan_of(case), "best")[1]
    needs = [need for need in timeline.peak_memory_bytes if need > 0]
    memory = data.draw(st.sampled_from(needs)) if needs else 1.0
    check_best(case._replace(cluster=replace(case.cluster, device_memory=memory)))


def plan_of(case: Case) -> Candidate:
    """Return what planner "best" chooses."""
    decision = plan_best(make(case), chunks=())
    return decision.chosen


@settings(max_examples=150)
@given(cases(8))
def test_planner_best_finds_the_optimum_in_many_cases(case: Case) -> None:
    check_best(case)


@settings(max_examples=500)
@given(cases(8, free=False))
def test_planner_dapple_finds_the_optimum_in_many_cases(case: Case) -> None:
    check_dapple(case)
