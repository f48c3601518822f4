"""Planner "bapipe": partitions against all choices, Tables 1 and 2, numbers worked out by hand, and refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import PlanError, ProfileError
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.systems.bapipe import (
    Cuts,
    asynchronous_seconds,
    balance,
    coarse_cuts,
    feature_threshold,
    ideal_seconds,
    in_flight,
    intra_layer_seconds,
    partition_by_ideal,
    slowest,
)
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server
from dapple_tf.profiler.profile import KindSeconds, LayerCost, Profile
from tests.dapple_tf.planner.builders import figures, make_cluster, make_profile
from tests.dapple_tf.planner.comparators import all_bounds
from tests.graph_passes.builders import refused

# --- partitions


class Accelerators(NamedTuple):
    """Seconds of each layer on each accelerator, its memory, bytes of layers, and micro-batches held."""

    rows: list[list[float]]
    memory: list[float]
    fixed: list[float]
    stash: list[float]
    working: list[float]
    held: list[int]

    @property
    def seconds(self) -> np.ndarray:
        return np.array([[0.0, *itertools.accumulate(row)] for row in self.rows])

    def fits(self, n: int, first: int, end: int) -> bool:
        needed = sum(self.fixed[first:end]) + self.held[n] * sum(self.stash[first:end]) + max(self.working[first:end])
        return needed <= self.memory[n]

    @property
    def fitting(self) -> np.ndarray:
        count, layers = len(self.rows), len(self.rows[0])
        found = np.zeros((count, layers, layers + 1), np.bool_)
        for n, (first, end) in itertools.product(range(count), itertools.combinations(range(layers + 1), 2)):
            found[n, first, end] = self.fits(n, first, end)
        return found


@st.composite
def accelerators(draw: st.DrawFn) -> Accelerators:
    """Draw up to four accelerators and eight layers, each with seconds of its own on each accelerator."""
    count = draw(st.integers(1, 4))
    layers = draw(st.integers(count, 8))
    rows = [draw(st.lists(figures(10), min_size=layers, max_size=layers)) for _ in range(count)]
    fixed, stash, working = (draw(st.lists(figures(9), min_size=layers, max_size=layers)) for _ in range(3))
    memory = draw(st.lists(figures(90), min_size=count, max_size=count))
    return Accelerators(rows, memory, fixed, stash, working, [draw(st.integers(1, 4)) for _ in range(count)])


def slowest_of(rows: list[list[float]], cuts: Cuts) -> float:
    return max(sum(rows[n][first:end]) for n, (first, end) in enumerate(itertools.pairwise(cuts)))


@given(accelerators())
def test_the_slowest_stage_is_the_least_of_all_all_bounds(found: Accelerators) -> None:
    rows = found.rows
    cuts = balance(found.seconds)
    assert cuts in set(all_bounds(len(rows[0]), len(rows)))
    least = min(slowest_of(rows, other) for other in all_bounds(len(rows[0]), len(rows)))
    assert slowest(found.seconds, cuts) == pytest.approx(least, rel=1e-12, abs=1e-12)


@given(accelerators())
def test_tuned_by_memory_it_is_the_least_of_those_that_fit(found: Accelerators) -> None:
    rows = found.rows
    cuts = balance(found.seconds, found.fitting)
    every = all_bounds(len(rows[0]), len(rows))
    fitting = [cuts for cuts in every if all(found.fits(n, *pair) for n, pair in enumerate(itertools.pairwise(cuts)))]
    if not cuts:
        assert not fitting
        return
    assert cuts in fitting
    least = min(slowest_of(rows, other) for other in fitting)
    assert slowest(found.seconds, cuts) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_the_partition_according_to_formula_1() -> None:
    """Ten uniform layers; the second accelerator is three times as fast as the others: T = 1 / (1/10 + 3/10 + 1/10)."""
    speeds = np.array([1.0, 3.0, 1.0])
    sums = np.arange(11) / speeds[:, None]
    assert ideal_seconds(sums[:, -1]) == 2
    assert partition_by_ideal(sums) == (0, 2, 8, 10)
    # An accelerator that takes no time leaves none to the others.
    assert ideal_seconds(np.array([0.0, 4.0])) == 0


def test_layers_divided_between_neighbours_take_formula_1s_time() -> None:
    uniform = np.arange(8) / np.array([1.0, 2.0, 1.0])[:, None]
    assert intra_layer_seconds(uniform) == pytest.approx(ideal_seconds(uniform[:, -1]), rel=1e-12)
    # Layers of 6 and 2 s on two equal accelerators: two thirds of the first one are 4 s.
    assert intra_layer_seconds(np.array([[0.0, 6.0, 8.0]] * 2)) == pytest.approx(4)


@given(accelerators())
def test_layers_divided_between_neighbours_are_as_fast_as_any_partition(found: Accelerators) -> None:
    seconds = intra_layer_seconds(found.seconds)
    assert seconds <= slowest(found.seconds, balance(found.seconds)) * (1 + 1e-9)
    # Each layer cut into 40 parts: no partition of these is faster, nor much slower than a part.
    parts = [np.repeat(np.array(row) / 40, 40) for row in found.rows]
    fine = np.array([np.concatenate([[0.0], np.cumsum(row)]) for row in parts])
    cuts = balance(fine)
    largest = max(float(row.max()) for row in parts)
    assert slowest(fine, cuts) - 2 * largest - 1e-9 <= seconds <= slowest(fine, cuts) * (1 + 1e-9)


def test_the_coarse_grained_network_has_the_cuts_that_can_be_hidden() -> None:
    assert feature_threshold(3.0, 10.0, 0.5) == 25
    assert coarse_cuts(np.array([30.0, 25.0, 26.0, 1.0]), 25.0).tolist() == [2, 4]


# --- Tables 1 and 2

shapes = st.tuples(st.integers(1, 7), st.integers(1, 24), st.integers(1, 6), st.integers(1, 6))


@given(shapes, st.sampled_from(["1F1B-AS", "FBP-AS"]))
def test_table_1(shape: tuple[int, int, int, int], schedule: str) -> None:
    """Mini-batch time (M + N - 1) (F + B) of equal stages, with the features of Table 1's memory."""
    n, m, f, b = shape
    seconds = asynchronous_seconds(schedule, np.full(n, float(f)), np.full(n, float(b)), np.zeros(n - 1), m)
    assert seconds == pytest.approx((m + n - 1) * (f + b), rel=1e-9)
    factor = 1 if schedule == "1F1B-AS" else 2
    assert in_flight(schedule, n, m).tolist() == [min(m, factor * (n - i + 1)) for i in range(1, n + 1)]


