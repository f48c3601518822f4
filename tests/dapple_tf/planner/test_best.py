"""Guarantees of planner "best" beyond the space that it searches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.planner.api import make_problem
from dapple_tf.planner.best import plan_best
from dapple_tf.profiler.cluster import Cluster, Link, Server, config
from tests.dapple_tf.planner.builders import Case, cases, make_cluster, make_profile


def seconds(case: Case, cluster: Cluster) -> float:
    problem = make_problem(case.profile, cluster, global_batch_size=case.batch, **case.options)
    decision = plan_best(problem)
    return float("inf") if decision is None else decision.chosen.seconds


@given(cases(6))
def test_more_devices_never_make_a_plan_slower(case: Case) -> None:
    left = case.cluster.devices // 2
    servers = list[Server]()
    for server in case.cluster.servers:
        if left > 0:
            servers.append(server.first_devices(left))
            left -= server.devices
    if servers:
        names = {server.name for server in servers}
        links = {pair: link for pair, link in case.cluster.links.items() if names.issuperset(pair)}
        fewer = replace(case.cluster, servers=tuple(servers), links=links)
        assert seconds(case, case.cluster) <= seconds(case, fewer) * (1 + 1e-9)


@given(cases(5), st.integers(1, 2), st.integers(3, 4))
def test_the_order_of_servers_of_unequal_size_does_not_matter(case: Case, small: int, large: int) -> None:
    first = replace(make_cluster(small, large), device_memory=case.cluster.device_memory)
    last = replace(make_cluster(large, small), device_memory=case.cluster.device_memory)
    assert seconds(case, first) <= seconds(case, last) * (1 + 1e-9)


@given(cases(6), st.floats(1e-3, 0.9))
def test_a_slow_link_between_two_servers_is_never_slower_than_leaving_one_out(case: Case, slow: float) -> None:
    inside, between = case.cluster.intra_server, case.cluster.inter_server
    servers = tuple(Server(f"s{i}", 2) for i in range(3))
    links = {("s0", "s1"): Link(slow * between.bandwidth, between.latency)}
    cluster = Cluster(servers, case.cluster.device_memory, inside, between, links)
    less = min(seconds(case, cluster.on_hosts([(name, 2), ("s2", 2)])) for name in ("s0", "s1"))
    assert seconds(case, cluster) <= less * (1 + 1e-9)


@pytest.mark.parametrize("devices", [40, 64])
def test_a_plan_for_a_large_cluster_is_no_slower_than_even_pipelines(devices: int) -> None:
    profile = make_profile(*[(1.0 + i % 3, 2.0, 1e6, 1e6, 1e7) for i in range(24)])
    problem = make_problem(profile, config("b", devices), global_batch_size=64)
    decision = plan_best(problem)
    assert decision is not None
    for stages in range(1, 25):
        for replicas in range(1, devices // stages + 1):
            plan = [(24 * i // stages, 24 * (i + 1) // stages) for i in range(stages)]
            even = [_stage(first, end, i * replicas, replicas) for i, (first, end) in enumerate(plan)]
            for candidate in problem.evaluate_all_sizes(even, "even"):
                assert decision.chosen.seconds <= candidate.seconds * (1 + 1e-9)


def _stage(first: int, end: int, device: int, replicas: int) -> object:
    from dapple_tf.plans import StagePlan

    return StagePlan(first, end - 1, tuple(range(device, device + replicas)))
