"""Planner "torchgpipe": against every block partition, and its refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.systems.straight import plan_torchgpipe
from dapple_tf.plans import Plan
from tests.dapple_tf.planner.builders import AMPLE, Case, cases, make_cluster, make_profile
from tests.dapple_tf.planner.comparators import all_bounds
from tests.graph_passes.builders import refused


def plan(by: str = "time", memory: float = AMPLE, **options: Any) -> Plan:
    # Seconds 3, 3, 3, 9; the first has the weights.
    profile = make_profile((1, 2, 1, 1, 50), (1, 2, 1, 1, 0), (1, 2, 1, 1, 0), (3, 6, 1, 1, 0))
    return dapple.plan(
        profile, make_cluster(2, memory=memory), global_batch_size=8, planner="torchgpipe", by=by, **options
    )


@given(cases(tight=False), st.sampled_from(["time", "size"]))
def test_no_block_partition_has_a_smaller_largest_stage(case: Case, by: str) -> None:
    problem = make_problem(case.profile, case.cluster, global_batch_size=case.batch, **case.options)
    result = plan_torchgpipe(problem, by=by)
    found, profile = result.chosen, case.profile
    forward = profile.forward_seconds(found.micro_batch_size)
    seconds = forward + profile.backward_seconds(found.micro_batch_size)
    bytes_ = 4 * profile.parameter_bytes + profile.stash_bytes * found.micro_batch_size / profile.batch_size
    costs, ends = seconds if by == "time" else bytes_, problem.chain.positions
    stages = min(case.cluster.devices, len(ends) - 1)
    least = min(
        max(costs[ends[a] : ends[b]].sum() for a, b in itertools.pairwise(bounds))
        for bounds in all_bounds(len(ends) - 1, stages)
    )
    largest = max(costs[stage.first_layer : stage.last_layer + 1].sum() for stage in found.stages)
    assert largest == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert [stage.devices for stage in found.stages] == [(device,) for device in range(stages)]


def test_by_time_and_by_size_by_hand() -> None:
    assert plan("time").starts == (3,)
    assert plan("size").starts == (1,)


def test_the_schedule_is_gpipes_unless_another_is_asked_for() -> None:
    assert plan().schedule == "gpipe"
    assert plan(schedule="dapple-a").schedule == "dapple-a"


def test_a_partition_that_does_not_fit_is_refused_though_another_fits() -> None:
    with refused(PlanError, "torchgpipe", "use planner 'best'"):
        plan(memory=205)
    assert plan(by="size", memory=205).starts == (1,)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"by": "flops"}, ["'flops'"]),
        ({"stages": 3}, ["at least 1 and at most 2 stages"]),
        ({"stages": 0}, ["stages=0"]),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], told: list[str]) -> None:
    with refused(PlanError, *told):
        plan(**options)