def test_the_demand_bandwidth_of_table_1() -> None:
    """It is a / F under 1F1B-AS and 2 a / (F + B) under FBP-AS: of B = 2 F, 1.5 F to send is too long for one."""
    forward, backward = np.full(3, 2.0), np.full(3, 4.0)
    time = {s: asynchronous_seconds(s, forward, backward, np.full(2, 3.0), 8) for s in ("1F1B-AS", "FBP-AS")}
    assert time["FBP-AS"] == pytest.approx((8 + 2) * 6)
    assert time["1F1B-AS"] == pytest.approx((8 + 2) * (3 + 4))
    assert asynchronous_seconds("FBP-AS", forward, backward, np.full(2, 6.0), 8) == pytest.approx((8 + 2) * 12)


def test_unequal_stages_wait_for_the_slowest() -> None:
    # Stage 0: 1 and 1 s; stage 1: 2 and 2 s. It gets F0 after 1 s, is busy for 4 x 4 s, and B3 takes 1 s more.
    f = np.array([1.0, 2.0])
    for schedule in ("1F1B-AS", "FBP-AS"):
        assert asynchronous_seconds(schedule, f, f, np.zeros(1), 4) == pytest.approx(1 + 16 + 1)


@given(st.lists(st.tuples(figures(5), figures(9)), min_size=1, max_size=5), st.integers(1, 12))
def test_lanes_of_unequal_stages_are_within_bounds(rows: list[tuple[float, float]], m: int) -> None:
    """A stage runs after the stages before it and ends before they do; at most as if all were the slowest."""
    forward, backward = (np.array(column) for column in zip(*rows, strict=True))
    seconds = asynchronous_seconds("FBP-AS", forward, backward, np.zeros(len(rows) - 1), m)
    both = forward + backward
    least = max(float(both[:n].sum() + m * both[n]) for n in range(len(rows)))
    assert seconds >= least * (1 - 1e-9)
    assert seconds <= (m + len(rows) - 1) * float(forward.max() + backward.max()) * (1 + 1e-9)


