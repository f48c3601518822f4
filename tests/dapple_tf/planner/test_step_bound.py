"""The lower bound of a step, against the simulator: random stages, schedules, devices; and by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.step_simulation import least_step_seconds
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.profile import Profile
from dapple_tf.profiler.servers import DeviceKind
from tests.dapple_tf.planner.builders import Case, cases, make_cluster, make_profile

SCHEDULES = ("dapple-a", "dapple-b", "gpipe", "zb-h1", "zb-h2", "interleaved-1f1b:v=2", "interleaved-zb:v=2", "zb-v")


def bound(problem: PlanningProblem, stages: tuple[StagePlan, ...], size: int, schedule: str) -> float:
    """The bound of stages with micro-batches of this size."""
    micro_batches = problem.global_batch_size // size
    splits = ScheduleSpec.parse(schedule).splits_backward
    return least_step_seconds(problem.costs, stages, size, micro_batches, splits=splits, overlap=problem.overlap)


def simulated(problem: PlanningProblem, stages: tuple[StagePlan, ...], size: int, schedule: str) -> float:
    """The seconds of the step in the simulator."""
    return problem.simulate(problem.make_plan(stages, size, schedule, "test")).step_seconds


@given(st.data(), cases(6), st.booleans(), st.booleans())
def test_no_step_is_shorter_than_its_bound(data: st.DataObject, case: Case, unequal: bool, contention: bool) -> None:
    cluster = case.cluster
    if unequal:
        servers = tuple(replace(s, kinds=(f"k{i}",) * s.devices) for i, s in enumerate(cluster.servers))
        kinds = {f"k{i}": DeviceKind(speed=1.0 + i) for i in range(len(servers))}
        cluster = replace(cluster, servers=servers, kinds=kinds)
    problem = make_problem(case.profile, cluster, global_batch_size=case.batch, contention=contention, **case.options)
    schedule = data.draw(st.sampled_from(SCHEDULES))
    positions = problem.chain.positions[1:-1]
    per_device = 2 if ScheduleSpec.parse(schedule).chunks else 1
    most = min(cluster.devices, (len(positions) + 1) // per_device)
    assume(most)
    workers = data.draw(st.integers(1, most))
    count = workers * per_device - 1
    cuts = sorted(data.draw(st.sets(st.sampled_from(positions), min_size=count, max_size=count)) if count else ())
    bounds = [0, *cuts, len(case.profile.layers)]
    size = data.draw(st.sampled_from(problem.micro_batch_sizes))
    replicas = data.draw(st.integers(1, min(size, cluster.devices // workers)))
    worker_of = ScheduleSpec.parse(schedule).worker_map(len(bounds) - 1).worker_of
    stages = tuple(
        StagePlan(first, end - 1, tuple(range(worker * replicas, (worker + 1) * replicas)))
        for (first, end), worker in zip(itertools.pairwise(bounds), worker_of, strict=True)
    )
    assert bound(problem, stages, size, schedule) <= simulated(problem, stages, size, schedule) * (1 + 1e-9)


def two_stages(*layers: tuple[float, ...], devices: int = 2, overlap: bool = False) -> PlanningProblem:
    """A problem of 16 samples; the profile's batch is 4."""
    profile: Profile = make_profile(*layers)
    return make_problem(profile, make_cluster(devices), global_batch_size=16, contention=False, overlap=overlap)


TWO = (StagePlan(0, 0, (0,)), StagePlan(1, 1, (1,)))


def test_stages_without_transfers_take_as_long_as_their_bound() -> None:
    problem = two_stages((1, 2), (1, 2))  # of a micro-batch of 4: stage 1 begins after 1 s, and 2 s follow its end
    assert bound(problem, TWO, 4, "dapple-a") == simulated(problem, TWO, 4, "dapple-a") == 3 + 4 * 3


@pytest.mark.parametrize(("overlap", "wanted"), [(False, 4 * 3 + 20), (True, 4 * 3)])
def test_allreduce_counts_where_it_does_not_overlap(overlap: bool, wanted: float) -> None:
    problem = two_stages((2, 4, 0, 0, 200), overlap=overlap)  # on two devices; 200 bytes at 10 bytes a second
    stages = (StagePlan(0, 0, (0, 1)),)
    assert bound(problem, stages, 4, "gpipe") == wanted
    assert simulated(problem, stages, 4, "gpipe") == 4 * 3 + 20


def test_a_device_computes_for_all_of_its_stages() -> None:
    problem = two_stages(*[(1, 2)] * 4)
    stages = tuple(StagePlan(i, i, (i % 2,)) for i in range(4))
    # The second device begins after the first stage's forward, and ends before its backward.
    assert bound(problem, stages, 4, "interleaved-1f1b:v=2") == 3 + 4 * 6


def test_weight_gradients_may_come_after_the_backwards_of_other_stages() -> None:
    problem = two_stages((1, 2, 0, 0, 10), (1, 2, 0, 0, 10))
    step = simulated(problem, TWO, 4, "zb-h1")
    assert bound(problem, TWO, 4, "zb-h1") == 4 * 3
    assert 4 * 3 <= step < 3 + 4 * 3, "else the bound without split backwards would do"
