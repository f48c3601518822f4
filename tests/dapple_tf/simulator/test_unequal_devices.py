"""Stages on devices of different kinds: seconds, transfers and memory by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ProfileError
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server
from dapple_tf.profiler.profile import KindSeconds
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.memory import fit_to_one_limit, memory_limits
from dapple_tf.simulator.simulate import simulate
from dapple_tf.simulator.transfer import link_tables, transfer_cost
from tests.dapple_tf.simulator.builders import make_plan, make_profile

KINDS = {"V100": DeviceKind(1000, 1.0), "T4": DeviceKind(400, 0.5)}


def make_cluster(*groups: tuple[str, int], servers: int = 1, **changes: Any) -> Cluster:
    """Servers of these devices; a server's devices exchange 4 bytes a second after 0.5 s, servers 1 after 1 s."""
    named = tuple(Server.of_kinds(f"s{i}", groups) for i in range(servers))
    return Cluster(named, None, Link(4, 0.5), Link(1, 1), kinds={**KINDS, **changes})


def plan_of(*stages: StagePlan, samples: int = 6, **changes: Any) -> Plan:
    fields = {"micro_batch_size": samples, "global_batch_size": 2 * samples, **changes}
    return replace(make_plan(*((s.first_layer, s.last_layer, s.devices) for s in stages), **fields), stages=stages)


PROFILE = make_profile((4, 8), (2, 6))  # for 4 samples


def test_forward_divides_by_the_sum_of_speeds_where_rows_are_shared_by_speed() -> None:
    plan = plan_of(StagePlan(0, 1, (0, 1, 2), (2.0, 1.0, 1.0)), samples=8)
    (cost,) = stage_costs(plan, PROFILE, make_cluster(("V100", 1), ("T4", 2)))
    assert cost.forward_seconds == 6 * 8 / 4 / (1 + 0.5 + 0.5)
    assert cost.backward_seconds == 14 * 8 / 4 / (1 + 0.5 + 0.5)


def test_shares_that_are_not_whole_rows_cost_what_the_rows_cost_that_run() -> None:
    """Shares 23:23:9:9 of 8 rows: cuts at 2.9, 5.75 and 6.9 are rows 2, 5 and 6, so the devices run 2, 3, 1 and 2."""
    cluster = make_cluster(("V100", 2), ("T4", 2))
    by_hand = plan_of(StagePlan(0, 1, (0, 1, 2, 3), (23.0, 23.0, 9.0, 9.0)), samples=8)
    (cost,) = stage_costs(by_hand, PROFILE, cluster)
    assert cost.forward_seconds == max(3 * 6 / 4, 2 * 6 / 4 / 0.5)
    assert cost.backward_seconds == max(3 * 14 / 4, 2 * 14 / 4 / 0.5)
    in_rows = plan_of(StagePlan(0, 1, (0, 1, 2, 3), (2.0, 3.0, 1.0, 2.0)), samples=8)
    assert (cost,) == stage_costs(in_rows, PROFILE, cluster)
    assert simulate(by_hand, PROFILE, cluster).step_seconds == simulate(in_rows, PROFILE, cluster).step_seconds
    assert memory_limits(by_hand, (cost,), cluster) == memory_limits(in_rows, (cost,), cluster)


def test_equal_shares_wait_for_the_slowest_device() -> None:
    plan = plan_of(StagePlan(0, 1, (0, 1)))
    (cost,) = stage_costs(plan, PROFILE, make_cluster(("V100", 1), ("T4", 1)))
    assert (cost.forward_seconds, cost.backward_seconds) == (6 * 3 / 4 / 0.5, 14 * 3 / 4 / 0.5)


def test_forward_and_backward_may_be_slowest_on_different_devices() -> None:
    """The T4 is measured: layer 0 takes 40 and 1 s there, layer 1 as long as its speed says."""
    layers = replace(PROFILE.layers[0], kinds={"T4": KindSeconds(40.0, 1.0)}), PROFILE.layers[1]
    plan = plan_of(StagePlan(0, 0, (0, 1)), StagePlan(1, 1, (2,)), samples=8)
    first, second = stage_costs(plan, replace(PROFILE, layers=layers), make_cluster(("V100", 1), ("T4", 2)))
    assert (first.forward_seconds, first.backward_seconds) == (40, 8)
    assert (second.forward_seconds, second.backward_seconds) == (2 * 2 / 0.5, 6 * 2 / 0.5)


def test_recomputed_forward_is_that_of_the_same_device() -> None:
    plan = plan_of(StagePlan(0, 1, (0, 1)), recompute=(0,))
    (cost,) = stage_costs(plan, PROFILE, make_cluster(("V100", 1), ("T4", 1)))
    assert cost.backward_seconds == (14 + 4) * 3 / 4 / 0.5


def test_the_stash_is_that_of_the_largest_share() -> None:
    plan = plan_of(StagePlan(0, 1, (0, 1), (3.0, 1.0)), samples=8)
    (cost,) = stage_costs(plan, PROFILE, make_cluster(("V100", 1), ("T4", 1)))
    assert cost.stash_bytes == 12 * 8 / 4 * 3 / 4


