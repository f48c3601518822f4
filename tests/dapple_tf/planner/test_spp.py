"""Planner "spp": each part against all choices, the paper's lemmas, numbers worked out by hand, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.systems.device_order import device_bandwidths, order_by_cuts
from dapple_tf.planner.systems.spp import (
    Mapped as Partition,
)
from dapple_tf.planner.systems.spp import (
    SppCosts,
    SppStage,
    find_partitions,
    least_bandwidths,
    makespan,
    schedule_name,
    stage_seconds,
)
from dapple_tf.plans import Plan
from tests.dapple_tf.planner import spp_reference
from tests.dapple_tf.planner.builders import figures, make_cluster, make_profile
from tests.dapple_tf.planner.spp_reference import Instance, Mapped
from tests.graph_passes.builders import refused


@st.composite
def bandwidths(draw: st.DrawFn, most: int = 4) -> list[list[float]]:
    """Draw b_{v,v'} of up to ``most`` devices that are all linked."""
    count = draw(st.integers(1, most))
    found = [[0.0] * count for _ in range(count)]
    for v, w in itertools.combinations(range(count), 2):
        found[v][w] = found[w][v] = draw(st.sampled_from([1.0, 2.0, 5.0, 40.0]))
    return found


@st.composite
def instances(draw: st.DrawFn, most_layers: int = 5, most_devices: int = 4) -> Instance:
    """Draw up to five layers, of which some tie, on up to four devices."""
    count = draw(st.integers(1, most_layers))
    rows = draw(st.lists(st.tuples(figures(10), figures(10), figures(60)), min_size=count, max_size=count))
    forward, backward, alpha = zip(*rows, strict=True)
    sent = draw(st.lists(figures(20), min_size=count - 1, max_size=count - 1))
    return Instance(forward, backward, alpha, sent, draw(bandwidths(most_devices)), draw(st.integers(1, 12)))


def to_costs(instance: Instance, order: Sequence[int]) -> SppCosts:
    devices = len(order)
    replicas = np.arange(1, devices + 1)[:, None]
    sums = [np.concatenate([[0.0], np.cumsum(row)]) for row in (instance.forward, instance.backward, instance.alpha)]
    forward, backward = (np.array(row / replicas, float) for row in sums[:2])
    ordered = np.array([[instance.bandwidths[v][w] for w in order] for v in order], float)
    return SppCosts(
        forward,
        backward,
        sums[2],
        np.array([0.0, *instance.sent, 0.0]),
        np.zeros(len(sums[2]), np.bool_),
        least_bandwidths(ordered),
        instance.micro_batches,
    )


def to_mapped(stages: Sequence[SppStage], order: Sequence[int]) -> list[Mapped]:
    return [Mapped(range(s.first, s.end), order[s.low : s.high]) for s in stages]


def solve(instance: Instance) -> tuple[tuple[int, ...], SppCosts, tuple[Partition, ...]]:
    order = order_by_cuts(np.array(instance.bandwidths))
    costs = to_costs(instance, order)
    return order, costs, find_partitions(costs)


def phi_of(instance: Instance) -> float | None:
    """Return Phi of Lemma 2; None where it has no value: no links, or nothing to compute."""
    compute = [f + b for f, b in zip(instance.forward, instance.backward, strict=True)]
    links = [instance.bandwidths[v][w] for v, w in itertools.combinations(range(len(instance.bandwidths)), 2)]
    gamma = sum(compute) / len(instance.bandwidths)
    if not links or not gamma:
        return None
    moved = max(max(compute) * max(links), 2 * max(instance.sent, default=0.0))
    return moved / gamma * (1 / min(links) - 1 / max(links))


# --- RDO


def cut_seconds(found: Any, part: Sequence[int], rest: Sequence[int]) -> float:
    return float(sum(found[v][w] for v in part for w in rest))


def follows_min_cuts(found: Any, order: Sequence[int]) -> bool:
    """Return whether some global min-cut, found by trying all, divides the order in two, and so each part."""
    if len(order) == 1:
        return True
    subsets = itertools.chain.from_iterable(itertools.combinations(order, n) for n in range(1, len(order)))
    least = min(cut_seconds(found, part, [v for v in order if v not in part]) for part in subsets)
    return any(
        cut_seconds(found, order[:n], order[n:]) <= least * (1 + 1e-12)
        and follows_min_cuts(found, order[:n])
        and follows_min_cuts(found, order[n:])
        for n in range(1, len(order))
    )


@given(bandwidths(6))
def test_min_cuts_divide_the_devices_recursively(found: list[list[float]]) -> None:
    order = order_by_cuts(np.array(found))
    assert sorted(order) == list(range(len(found)))
    assert follows_min_cuts(found, order)


def test_devices_of_a_server_and_servers_of_a_rack_follow_each_other() -> None:
    pairs = make_cluster(2, 2, inside=(10.0, 0.0), between=(1.0, 0.0))
    assert order_by_cuts(device_bandwidths(pairs)) == (0, 1, 2, 3)
    # Servers 0 and 2, and 1 and 3, have fast links: the racks follow each other.
    links = {("s0", "s2"): (100.0, 0.0), ("s1", "s3"): (100.0, 0.0)}
    racks = make_cluster(2, 1, 2, 1, inside=(200.0, 0.0), links=links)
    assert order_by_cuts(device_bandwidths(racks)) == (2, 5, 4, 3, 0, 1)


def test_a_ring_of_servers_is_followed() -> None:
    ring = {(f"s{i}", f"s{(i + 1) % 5}"): (10.0, 0.0) for i in range(5)}
    order = order_by_cuts(device_bandwidths(make_cluster(1, 1, 1, 1, 1, links=ring)))
    assert all((b - a) % 5 in (1, 4) for a, b in itertools.pairwise(order))


def test_the_wider_link_joins_the_parts_of_a_cut() -> None:
    # {0, 1} and {2, 3} are pairs. Between them only 0 and 3 have a link of more than 1: they meet.
    found = np.array([[0, 50, 1, 5], [50, 0, 1, 1], [1, 1, 0, 50], [5, 1, 50, 0]], float)
    assert order_by_cuts(found) == (1, 0, 3, 2)


def test_devices_that_no_links_join_are_refused_by_name() -> None:
    found = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]], float)
    with refused(PlanError, "no links join devices 0 and 2, not even through others"):
        order_by_cuts(found)


