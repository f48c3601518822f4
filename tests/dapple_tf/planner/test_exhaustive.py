"""The planners against every plan there is: contiguous cuts x replica counts x the three policies of placement.

Layers without seconds, weights or stash ("free") do not make stages of their own, and of the cuts that only they
lie between the planners try the one that the least bytes cross (profiler.linearise). Formula 2 gains from a cut that
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
from dapple_tf.planner.api import make_task, predicted
from dapple_tf.planner.best import plan_best
from dapple_tf.planner.dapple import plan_dapple
from dapple_tf.planner.planning_problem import Candidate, Decision, Task
from tests.dapple_tf.planner.builders import Problem, problems
from tests.dapple_tf.planner.exhaustive import find_optimum


def make(problem: Problem) -> Task:
    return make_task(problem.profile, problem.cluster, global_batch_size=problem.batch, **problem.options)


def check_best(problem: Problem) -> None:
    optimum = find_optimum(problem.profile, problem.cluster, problem.batch, **problem.options)
    task = make(problem)
    decision = plan_best(task)
    if decision is None:
        assert optimum.seconds == math.inf
        return
    assert decision.chosen.seconds == pytest.approx(optimum.seconds, rel=1e-9, abs=0)
    assert decision.proven
    check_decision(task, decision)
    for other in decision.others:
        assert other.seconds >= decision.chosen.seconds


def check_dapple(problem: Problem) -> None:
    optimum = find_optimum(problem.profile, problem.cluster, problem.batch, by_formula=True, **problem.options)
    task = make(problem)
    decision = plan_dapple(task)
    if decision is None:
        assert optimum.seconds == math.inf
        return
    assert decision.latency == pytest.approx(optimum.seconds, rel=1e-9, abs=0)
    check_decision(task, decision)


def check_decision(task: Task, decision: Decision) -> None:
    """What is chosen or came close can run, fits, and takes as long as was said."""
    for candidate in (decision.chosen, *decision.others):
        plan, timeline = predicted(task, candidate, "test")
        check_plan(plan, task.profile, task.cluster)
        assert all(timeline.fits)
        assert timeline.step_seconds == pytest.approx(candidate.seconds, rel=1e-9, abs=0)
        assert max(plan.replicas) <= plan.micro_batch_size


@given(problems(8))
def test_best_is_the_optimum_of_all_plans(problem: Problem) -> None:
    check_best(problem)


@given(problems(8, free=False))
def test_dapple_is_the_optimum_of_the_formulas(problem: Problem) -> None:
    check_dapple(problem)


@given(problems(free=False, tight=False), st.data())
def test_memory_that_a_plan_needs_to_the_byte_will_do(problem: Problem, data: st.DataObject) -> None:
    timeline = predicted(make(problem), plan_of(problem), "best")[1]
    needs = [need for need in timeline.peak_memory_bytes if need > 0]
    memory = data.draw(st.sampled_from(needs)) if needs else 1.0
    check_best(problem._replace(cluster=replace(problem.cluster, device_memory=memory)))


def plan_of(problem: Problem) -> Candidate:
    """What the best planner chooses."""
    decision = plan_best(make(problem))
    assert decision is not None
    return decision.chosen


@pytest.mark.slow
@settings(max_examples=500)
@given(problems(8))
def test_best_is_the_optimum_in_many_cases(problem: Problem) -> None:
    check_best(problem)


@pytest.mark.slow
@settings(max_examples=500)
@given(problems(8, free=False))
def test_dapple_is_the_optimum_in_many_cases(problem: Problem) -> None:
    check_dapple(problem)
