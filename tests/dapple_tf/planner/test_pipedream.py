"""Planner "pipedream": against all pipelines, against numbers worked out by hand, and its refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.systems.hierarchy import Hierarchy, Level, derive_hierarchy
from dapple_tf.planner.systems.pipedream import FoundStage, find_stages
from dapple_tf.planner.systems.pipedream_formula import (
    count_active_minibatches,
    predict_throughput,
    replicated_seconds,
)
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile
from tests.dapple_tf.planner.builders import figures, make_cluster, make_profile
from tests.dapple_tf.planner.pipedream_reference import Instance, least_seconds
from tests.graph_passes.builders import refused


def make_hierarchy(*levels: tuple[int, float]) -> Hierarchy:
    total = int(np.prod([count for count, _ in levels], dtype=int))
    return Hierarchy(tuple(Level(*level) for level in levels), tuple(range(total)))


def search(instance: Instance) -> tuple[float, tuple[FoundStage, ...]]:
    arrays = (np.array(values, float) for values in (instance.compute, instance.weights, instance.activations[:-1]))
    return find_stages(*arrays, make_hierarchy(*instance.levels))


def to_profile(instance: Instance) -> Profile:
    """Return the profile of the instance, whose minibatch is the profile's batch."""
    rows = zip(instance.compute, instance.activations, instance.weights, strict=True)
    return make_profile(*[(compute / 4, compute * 3 / 4, sent, 0.0, weights) for compute, sent, weights in rows])


def to_plan(found: tuple[FoundStage, ...]) -> list[StagePlan]:
    return [StagePlan(stage.first, stage.end - 1, stage.indices) for stage in found]


def plan(profile: Profile, cluster: Cluster, batch: int = 8, **options: Any) -> Plan:
    return dapple.plan(profile, cluster, global_batch_size=batch, planner="pipedream", **options)


# --- against all pipelines