# --- PRM


@given(instances(), st.randoms(use_true_random=False))
def test_w_is_the_least_of_all_partitions_in_the_order(instance: Instance, random: Any) -> None:
    order = list(range(len(instance.bandwidths)))
    random.shuffle(order)
    found = find_partitions(to_costs(instance, order))
    wanted: dict[int, float] = {}
    for stages in spp_reference.partitions(instance, order):
        seconds = spp_reference.longest(instance, stages)
        wanted[len(stages)] = min(seconds, wanted.get(len(stages), float("inf")))
    assert [len(partition.stages) for partition in found] == sorted(wanted)
    for partition in found:
        assert partition.seconds == pytest.approx(wanted[len(partition.stages)], rel=1e-9, abs=1e-9)
        reached = spp_reference.longest(instance, to_mapped(partition.stages, order))
        assert reached == pytest.approx(partition.seconds, rel=1e-9, abs=1e-9)


@given(instances())
def test_lemma_2(instance: Instance) -> None:
    """W_PRM <= (1 + Phi) W*, of all stages on all devices."""
    phi = phi_of(instance)
    if phi is None:
        return
    least = min(spp_reference.longest(instance, stages) for stages in spp_reference.mappings(instance))
    _, _, found = solve(instance)
    reached = min(partition.seconds for partition in found)
    assert least <= reached * (1 + 1e-9)
    assert reached <= (1 + phi) * least * (1 + 1e-9)


