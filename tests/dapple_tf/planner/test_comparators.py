"""The comparators as candidates of planner "best", which is never slower than any planner."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given

from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.best import comparator_candidates, plan_best
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.registry import PLANNERS, find_result
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server, config
from dapple_tf.profiler.importers import read_graph_file
from tests.dapple_tf.planner.builders import Case, cases, make_cluster, make_profile
from tests.paths import SHARED_PROFILES

FAST, SLOW = Link(130e9, 5e-6), Link(25e9 / 8, 20e-6)
CLUSTERS: Mapping[str, Cluster] = {
    "config-a": config("a", 8),
    "config-c": config("c", 8),
    "3 servers of 5": Cluster(tuple(Server(f"s{i}", 5) for i in range(3)), 16e9, FAST, SLOW),
    "a slow cable": Cluster(
        tuple(Server(f"s{i}", 2) for i in range(4)), 16e9, FAST, SLOW, {("s0", "s1"): Link(1e9 / 8, 20e-6)}
    ),
    "unequal servers": Cluster((Server("s0", 4), Server("s1", 2)), 4e9, FAST, SLOW),
}


def check_never_slower(problem: PlanningProblem) -> None:
    """Every planner but best refuses the input, finds nothing, or finds a plan that is no faster."""
    best = plan_best(problem)
    for name in PLANNERS:
        try:
            other = find_result(problem, name)
        except PlanError:
            continue
        if other is not None:
            assert best is not None, name
            assert best.chosen.seconds <= other.chosen.seconds * (1 + 1e-9) + 1e-12, name


@given(cases(largest=6))
def test_never_slower_than_any_planner(case: Case) -> None:
    check_never_slower(make_problem(case.profile, case.cluster, global_batch_size=case.batch, **case.options))


@pytest.mark.skipif(not SHARED_PROFILES.is_dir(), reason="the published profiles (../shared/profiles) are not here")
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    "name", ["amoeba-36-pbs-1", "bert-24-pbs-6", "bert-48-pbs-2", "gnmt-16-pbs-64", "vgg-19-pbs-32", "xlnet-36-pbs-1"]
)
def test_never_slower_than_any_planner_on_published_profiles(name: str, cluster: str) -> None:
    profile = read_graph_file(SHARED_PROFILES / f"{name}.txt")
    check_never_slower(make_problem(profile, CLUSTERS[cluster], global_batch_size=128))


def test_a_comparator_that_refuses_the_cluster_has_no_candidate() -> None:
    profile = make_profile(*[(1, 2, 1, 1, 1)] * 4)
    mesh = make_problem(profile, make_cluster(2, 2), global_batch_size=8)
    uneven = make_problem(profile, make_cluster(3, 1), global_batch_size=8)
    assert "alpa-inter" in {candidate.origin for candidate in comparator_candidates(mesh)}
    assert "alpa-inter" not in {candidate.origin for candidate in comparator_candidates(uneven)}


def test_stages_are_tried_under_the_fastest_policy_too() -> None:
    # Transfers take long: policy B hides them, and Piper's 1F1B does not.
    profile = make_profile((1, 2, 10, 1, 100), (1, 2, 0, 1, 100))
    problem = make_problem(profile, make_cluster(1, 1, between=(10, 0)), global_batch_size=32, micro_batch_size=4)
    found = {(c.origin, c.schedule) for c in comparator_candidates(problem)}
    assert {("piper", "dapple-a"), ("piper", "dapple-b")} <= found


def test_what_piper_recomputes_is_in_the_plan_of_best() -> None:
    # Only the first stage lacks memory: see test_piper.py.
    profile = make_profile(*[(1, 2, 1, 8, 4)] * 4)
    cluster = make_cluster(1, 1, memory=54, between=(1000, 0))
    problem = make_problem(profile, cluster, global_batch_size=16, micro_batch_size=4)
    piper = find_result(problem, "piper")
    assert piper.chosen.recompute == (0, 1)
    best = plan_best(problem)
    assert best.chosen.seconds <= piper.chosen.seconds


def test_large_clusters_have_none() -> None:
    assert not comparator_candidates(make_problem(make_profile((1, 2)), make_cluster(*[1] * 65), global_batch_size=64))


@pytest.mark.parametrize("schedule", ["looped-bfs:v=2", "interleaved-1f1b:v=2"])
def test_never_slower_than_even_layers_where_devices_run_several_stages(schedule: str) -> None:
    profile = make_profile(*[(1, 2, 1, 1, 1), (2, 3, 1, 1, 1)] * 4)
    check_never_slower(make_problem(profile, make_cluster(2, 2), global_batch_size=8, schedule=schedule))


def test_never_slower_than_any_planner_on_unequal_devices() -> None:
    servers = (Server.of_kinds("s0", [("fast", 2)]), Server.of_kinds("s1", [("slow", 2)]))
    kinds = {"fast": DeviceKind(1e9, 1.0), "slow": DeviceKind(1e9, 0.4)}
    cluster = Cluster(servers, None, Link(100, 0), Link(10, 0), {}, kinds)
    profile = make_profile(*[(1, 2, 4, 1, 10), (2, 3, 1, 1, 40)] * 3)
    problem = make_problem(profile, cluster, global_batch_size=24)
    assert {c.origin for c in comparator_candidates(problem)} >= {"even", "torchgpipe", "hetpipe"}
    check_never_slower(problem)