def test_a_kind_without_costs_is_named() -> None:
    cluster = make_cluster(("V100", 1), ("T4", 1), T4=DeviceKind(400))
    with pytest.raises(ProfileError, match=r"layers\[0\].kinds \(layer0\) has no seconds of 'T4', and the cluster"):
        simulate(plan_of(StagePlan(0, 1, (0, 1))), PROFILE, cluster)


def test_replicas_exchange_the_rows_that_both_hold() -> None:
    """Senders hold [0, 3/4) and [3/4, 1), receivers [0, 1/2) and [1/2, 1); all are on servers of their own."""
    cluster = make_cluster(("T4", 1), servers=4)
    latency, per_byte = transfer_cost([0, 1], [2, 3], link_tables(cluster), ((3, 1), ()))
    assert (latency, per_byte) == (1, 3 / 4)
    latency, per_byte = transfer_cost([0, 1], [0, 3], link_tables(cluster), ((3, 1), (2, 3)))
    assert (latency, per_byte) == (1, 3 / 5)  # server 3 receives 7/20 of server 0 and 1/4 of server 1


@given(counts=st.tuples(st.integers(1, 6), st.integers(1, 6)), times=st.integers(1, 5))
def test_equal_shares_cost_what_no_shares_do(counts: tuple[int, int], times: int) -> None:
    cluster = make_cluster(("T4", 1), servers=12)
    senders, receivers = range(counts[0]), range(3, 3 + counts[1])
    shares = ((times,) * counts[0], (1,) * counts[1])
    plain = transfer_cost(senders, receivers, link_tables(cluster))
    assert transfer_cost(senders, receivers, link_tables(cluster), shares) == pytest.approx(plain, rel=1e-12)


def test_each_device_holds_its_share_against_its_own_memory() -> None:
    plan = plan_of(StagePlan(0, 1, (0, 1), (3.0, 1.0)), samples=8)
    cluster = make_cluster(("V100", 1), ("T4", 1))
    costs = stage_costs(plan, PROFILE, cluster)  # fixed: 2 x 10 bytes x 4
    (limit,) = memory_limits(plan, costs, cluster)
    assert (limit.device, limit.memory, limit.share, limit.fixed) == (0, 1000, 1, 80)
    slow = make_cluster(("V100", 1), ("T4", 1), T4=DeviceKind(180, 0.5))
    (limit,) = memory_limits(plan, costs, slow)
    assert (limit.device, limit.memory) == (1, 180)
    assert limit.need(80 + 300) == pytest.approx(80 + 100)
    assert limit.room == pytest.approx(80 + 300)


@pytest.mark.parametrize(("memory", "fits"), [(101, True), (99, False)])
def test_a_step_fits_if_every_device_has_enough(memory: float, fits: bool) -> None:
    """Device 1 holds 80 bytes, and a quarter: 6 of each of 2 micro-batches in flight, and 8 of gradients."""
    plan = plan_of(StagePlan(0, 1, (0, 1), (3.0, 1.0)), samples=8)
    cluster = make_cluster(("V100", 1), ("T4", 1), T4=DeviceKind(memory, 0.5))
    timeline = simulate(plan, PROFILE, cluster)
    assert timeline.peak_memory_bytes == (80 + 3 * (2 * 6 + 8),)
    assert timeline.fits == (fits,)
    assert ("lacks" in str(timeline)) != fits


@given(memories=st.lists(st.integers(60, 300), min_size=3, max_size=3), in_flight=st.integers(1, 3))
def test_one_limit_for_all_stages_allows_what_the_devices_do(memories: list[int], in_flight: int) -> None:
    plan = plan_of(StagePlan(0, 0, (0, 1), (3.0, 1.0)), StagePlan(1, 1, (2,)), samples=8)
    kinds = {f"k{i}": DeviceKind(memory, 1.0) for i, memory in enumerate(memories)}
    cluster = make_cluster(*((kind, 1) for kind in kinds), **kinds)
    costs = stage_costs(plan, PROFILE, cluster)
    padded, memory = fit_to_one_limit(plan, costs, cluster)
    for stage, cost, own in zip(plan.stages, costs, padded, strict=True):
        varies = cost.working_bytes + in_flight * cost.stash_bytes
        most = max(stage.fractions)
        each = [
            cost.fixed_bytes + varies * fraction / most <= cluster.memory_of(device)
            for device, fraction in zip(stage.devices, stage.fractions, strict=True)
        ]
        assert (own.fixed_bytes + varies <= memory * (1 + 1e-12)) == all(each)


def test_speedup_is_against_the_fastest_device() -> None:
    plan = plan_of(StagePlan(0, 1, (1,)), samples=4)
    timeline = simulate(plan, PROFILE, make_cluster(("V100", 1), ("T4", 1)))
    assert timeline.step_seconds == 2 * 20 / 0.5
    np.testing.assert_allclose(timeline.speedup, 0.5)


def test_devices_of_one_kind_are_as_fast_as_the_profile_on_that_kind() -> None:
    plan = plan_of(StagePlan(0, 0, (0, 1)), StagePlan(1, 1, (2,)))
    on_kind = PROFILE.of_kind("T4", 0.5)
    plain = Cluster((Server("s0", 3),), 400, Link(4, 0.5), Link(1, 1))
    found = simulate(plan, PROFILE, make_cluster(("T4", 3)))
    assert found.step_seconds == simulate(plan, on_kind, plain).step_seconds
    assert found.speedup == simulate(plan, on_kind, plain).speedup