def test_w_is_not_always_the_least_of_all_mappings() -> None:
    """RDO knows no layers: the fast pair is behind the slow device, but the first layer has the many weights."""
    slow_last = [[0.0, 40.0, 1.0], [40.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    instance = Instance((4, 2), (4, 2), (40, 0), (0,), slow_last, 1)
    order, _, found = solve(instance)
    assert order == (2, 0, 1)
    # In this order the first layer on 2 devices would reduce 40 bytes at 1 byte/s; alone it takes 8 s.
    assert min(partition.seconds for partition in found) == 8
    # On the fast pair: 8 / 2 s and 40 / 40 s.
    best = [Mapped([0], [0, 1]), Mapped([1], [2])]
    assert spp_reference.longest(instance, best) == 5
    assert min(spp_reference.longest(instance, stages) for stages in spp_reference.mappings(instance)) == 5


# --- PE


@given(st.integers(1, 6), st.integers(1, 30))
def test_queues_are_those_of_the_papers_cycles(stages: int, micro_batches: int) -> None:
    schedule = ScheduleSpec.parse(schedule_name(stages, micro_batches)).build(stages, micro_batches)
    found = [[(action.kind, action.micro_batch) for action in row] for row in schedule.stages]
    assert found == spp_reference.cycle_orders(stages, micro_batches)


def test_the_order_of_figure_4s_example() -> None:
    """Two stages and six micro-batches."""
    assert str(ScheduleSpec.parse(schedule_name(2, 6)).build(2, 6)) == (
        "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5"
    )
    assert schedule_name(3, 20) == "K=9,5,1"
    assert schedule_name(3, 4) == "K=4,4,1"


@given(instances())
def test_the_makespan_is_that_of_the_queues_and_within_lemma_1(instance: Instance) -> None:
    order, costs, found = solve(instance)
    for partition in found:
        mapped = to_mapped(partition.stages, order)
        queues = spp_reference.cycle_orders(len(mapped), instance.micro_batches)
        wanted = spp_reference.makespan(instance, mapped, queues)
        seconds = makespan(stage_seconds(costs, partition.stages), instance.micro_batches)
        assert seconds == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        assert seconds <= spp_reference.cycle_bound(instance, mapped) * (1 + 1e-9) + 1e-9


few_micro_batches = instances(3, 3).map(lambda found: found._replace(micro_batches=min(found.micro_batches, 3)))


@given(few_micro_batches)
def test_theorem_1(instance: Instance) -> None:
    """T_SPP < (2 + (4 V - 4) / M) (1 + Phi) T*, of all stages on all devices in all orders."""
    phi, v = phi_of(instance), len(instance.bandwidths)
    if phi is None:
        return
    _, costs, found = solve(instance)
    reached = min(makespan(stage_seconds(costs, p.stages), instance.micro_batches) for p in found)
    least = spp_reference.best_makespan(instance, spp_reference.mappings(instance))
    assert least <= reached * (1 + 1e-9)
    assert reached <= (2 + (4 * v - 4) / instance.micro_batches) * (1 + phi) * least * (1 + 1e-9)


def test_the_order_of_the_queues_is_not_always_the_fastest() -> None:
    """Stage 1 runs its second forward before the backward that stage 0 waits for, and which could begin."""
    equal = [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    instance = Instance((0, 2, 0), (4, 1, 1), (0, 0, 0), (2, 0), equal, 2)
    stages = [Mapped([n], [n]) for n in range(3)]
    partition = tuple(SppStage(n, n + 1, n, n + 1) for n in range(3))
    # Stage 1: F0 at 2 to 4, F1 to 6, B0 to 7; sent until 9; stage 0 runs its backwards until 13 and 17.
    assert makespan(stage_seconds(to_costs(instance, (0, 1, 2)), partition), 2) == 17
    # B0 at 5 to 6, sent until 8; then 12 and 16.
    assert spp_reference.best_makespan(instance, [stages]) == 16


# --- the planner

# Of each layer: seconds of forward and backward, bytes sent, kept and trained of 4 samples.
PROFILE = make_profile((2.0, 4.0, 4.0, 8.0, 1.0), (2.0, 4.0, 4.0, 8.0, 1.0), (1.0, 2.0, 0.0, 4.0, 400.0))


def plan(profile: Any = PROFILE, cluster: Any = None, batch: int = 16, **options: Any) -> Plan:
    cluster = make_cluster(3) if cluster is None else cluster
    return dapple.plan(profile, cluster, global_batch_size=batch, planner="spp", **options)


def test_a_plan_has_stages_order_prediction_and_file(tmp_path: Any) -> None:
    cluster = make_cluster(3, inside=(10.0, 0.0))
    found = plan(cluster=cluster, micro_batch_size=2)
    # W of 2-1: 8 x 6 / 2 + 2 / 2 x 2 / 10 s, and 2 x 8 x 2 / (2 x 10) between; 1-1-1 has 8 x 3; 3 reduces 402 bytes.
    assert [(s.first_layer, s.last_layer, s.devices) for s in found.stages] == [(0, 1, (0, 1)), (2, 2, (2,))]
    assert (found.planner, found.micro_batches, found.schedule) == ("spp", 8, "K=5,1")
    timeline = dapple.simulate(found, PROFILE, cluster)
    assert found.predicted["step_seconds"] == timeline.step_seconds
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


def test_algorithm_3_weighs_the_number_of_stages_against_w() -> None:
    """With one micro-batch more stages only wait for each other, with many they are faster than an AllReduce."""
    cluster = make_cluster(2, inside=(10.0, 0.0))
    profile = make_profile((1.0, 2.0, 0.0, 0.0, 20.0), (1.0, 2.0, 0.0, 0.0, 20.0))
    # One stage: 16 samples take 12 s, and AllReduce 40 / 10. Two stages, M = 1: 12 s each in turn.
    one = run_planner(make_problem(profile, cluster, global_batch_size=16, micro_batch_size=16), "spp")
    assert [stage.replicas for stage in one.chosen.stages] == [2]
    assert one.formula_seconds == 12 + 4
    # M = 8: 1.5 s a micro-batch and stage; the first forward waits 0.5 s, and the last backward is 1 s behind.
    many = run_planner(make_problem(profile, cluster, global_batch_size=16, micro_batch_size=2), "spp")
    assert [stage.replicas for stage in many.chosen.stages] == [1, 1]
    assert many.formula_seconds == 0.5 + 8 * 1.5 + 1
    assert many.formula == "T_PE by SPP's costs"


def test_all_options_of_a_plan_apply() -> None:
    found = plan(micro_batch_size=4, schedule="dapple-a", recompute=True, overlap=True)
    assert (found.micro_batch_size, found.schedule, found.recompute, found.overlap) == (4, "dapple-a", True, True)
    # Re-computed forwards count: 9 x 4 s on the stage of two replicas.
    whole = run_planner(make_problem(PROFILE, make_cluster(1), global_batch_size=8, recompute=True), "spp")
    assert whole.formula_seconds == 2 * (15 + 5)


def test_stages_follow_the_links_of_the_cluster() -> None:
    links = {("s0", "s2"): (100.0, 0.0), ("s1", "s3"): (100.0, 0.0)}
    profile = make_profile((4.0, 4.0, 1.0, 0.0, 40.0), (4.0, 4.0, 0.0, 0.0, 40.0))
    found = plan(profile, make_cluster(1, 1, 1, 1, links=links))
    assert [set(stage.devices) for stage in found.stages] == [{0, 2}, {1, 3}]


def test_a_plan_that_does_not_fit_the_memory_gives_way_to_one_that_does() -> None:
    profile = make_profile(*[(1.0, 2.0, 0.0, 4.0, 10.0)] * 4)
    problem = make_problem(profile, make_cluster(2, inside=(1e3, 0.0)), global_batch_size=16)
    unlimited = run_planner(problem, "spp").chosen
    tight = make_cluster(2, memory=100.0, inside=(1e3, 0.0))  # 160 bytes of weights, gradients and slots
    found = plan(profile, tight)
    assert [stage.replicas for stage in unlimited.stages] == [2]
    assert found.replicas == (1, 1)
    assert all(dapple.simulate(found, profile, tight).fits)


def test_stages_of_unequal_replicas_do_not_meet_where_they_cannot() -> None:
    limited = make_profile(
        (2.0, 4.0, 4.0, 8.0, 1.0), (2.0, 4.0, 4.0, 8.0, 1.0), (1.0, 2.0, 0.0, 4.0, 400.0), unsplittable=(2,)
    )
    found = plan(limited, micro_batch_size=2)
    pairs = itertools.pairwise(found.stages)
    assert all(b.first_layer != 2 or a.replicas == b.replicas for a, b in pairs)


def test_more_blocks_than_the_program_takes_are_merged() -> None:
    found = plan(make_profile(*[(1.0, 2.0, 1.0, 1.0, 1.0)] * 900), make_cluster(3, inside=(1e6, 0.0)))
    assert found.stages[-1].last_layer == 899


def test_more_devices_than_the_planner_takes_are_refused() -> None:
    with refused(PlanError, "the cluster has 65 devices; planner 'spp' is for at most 64: use planner 'best'"):
        plan(cluster=make_cluster(33, 32), batch=128)
