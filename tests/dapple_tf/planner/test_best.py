"""What planner "best" keeps to beyond the space that it searches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.planner.api import make_task
from dapple_tf.planner.best import plan_best
from dapple_tf.planner.search_space import shrink
from profiler.cluster import Cluster
from profiler.presets import config
from tests.dapple_tf.planner.builders import Problem, make_cluster, make_profile, problems


def seconds(problem: Problem, cluster: Cluster) -> float:
    task = make_task(problem.profile, cluster, global_batch_size=problem.batch, **problem.options)
    decision = plan_best(task)
    return float("inf") if decision is None else decision.chosen.seconds


@given(problems(6))
def test_more_devices_never_make_a_plan_slower(problem: Problem) -> None:
    fewer = shrink(problem.cluster)
    if fewer is not None:
        assert seconds(problem, problem.cluster) <= seconds(problem, fewer) * (1 + 1e-9)


@given(problems(5), st.integers(1, 2), st.integers(3, 4))
def test_a_small_server_may_come_first(problem: Problem, small: int, large: int) -> None:
    first = replace(make_cluster(small, large), device_memory=problem.cluster.device_memory)
    last = replace(make_cluster(large, small), device_memory=problem.cluster.device_memory)
    assert seconds(problem, first) <= seconds(problem, last) * (1 + 1e-9)


def test_part_of_a_cluster_is_its_first_servers() -> None:
    found = shrink(config("a", 20))
    assert found is not None
    assert [(server.name, server.devices) for server in found.servers] == [("server0", 8), ("server1", 2)]
    whole = shrink(config("a", 1024))
    assert whole is not None
    assert whole.devices == 128
    assert shrink(config("a", 1)) is None


@pytest.mark.parametrize("devices", [40, 64])
def test_a_large_cluster_is_planned_no_worse_than_its_even_pipelines(devices: int) -> None:
    profile = make_profile(*[(1.0 + i % 3, 2.0, 1e6, 1e6, 1e7) for i in range(24)])
    task = make_task(profile, config("b", devices), global_batch_size=64)
    decision = plan_best(task)
    assert decision is not None
    for stages in range(1, 25):
        for replicas in range(1, devices // stages + 1):
            plan = [(24 * i // stages, 24 * (i + 1) // stages) for i in range(stages)]
            even = [_stage(first, end, i * replicas, replicas) for i, (first, end) in enumerate(plan)]
            for candidate in task.price_all(even, "even"):
                assert decision.chosen.seconds <= candidate.seconds * (1 + 1e-9)


def _stage(first: int, end: int, device: int, replicas: int) -> object:
    from dapple_tf.plan import StagePlan

    return StagePlan(first, end - 1, tuple(range(device, device + replicas)))