@given(shapes, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_table_2(shape: tuple[int, int, int, int], part: float) -> None:
    """Mini-batch times and features of 1F1B-SNO and 1F1B-SO; ``part``: SR over the lesser of F and B."""
    n, m, f, b = shape
    sr = part * min(f, b)
    profile = make_profile(*[(float(f), float(b), sr, 1.0, 0.0)] * n, batch_size=1)
    problem = make_problem(profile, make_cluster(n, inside=(1.0, 0.0)), global_batch_size=m, micro_batch_size=1)
    stages = [StagePlan(i, i, (i,)) for i in range(n)]
    wanted = {
        "1f1b-sno": (m + n - 1) * (f + b) + (n + m - 2 - math.ceil((m - 1) / n)) * 2 * sr,
        "1f1b-so": (m + n - 1) * (f + b) + (n - 1) * 2 * sr,
    }
    for name, seconds in wanted.items():
        plan = problem.make_plan(stages, 1, name, "test")
        timeline = dapple.simulate(plan, profile, problem.cluster)
        assert timeline.step_seconds == pytest.approx(seconds, rel=1e-9)
        factor = 1 if name == "1f1b-sno" else 2
        features = [memory - profile.working_bytes()[i] for i, memory in enumerate(timeline.peak_memory_bytes)]
        assert features == pytest.approx([min(m, factor * (n - i)) for i in range(n)])


# --- the planner


def plan(profile: Any, cluster: Cluster, batch: int = 8, **options: Any) -> Plan:
    return dapple.plan(profile, cluster, global_batch_size=batch, planner="bapipe", **options)


def unequal(*kinds: tuple[str, int], execution: str = "sync", bandwidth: float = 1e6) -> Cluster:
    """Return a server with these kinds of devices: "slow" (1) and "fast" (three times as fast)."""
    names = tuple(name for name, count in kinds for _ in range(count))
    return Cluster(
        (Server("s0", len(names), names),),
        1e9,
        Link(bandwidth, 0.0),
        Link(bandwidth, 0.0),
        kinds={"slow": DeviceKind(speed=1.0), "fast": DeviceKind(speed=3.0), "new": DeviceKind(memory=1e9)},
        execution=execution,
    )


LAYERS = [(1.0, 2.0, 4.0, 8.0, 1e5)] * 8  # data parallelism would reduce 8e5 bytes


def test_unequal_accelerators_get_stages_of_equal_time(tmp_path: Any) -> None:
    profile = make_profile(*LAYERS)
    cluster = unequal(("slow", 1), ("fast", 1), bandwidth=1e5)
    found = plan(profile, cluster)
    # T = 1 / (1 / 24 + 3 / 24) = 6 s for 4 samples: two layers on the slow one, six on the fast one.
    assert [(s.first_layer, s.last_layer, s.devices) for s in found.stages] == [(0, 1, (0,)), (2, 7, (1,))]
    timeline = dapple.simulate(found, profile, cluster)
    assert found.predicted["step_seconds"] == timeline.step_seconds
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found
    # Even stages would take as long as four layers on the slow device.
    even = [StagePlan(0, 3, (0,)), StagePlan(4, 7, (1,))]
    candidate = make_problem(profile, cluster, global_batch_size=8).evaluate(even, found.micro_batch_size, "test")
    assert candidate.seconds > timeline.step_seconds * 1.5


def test_seconds_of_a_kind_count_where_the_profile_has_them() -> None:
    """On the fast kind the last layer alone is slow: it stays on the slow device, which comes last."""
    kinds = {"fast": KindSeconds(1 / 3, 2 / 3)}
    layers = [LayerCost(f"layer{i}", 1.0, 2.0, 4.0, 8.0, 1e5, kinds=kinds) for i in range(7)]
    layers.append(LayerCost("last", 3.0, 6.0, 4.0, 8.0, 1e5, kinds={"fast": KindSeconds(30.0, 60.0)}))
    profile = Profile("net", 4, "test", tuple(layers))
    found = plan(profile, unequal(("fast", 1), ("slow", 1)))
    assert [stage.first_layer for stage in found.stages] == [0, 7]


def test_a_kind_without_costs_is_refused_by_name() -> None:
    with pytest.raises(ProfileError, match=r"has no seconds of 'new', and the cluster gives that kind no speed"):
        plan(make_profile(*LAYERS), unequal(("slow", 1), ("new", 1)))


@pytest.mark.parametrize("planner", ["spp", "autopipe"])
def test_planners_for_equal_devices_refuse_unequal_ones_and_name_those_that_take_them(planner: str) -> None:
    said = f"(slow, fast), and planner {planner!r} makes plans for equal devices: use planner 'best', 'dapple'"
    with refused(PlanError, said):
        dapple.plan(make_profile(*LAYERS), unequal(("slow", 1), ("fast", 1)), global_batch_size=8, planner=planner)


def test_data_parallelism_is_taken_where_features_are_large_and_weights_few() -> None:
    profile = make_profile(*[(1.0, 2.0, 100.0, 8.0, 1.0)] * 8)
    assert plan(profile, make_cluster(4)).replicas == (4,)
    assert set(plan(profile, make_cluster(4), pipelines_only=True).replicas) == {1}


def test_the_schedule_overlaps_communication_where_memory_allows() -> None:
    profile = make_profile(*[(1.0, 2.0, 4.0, 80.0, 1e4)] * 4)
    ample = plan(profile, make_cluster(4, inside=(10.0, 0.0)), micro_batch_size=1)
    assert ample.schedule == "1f1b-so"
    # 4e4 bytes of a layer's weights, gradients and slots; a micro-batch has 20, of which four fit on the first stage.
    tight = plan(profile, make_cluster(4, inside=(10.0, 0.0), memory=4e4 + 85), micro_batch_size=1)
    assert tight.schedule == "1f1b-sno"
    # Nothing is sent: of equally fast schedules the one that holds fewer micro-batches.
    silent = make_profile(*[(1.0, 2.0, 0.0, 80.0, 1e4)] * 4)
    assert plan(silent, make_cluster(4, inside=(10.0, 0.0)), micro_batch_size=1).schedule == "1f1b-sno"


def test_stages_are_cut_where_few_bytes_cross_if_communication_is_the_bottleneck() -> None:
    """Of 4 samples 40 bytes cross all cuts but one, in 4 s each at 10 bytes/s; a stage takes 3 s."""
    sent = (40.0, 2.0, 40.0, 40.0)
    profile = make_profile(*[(0.5, 1.0, a, 1.0, 1e4) for a in sent])
    found = plan(profile, make_cluster(2, inside=(10.0, 0.0)), micro_batch_size=4)
    assert [stage.first_layer for stage in found.stages] == [0, 2]
    uneven = make_profile(*[(0.5, 1.0, a, 1.0, 1e4) for a in (2.0, 40.0, 40.0, 40.0)])
    found = plan(uneven, make_cluster(2, inside=(10.0, 0.0)), micro_batch_size=4)
    assert [stage.first_layer for stage in found.stages] == [0, 1]


def test_where_no_features_can_be_hidden_one_accelerator_is_used() -> None:
    """The latency alone is longer than a stage: the coarse-grained network is one block."""
    profile = make_profile(*[(0.5, 1.0, 1.0, 1.0, 1.0)] * 4)
    found = plan(profile, make_cluster(2, inside=(10.0, 100.0)), pipelines_only=True)
    assert [stage.devices for stage in found.stages] == [(0,)]


def test_layers_move_to_where_there_is_memory() -> None:
    """Equal seconds, but the last layer has most weights: with three others it does not fit."""
    weights = (10.0, 10.0, 10.0, 100.0)
    profile = make_profile(*[(1.0, 2.0, 0.0, 1.0, w) for w in weights])
    found = plan(profile, make_cluster(2, memory=415.0), micro_batch_size=4)
    assert [stage.first_layer for stage in found.stages] == [0, 3]
    assert all(dapple.simulate(found, profile, make_cluster(2, memory=415.0)).fits)


def test_asynchronous_execution_chooses_by_bandwidth() -> None:
    profile = make_profile(*[(1.0, 2.0, 6.0, 8.0, 1e5)] * 4)  # of one sample: 0.25 and 0.5 s, 1.5 bytes
    problem = make_problem(profile, asynchronous(1e6), global_batch_size=8, micro_batch_size=1)
    fast = run_planner(problem, "bapipe")
    # Each of four stages 0.75 s, eight micro-batches: both schedules take as long, 1F1B-AS holds fewer.
    assert fast.formula_seconds == pytest.approx((8 + 3) * 0.75)
    assert fast.formula == "1F1B-AS on accelerators of asynchronous execution"
    assert fast.chosen.schedule == "1f1b-sno"
    # At 4 bytes/s features take 0.375 s: longer than F, not longer than (F + B) / 2.
    problem = make_problem(profile, asynchronous(4.0), global_batch_size=8, micro_batch_size=1)
    slow = run_planner(problem, "bapipe")
    assert slow.formula_seconds == pytest.approx((8 + 3) * 0.75)
    assert slow.formula == "FBP-AS on accelerators of asynchronous execution"
    assert slow.chosen.schedule == "1f1b-so"


def test_a_given_schedule_is_the_plans_under_asynchronous_execution() -> None:
    assert plan(make_profile(*LAYERS), asynchronous(1e6), schedule="dapple-b").schedule == "dapple-b"


def asynchronous(bandwidth: float) -> Cluster:
    link = Link(bandwidth, 0.0)
    return Cluster((Server("s0", 4),), 1e9, link, link, execution="async")


def test_asynchronous_execution_divides_layers() -> None:
    """Three layers on two accelerators: 1.5 of them each, unless sending is the bottleneck."""
    profile = make_profile(*[(1.0, 2.0, 4.0, 8.0, 1.0)] * 3)
    cluster = unequal(("slow", 2), execution="async")
    result = run_planner(make_problem(profile, cluster, global_batch_size=16, micro_batch_size=4), "bapipe")
    assert result.formula_seconds == pytest.approx((4 + 1) * 4.5)
    assert [stage.first_layer for stage in result.chosen.stages] in ([0, 1], [0, 2])


def test_more_accelerators_than_blocks() -> None:
    found = plan(make_profile((1.0, 2.0, 0.0, 1.0, 1e6), (1.0, 2.0, 0.0, 1.0, 1e6)), make_cluster(4))
    assert [stage.devices for stage in found.stages] == [(0,), (1,)]


def test_all_options_of_a_plan_apply() -> None:
    found = plan(make_profile(*LAYERS), make_cluster(2), micro_batch_size=4, schedule="gpipe", recompute=True)
    assert (found.micro_batch_size, found.schedule, found.recompute) == (4, "gpipe", True)


def test_many_blocks_are_merged() -> None:
    found = plan(make_profile(*[(1.0, 2.0, 1.0, 1.0, 1e5)] * 900), make_cluster(3), micro_batch_size=8)
    assert found.stages[-1].last_layer == 899


def test_a_plan_that_does_not_fit_the_memory_is_refused() -> None:
    with pytest.raises(PlanError, match="memory"):
        plan(make_profile(*LAYERS), make_cluster(2, memory=1e5))
