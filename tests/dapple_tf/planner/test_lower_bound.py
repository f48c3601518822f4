"""The lower bound of every plan, against plans in the simulator."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.planner.api import make_problem
from dapple_tf.planner.baselines import baseline_candidates, leading_baselines
from dapple_tf.planner.best import least_plan_seconds
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster, Link
from dapple_tf.profiler.profile import Profile, Timing
from dapple_tf.profiler.servers import DeviceKind, Server
from dapple_tf.simulator.costs import CostModel
from tests.dapple_tf.planner.builders import Case, cases, make_cluster, make_profile


def with_timings(profile: Profile, seconds: list[float]) -> Profile:
    """The same profile, measured with a smaller and a larger batch, too."""
    sizes, count = (profile.batch_size - 1, profile.batch_size + 9), len(profile.layers)
    found = [Timing(size, (own,) * count, (own,) * count) for size, own in zip(sizes, seconds, strict=True) if size]
    return replace(profile, timings=tuple(found))


def of_kinds(cluster: Cluster) -> Cluster:
    """The cluster, each of whose servers has devices of a kind of its own."""
    servers = tuple(replace(s, kinds=(f"k{i}",) * s.devices) for i, s in enumerate(cluster.servers))
    kinds = {f"k{i}": DeviceKind(speed=1.0 + i) for i in range(len(servers))}
    return replace(cluster, servers=servers, kinds=kinds)


@given(cases(5), st.lists(st.floats(0.1, 9), min_size=2, max_size=2), st.booleans())
def test_no_plan_is_faster_than_what_its_devices_compute(case: Case, seconds: list[float], timed: bool) -> None:
    profile = with_timings(case.profile, seconds) if timed else case.profile
    problem = make_problem(profile, case.cluster, global_batch_size=case.batch, **case.options)
    least = least_plan_seconds(problem)
    assert all(least <= candidate.seconds * (1 + 1e-9) for candidate in baseline_candidates(problem))


@given(cases(5), st.booleans())
def test_a_stage_computes_no_longer_than_its_costs_say(case: Case, unequal: bool) -> None:
    cluster = of_kinds(case.cluster) if unequal else case.cluster
    problem = make_problem(case.profile, cluster, global_batch_size=case.batch)
    seconds = CostModel(case.profile, cluster)
    for found in baseline_candidates(problem):
        costs = problem.simulate(problem.plan_of(found, "test")).costs
        for stage, cost in zip(found.stages, costs, strict=True):
            computed = cost.forward_seconds + cost.backward_seconds
            # Costs are differences of sums over all layers, and are rounded as these sums are.
            rounding = 1e-15 * sum(layer.forward_seconds + layer.backward_seconds for layer in case.profile.layers)
            least = seconds.compute_seconds(stage, found.micro_batch_size)
            assert least <= computed * (1 + 1e-9) + rounding
            # Forward and backward may take longest on devices of different kinds.
            if cluster.is_uniform:
                assert least == pytest.approx(computed, rel=1e-9, abs=rounding)


@given(cases(5))
def test_leading_baselines_are_the_fastest_of_each_origin_and_size(case: Case) -> None:
    problem = make_problem(case.profile, case.cluster, global_batch_size=case.batch, **case.options)
    leading, every = (
        {
            key: min(c.seconds for c in found if key in (c.origin, c.micro_batch_size))
            for key in {key for c in found for key in (c.origin, c.micro_batch_size)}
        }
        for found in (leading_baselines(problem), baseline_candidates(problem))
    )
    assert leading == pytest.approx(every, rel=1e-9)


def test_dp_of_layers_alike_takes_as_long_as_its_bound() -> None:
    profile = make_profile((4, 8, 0, 0, 0), (4, 8, 0, 0, 0))  # of a batch of 4
    problem = make_problem(profile, make_cluster(2), global_batch_size=8)
    least = least_plan_seconds(problem)
    assert least == pytest.approx(8 * (12 + 12) / 4 / 2)
    assert min(c.seconds for c in baseline_candidates(problem)) == pytest.approx(least)


def test_a_layer_that_takes_hardly_any_time_does_not_change_the_bound() -> None:
    bounds = []
    for seconds in (0.0, 1e-308):
        profile = make_profile((4, 8, 0, 0, 0), (seconds, seconds, 0, 0, 0))
        problem = make_problem(profile, make_cluster(4), global_batch_size=8)
        bounds.append(least_plan_seconds(problem))
    assert bounds[0] == bounds[1] > 0


def test_devices_of_two_kinds_compute_no_less_than_the_bound_and_reach_it() -> None:
    # A layer takes 12 s a sample on the slow device and 6 s on the fast one: 3 samples in 12 s.
    servers = (Server("s", 2, ("slow", "fast")),)
    kinds = {"slow": DeviceKind(speed=1.0), "fast": DeviceKind(speed=2.0)}
    cluster = Cluster(servers, 1e9, Link(1e9, 0), Link(1e9, 0), {}, kinds)
    problem = make_problem(make_profile((16, 32, 0, 0, 0)), cluster, global_batch_size=3)
    assert least_plan_seconds(problem) == pytest.approx(12)
    assert min(c.seconds for c in baseline_candidates(problem)) == pytest.approx(12)


SCHEDULES = ("dapple-a", "dapple-b", "gpipe", "zb-h2", "interleaved-1f1b:v=2")


@given(cases(4), st.booleans())
def test_no_plan_of_all_is_faster_than_the_bound(case: Case, unequal: bool) -> None:
    """All cuts, all numbers of devices in order, all micro-batch sizes, under schedules of every sort."""
    cluster = of_kinds(case.cluster) if unequal else case.cluster
    problem = make_problem(case.profile, cluster, global_batch_size=case.batch, **case.options)
    least, blocks, total = least_plan_seconds(problem), len(problem.chain.positions) - 1, cluster.devices
    bounds = problem.chain.positions
    for count in range(1, min(blocks, 4) + 1):
        for cuts in itertools.combinations(range(1, blocks), count - 1):
            first = [bounds[cut] for cut in (0, *cuts)]
            ends = [*first[1:], len(case.profile.layers)]
            for workers in {count, count // 2} - {0}:
                for splits in itertools.combinations(range(1, total + 1), workers):
                    devices = [tuple(range(a, b)) for a, b in itertools.pairwise((0, *splits))]
                    stages = [StagePlan(first[s], ends[s] - 1, devices[s % workers]) for s in range(count)]
                    for size, schedule in itertools.product(problem.micro_batch_sizes, SCHEDULES):
                        found = problem.evaluate(stages, size, "all", schedule)
                        assert found is None or least <= found.seconds * (1 + 1e-9)


def test_a_layer_that_few_rows_share_is_in_the_bound() -> None:
    """One sample at a time: the second layer, of 8 s a sample, has one device, and starts after the first's forward."""
    problem = make_problem(make_profile((4, 4, 0, 0, 0), (8, 24, 0, 0, 0)), make_cluster(4), global_batch_size=8)
    one = replace(problem, micro_batch_sizes=(1,))
    assert least_plan_seconds(one) == pytest.approx(1 + 8 * 8)
    assert min(c.seconds for c in baseline_candidates(one)) >= least_plan_seconds(one)