TOPOLOGIES = ([], [2], [3], [5], [2, 2], [4, 2], [2, 3], [3, 2], [2, 2, 2], [2, 2, 2, 2])


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Draw costs of up to five layers, which often tie, and levels of up to 16 devices, faster inside or outside."""
    counts = draw(st.sampled_from(TOPOLOGIES))
    most = 3 if len(counts) > 2 else 5
    layers = draw(st.lists(st.tuples(figures(10), figures(20), figures(10)), min_size=1, max_size=most))
    speeds = st.sampled_from([0.5, 2.0, 10.0, 100.0])
    compute, weights, activations = zip(*layers, strict=True)
    return Instance(compute, weights, activations, [(count, draw(speeds)) for count in counts])


@given(instances())
def test_the_optimum_is_that_of_all_pipelines_and_the_stages_reach_it(instance: Instance) -> None:
    wanted = least_seconds(instance)
    seconds, found = search(instance)
    assert seconds == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    # The stages hold every block once, in order, and every device once.
    assert [stage.first for stage in found] == [0, *(stage.end for stage in found[:-1])]
    assert found[-1].end == len(instance.compute)
    hierarchy = make_hierarchy(*instance.levels)
    assert sorted(itertools.chain.from_iterable(stage.indices for stage in found)) == list(hierarchy.devices)
    # The formula for given stages sees the same seconds in them.
    predicted = predict_throughput(to_plan(found), to_profile(instance), hierarchy)
    assert predicted.minibatch_seconds == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(instances(), st.data())
def test_no_plan_of_one_level_has_a_higher_predicted_throughput(instance: Instance, data: st.DataObject) -> None:
    hierarchy = make_hierarchy(*instance.levels).flatten()
    profile, blocks, devices = to_profile(instance), len(instance.compute), len(hierarchy.devices)
    count = data.draw(st.integers(1, min(blocks, devices)))
    cuts = sorted(data.draw(st.permutations(range(1, blocks)))[: count - 1])
    shares = sorted(data.draw(st.permutations(range(1, devices)))[: count - 1])
    stages = [
        StagePlan(first, end - 1, tuple(range(low, high)))
        for (first, end), (low, high) in zip(
            itertools.pairwise([0, *cuts, blocks]), itertools.pairwise([0, *shares, devices]), strict=True
        )
    ]
    levels = [(level.count, level.bandwidth) for level in hierarchy.levels]
    best, _ = search(instance._replace(levels=levels))
    assert best <= predict_throughput(stages, profile, hierarchy).minibatch_seconds * (1 + 1e-9) + 1e-9


# --- numbers worked out by hand


def test_a_straight_a_replicated_and_a_data_parallel_optimum_by_hand() -> None:
    even = Instance((3, 3), (10, 10), (1, 0), [(2, 1.0)])
    # One stage: max(6, 2 x 1 x 20 / 1) / 2 = 20. Two stages: 3 s each, 2 x 1 / 1 = 2 s between them.
    assert search(even) == (3, (FoundStage(0, 1, (0,)), FoundStage(1, 2, (1,))))
    light = even._replace(weights=(1, 1), activations=(4, 0))
    # Two stages: 2 x 4 / 1 = 8. One stage: max(6, 2 x 1 x 2) / 2 = 3.
    assert search(light) == (3, (FoundStage(0, 2, (0, 1)),))
    uneven = Instance((8, 2), (1, 100), (1, 0), [(3, 1.0)])
    # 2-1: max(8, 2 x 1 x 1) / 2 = 4, and 2 x 1 = 2 between. 3: 2 x 2 x 101 / 3 = 134.7. 1-2: 8 and more.
    assert search(uneven) == (4, (FoundStage(0, 1, (0, 1)), FoundStage(1, 2, (2,))))


def test_two_levels_by_hand() -> None:
    """Two servers of two devices, and two layers of 3 s; inside 10 bytes/s, between 1 byte/s."""
    levels = [(2, 10.0), (2, 1.0)]
    # In a server: straight max(3, 2 x 20 / 10) = 4; one stage max(6, 2 x 20 / 10) / 2 = 3, which is better.
    # Over the servers: one stage max(3, 2 x 20 / 1) / 2 = 20; a cut between servers takes 2 x 20 / 1 = 40.
    found = search(Instance((3, 3), (10, 10), (20, 0), levels))
    assert found == (20, (FoundStage(0, 2, (0, 1, 2, 3)),))
    # One stage over the servers: 2 x 60 / 2 = 60. A cut: 2 x 5 = 10, and its stages in a server
    # max(3, 2 x 50 / 10) / 2 = 5 and max(3, 2 x 10 / 10) / 2 = 1.5.
    found = search(Instance((3, 3), (50, 10), (5, 0), levels))
    assert found == (10, (FoundStage(0, 1, (0, 1)), FoundStage(1, 2, (2, 3))))


def test_a_pipeline_inside_each_server_is_replicated_over_the_servers_by_hand() -> None:
    """Two servers of two devices, and layers of 6 s; slow links inside (1 byte/s), fast ones between (100)."""
    # In a server: straight max(6, 2 x 1 / 1) = 6; one stage max(12, 2 x 100 / 1) / 2 = 100. Over the servers: that
    # pipeline twice, max(6, 2 x 100 / 100) / 2 = 3; a cut has stages of max(6, 2 x 50 / 1) / 2 = 50.
    found = search(Instance((6, 6), (50, 50), (1, 0), [(2, 1.0), (2, 100.0)]))
    assert found == (3, (FoundStage(0, 1, (0, 2)), FoundStage(1, 2, (1, 3))))


def test_formula_of_a_pipeline_that_is_replicated_over_two_servers_by_hand() -> None:
    profile = make_profile((1, 2, 5, 0, 50), (2, 1, 0, 0, 10))  # layers of 3 s
    hierarchy = make_hierarchy((2, 10.0), (2, 1.0))
    stages = [StagePlan(0, 0, (0, 2)), StagePlan(1, 1, (1, 3))]
    # In a server straight: max(3, 3, 2 x 5 / 10). Over the servers all weights: max(3, 2 x 60 / 1) / 2.
    assert predict_throughput(stages, profile, hierarchy).minibatch_seconds == 60
    # One level, at 1 byte/s: max(3, 2 x 50) / 2, max(3, 2 x 10) / 2, and 2 x 5 between.
    found = predict_throughput(stages, profile, hierarchy.flatten())
    assert (found.minibatch_seconds, found.minibatch_size, found.noam) == (50, 4, 2)
    assert found.samples_per_second == 4 / 50
    # A minibatch of 8 samples takes twice as long and sends twice as much.
    straight = [StagePlan(0, 0, (0,)), StagePlan(1, 1, (1,))]
    assert predict_throughput(straight, profile, hierarchy, 8).minibatch_seconds == 6
    assert predict_throughput(straight, profile, hierarchy.flatten(), 8).minibatch_seconds == 20


def test_the_allreduce_is_the_printed_one() -> None:
    # Figure 8's first stage: 2 replicas. Each sends 30 bytes of 60 and receives as many, which would be 60 bytes for
    # two minibatches; the formula has 2 x (2 - 1) x 60 for them.
    assert replicated_seconds(0.0, 60.0, 10.0, 2) == 2 * 60 / 10 / 2
    assert replicated_seconds(36.0, 60.0, 10.0, 3) == 12


@pytest.mark.parametrize(
    ("replicas", "noam"), [((1, 1, 1, 1), 4), ((2, 1), 2), ((15, 1), 2), ((16,), 1), ((2, 1, 1), 2), ((1, 15), 16)]
)
def test_noam_is_the_papers(replicas: tuple[int, ...], noam: int) -> None:
    assert count_active_minibatches(replicas) == noam


# --- the planner

# Of each layer: seconds, bytes sent, kept and trained of 4 samples.
CONVOLUTIONS = ((4.0, 8.0, 4.0, 8.0, 1.0),) * 2
PROFILE = make_profile(*CONVOLUTIONS, (1.0, 2.0, 1.0, 4.0, 400.0))


def test_a_plan_has_stages_on_devices_prediction_and_file(tmp_path: Any) -> None:
    cluster = make_cluster(3, inside=(10.0, 0.0))
    found = plan(PROFILE, cluster)
    # 2-1: max(24, 2 x 1 x 2 / 10) / 2 = 12, sending 2 x 4 / 10, and 3.
    assert [(s.first_layer, s.last_layer, s.devices) for s in found.stages] == [(0, 1, (0, 1)), (2, 2, (2,))]
    assert found.planner == "pipedream"
    assert found.predicted["pipedream"] == {"minibatch_seconds": 12, "minibatch_size": 4, "noam": 2}
    timeline = dapple.simulate(found, PROFILE, cluster)
    assert found.predicted["step_seconds"] == timeline.step_seconds
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


def test_all_options_of_a_plan_apply() -> None:
    found = plan(PROFILE, make_cluster(3), micro_batch_size=2, schedule="gpipe", recompute=True, overlap=True)
    assert (found.micro_batch_size, found.schedule, found.recompute, found.overlap) == (2, "gpipe", True, True)


def test_the_minibatch_size_changes_compute_and_activations_but_not_weights() -> None:
    cluster = make_cluster(2, inside=(10.0, 0.0))
    profile = make_profile((1.0, 1.0, 0.0, 0.0, 10.0), (1.0, 1.0, 0.0, 0.0, 10.0), (1.0, 1.0, 0.0, 0.0, 10.0))
    # Straight 2:1 takes 4 s for 4 samples; one stage max(6, 2 x 30 / 10) / 2 = 3. For one sample 1 s; max(1.5, 6) / 2.
    assert plan(profile, cluster).replicas == (2,)
    small = plan(profile, cluster, minibatch_size=1)
    assert small.replicas == (1, 1)
    assert small.predicted["pipedream"] == {"minibatch_seconds": 1, "minibatch_size": 1, "noam": 2}


def test_flat_takes_all_devices_as_one_level_at_the_least_bandwidth() -> None:
    cluster = make_cluster(2, 2, inside=(1000.0, 0.0), between=(100.0, 0.0))
    heavy = make_profile((9.0, 9.0, 1.0, 0.0, 1.0), (1.0, 1.0, 0.0, 0.0, 900.0))
    problem = make_problem(heavy, cluster, global_batch_size=12)
    # In levels: the devices of a server are of equal stages, or two stages; 2-2 takes 18 / 2.
    hierarchical = run_planner(problem, "pipedream")
    flat = run_planner(problem, "pipedream", flat=True)
    assert [stage.replicas for stage in hierarchical.chosen.stages] == [2, 2]
    assert hierarchical.pipedream.minibatch_seconds == 9
    assert [stage.replicas for stage in flat.chosen.stages] == [3, 1]  # 18 / 3
    assert flat.pipedream.minibatch_seconds == 6


def test_devices_of_a_level_are_those_that_fast_links_join() -> None:
    """Servers s0 and s2, and s1 and s3, are pairs with fast links: the heavy first layer is replicated in one pair."""
    links = {("s0", "s2"): (100.0, 0.0), ("s1", "s3"): (100.0, 0.0)}
    cluster = make_cluster(1, 1, 1, 1, links=links)
    profile = make_profile((3.0, 3.0, 1.0, 0.0, 40.0), (3.0, 3.0, 0.0, 0.0, 40.0))
    found = plan(profile, cluster)
    assert [stage.devices for stage in found.stages] == [(0, 2), (1, 3)]


def test_stages_of_unequal_replicas_do_not_meet_where_they_cannot() -> None:
    cluster = make_cluster(3)
    free = make_profile(*CONVOLUTIONS, (1.0, 2.0, 1.0, 4.0, 400.0), (1.0, 0.0, 0.0, 0.0, 0.0))
    assert [s.first_layer for s in plan(free, cluster).stages] == [0, 2]
    limited = make_profile(*CONVOLUTIONS, (1.0, 2.0, 1.0, 4.0, 400.0), (1.0, 0.0, 0.0, 0.0, 0.0), unsplittable=(2, 3))
    found = plan(limited, cluster)
    assert not {stage.first_layer for stage in found.stages} & {2, 3}
    dapple.simulate(found, limited, cluster)  # checks the plan


def test_many_blocks_are_merged_until_they_can_be_searched() -> None:
    profile = make_profile(*[(1.0, 2.0, 1.0, 1.0, 1.0)] * 2400)
    cluster = make_cluster(8, 8, inside=(1e5, 0.0), between=(1e4, 0.0))
    problem = make_problem(profile, cluster, global_batch_size=32, micro_batch_size=32)
    result = run_planner(problem, "pipedream")
    assert result.pipedream.minibatch_seconds == pytest.approx(2400 * 3 / 16, rel=0.01)


def test_one_device_and_one_layer_are_planned() -> None:
    assert plan(PROFILE, make_cluster(1)).replicas == (1,)
    assert plan(make_profile((1.0, 2.0, 0.0, 0.0, 0.0)), make_cluster(4)).replicas == (4,)


def test_a_model_whose_layers_cost_nothing_has_an_infinite_throughput() -> None:
    result = run_planner(make_problem(make_profile((0, 0), (0, 0)), make_cluster(2), global_batch_size=4), "pipedream")
    assert result.pipedream.samples_per_second == float("inf")


# --- refusals


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_a_minibatch_size_that_is_no_number_of_samples_is_refused(size: Any) -> None:
    with refused(PlanError, f"minibatch_size is {size!r}, not a whole number of at least 1"):
        plan(PROFILE, make_cluster(2), minibatch_size=size)


def test_an_unknown_option_is_refused() -> None:
    with refused(PlanError, "planner 'pipedream' has no option 'levels'; it has minibatch_size, flat"):
        plan(PROFILE, make_cluster(2), levels=2)


def test_more_devices_than_the_program_can_take_are_refused() -> None:
    with refused(
        PlanError, "the cluster has 4098 devices; planner 'pipedream' is for at most 4096: use planner 'best'"
    ):
        plan(PROFILE, make_cluster(2049, 2049), batch=8192)


def test_a_plan_that_does_not_fit_the_memory_is_refused_with_advice() -> None:
    profile = make_profile(*[(1, 2, 1, 4, 100)] * 4)
    cluster = make_cluster(4, memory=420, inside=(1e6, 0.0))  # by the formulas DP, with 1600 bytes on each device
    with pytest.raises(PlanError, match=r"planner 'pipedream' has no plan that fits .*: use planner 'best'"):
        plan(profile, cluster)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([StagePlan(0, 2, (0, 4))], "stage 0 is on device 4, which the hierarchy does not have"),
        (
            [StagePlan(0, 1, (0, 1)), StagePlan(2, 2, (1,))],
            "stages 0 and 1 share device 1: PipeDream's formulas are for one stage per device",
        ),
        # Three devices of two servers of two, and the fourth.
        (
            [StagePlan(0, 1, (0, 1, 2)), StagePlan(2, 2, (3,))],
            "stage 0 divides components of level 1 otherwise than the hierarchy allows",
        ),
        (
            [StagePlan(0, 0, (0, 1)), StagePlan(1, 1, (2,)), StagePlan(2, 2, (3, 1))],
            "stages 0 and 2 share device 1",
        ),
        (
            [StagePlan(0, 0, (0,)), StagePlan(1, 1, (2, 3)), StagePlan(2, 2, (1,))],
            "stage 2 divides components of level 1 otherwise than the hierarchy allows",
        ),
        (
            [StagePlan(0, 1, (0, 2)), StagePlan(2, 2, (1,))],
            "stage 1 divides components of level 1 otherwise than the hierarchy allows",
        ),
    ],
)
def test_stages_that_the_formulas_are_not_for_are_refused(stages: list[StagePlan], said: str) -> None:
    with refused(PlanError, said):
        predict_throughput(stages, PROFILE, derive_hierarchy(make_cluster(2, 2)))


def test_a_plan_across_servers_has_a_prediction_on_one_level() -> None:
    stages = [StagePlan(0, 1, (0, 1, 2)), StagePlan(2, 2, (3,))]
    hierarchy = derive_hierarchy(make_cluster(2, 2)).flatten()
    # 24 / 3 and 2 x 2 x 2 / 3; 2 x 4 / 1 between; 3.
    assert predict_throughput(stages, PROFILE, hierarchy).minibatch_seconds == 8


def test_the_minibatch_size_of_a_prediction_is_checked() -> None:
    with refused(PlanError, "minibatch_size is 0, not a whole number"):
        predict_throughput([StagePlan(0, 2, (0,))], PROFILE, derive_hierarchy(make_cluster(1)), 0)
