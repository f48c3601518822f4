"""Planner "even": against every p, v and micro-batch size, layouts by hand, and its refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.systems.even import plan_even
from dapple_tf.plans import Plan, StagePlan
from tests.dapple_tf.planner.builders import Case, cases, make_cluster, make_profile
from tests.dapple_tf.planner.comparators import limited_step
from tests.graph_passes.builders import refused


def plan(layers: int, cluster: Any, batch: int = 8, **options: Any) -> Plan:
    profile = make_profile(*[(1, 2, 1, 1, 1)] * layers)
    return dapple.plan(profile, cluster, global_batch_size=batch, planner="even", **options)


def least_step(problem: PlanningProblem) -> float:
    """Return the least step of every p and v, from the definition."""
    n, blocks = problem.cluster.devices, len(problem.chain.parameter_bytes)
    found = [float("inf")]
    for p, v in ((p, v) for p in range(1, n + 1) for v in (1, 2, 4)):
        if n % p or p * v > blocks or (p == 1 < v):
            continue
        parts = np.array_split(np.arange(blocks), p * v)
        d, ends = n // p, problem.chain.positions
        stages = [
            StagePlan(ends[part[0]], ends[part[-1] + 1] - 1, tuple(range(i % p * d, i % p * d + d)))
            for i, part in enumerate(parts)
        ]
        schedule = "dapple-a" if v == 1 else f"interleaved-1f1b:v={v}"
        found += [limited_step(problem, stages, size, schedule) for size in problem.micro_batch_sizes]
    return min(found)


@given(cases(largest=9))
def test_no_p_v_and_micro_batch_size_are_faster(case: Case) -> None:
    problem = make_problem(case.profile, case.cluster, global_batch_size=case.batch, **case.options)
    found, wanted = plan_even(problem), least_step(problem)
    assert (found.chosen.seconds if found else float("inf")) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_stages_have_equally_many_layers_and_the_first_ones_the_rest() -> None:
    found = plan(7, make_cluster(1, 1, 1), pipeline_size=3, chunks=(1,))
    assert [stage.last_layer - stage.first_layer + 1 for stage in found.stages] == [3, 2, 2]
    assert found.schedule == "dapple-a"


def test_chunks_go_round_the_devices_and_replicas_are_neighbours() -> None:
    found = plan(8, make_cluster(4), pipeline_size=2, chunks=(2,))
    assert found.schedule == "interleaved-1f1b:v=2"
    assert [stage.devices for stage in found.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert [stage.first_layer for stage in found.stages] == [0, 2, 4, 6]


def test_a_schedule_with_a_name_says_how_many_stages_a_device_has() -> None:
    found = plan(8, make_cluster(2), pipeline_size=2, schedule="looped-bfs:v=2")
    assert (found.schedule, len(found.stages)) == ("looped-bfs:v=2", 4)
    found = plan(8, make_cluster(2), pipeline_size=2, schedule="gpipe", chunks=(1, 2))
    assert (found.schedule, len(found.stages)) == ("gpipe", 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pipeline_size": 3}, ["pipeline_size=3", "1, 2, 4"]),
        ({"pipeline_size": 0}, ["pipeline_size=0"]),
        ({"chunks": ()}, ["chunks=[]"]),
        ({"chunks": (0, 2)}, ["chunks=[0, 2]"]),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], told: list[str]) -> None:
    with refused(PlanError, *told):
        plan(8, make_cluster(4), **options)
