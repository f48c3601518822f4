"""Plans in which devices run several stages: against all cuts of small problems, by hand, and planner "best" with them.

The reference takes the costs of stages from ``exhaustive``, which are plain Python, and of the project only the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.graph_passes.schedules.schedule import Schedule, dependencies
from dapple_tf.graph_passes.schedules.spec import CHUNKED, ScheduleSpec, is_text
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.graph_passes.schedules.zero_bubble import ZERO_BUBBLE_AUTO
from dapple_tf.plan_check import check_plan
from dapple_tf.planner.api import make_problem, predict_plan, run_planner
from dapple_tf.planner.best import plan_best
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search.chunk_search import all_cuts, count_cuts, moved_cuts
from dapple_tf.planner.search.chunk_shapes import list_worker_placements
from dapple_tf.plans import Plan, check_workers
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.order import encode
from dapple_tf.timeline.timeline import Timeline
from tests.dapple_tf.planner.builders import Case, cases, clusters, make_cluster, make_profile, profiles
from tests.dapple_tf.planner.exhaustive import StageCostModel, divisors, order_seconds

NAMES = ["interleaved-1f1b:v=2", "interleaved-1f1b:v=3", "looped-bfs:v=2", "looped-bfs:v=3"]
V_SHAPED = "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1; 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1"
SPLIT = "0F0 2F0 2B0 2W0 0B0 0W0; 1F0 3F0 4F0 4B0 4W0 3B0 3W0 1B0 1W0"  # any map, backward in two parts
EVEN = make_profile(*[(4.0, 8.0)] * 16)  # 1 + 2 s a sample and layer
STASHING = make_profile(*[(4.0, 8.0, 0.0, 2.0, 1.0), (3.0, 7.0, 0.0, 3.0, 2.0)] * 6)


def make(case: Case, schedule: str = "auto", **options: Any) -> PlanningProblem:
    given = {**case.options, **options}
    return make_problem(case.profile, case.cluster, global_batch_size=case.batch, schedule=schedule, **given)


# --- all plans of small problems


def most_bytes(schedule: Schedule, worker: int, stash: list[float]) -> float:
    """Return the most bytes of stashes that a worker holds, from the actions that need them."""
    stages = len(schedule.stages)
    actions = schedule.workers[worker]
    users: dict[tuple[int, int], int] = {}  # the last action of each stage and micro-batch
    for index, action in enumerate(actions):
        users[action.stage, action.micro_batch] = index
    held, most = set[tuple[int, int]](), 0.0
    for index, action in enumerate(actions):
        key = action.stage, action.micro_batch
        if not any(needed.stage == action.stage for needed in dependencies(action, stages)):
            held.add(key)
            most = max(most, sum(stash[stage] for stage, _ in held))
        if users[key] == index:
            held.remove(key)
    return most


def least_seconds(case: Case, schedule: str, chunks: int) -> float:
    """Return the shortest step of all cuts, numbers of workers, replicas and micro-batch sizes that fit the memory."""
    profile, cluster = case.profile, case.cluster
    chain = make(case).chain
    memory, best = cluster.device_memory * (1 + 1e-12), math.inf
    for size in divisors(case.batch):
        model = StageCostModel(profile, cluster, size, case.options["recompute"], case.options["overlap"], 2)
        for workers, r in itertools.product(range(1, cluster.devices + 1), range(1, size + 1)):
            stages = workers * chunks
            if workers * r > cluster.devices or stages > len(chain.positions) - 1:
                continue
            order = ScheduleSpec.parse(schedule).build(stages, case.batch // size)
            for starts in itertools.combinations(chain.positions[1:-1], stages - 1):
                bounds = (0, *starts, len(profile.layers))
                worker_of = order.worker_map.worker_of
                costs = model.costs(
                    tuple(
                        (first, end, tuple(range(w * r, w * r + r)))
                        for (first, end), w in zip(itertools.pairwise(bounds), worker_of, strict=True)
                    )
                )
                # ``fixed`` holds the working set too, of which a device has one at a time
                working = [
                    fixed - 4 * profile_bytes(profile, *b)
                    for fixed, b in zip(costs.fixed, itertools.pairwise(bounds), strict=True)
                ]
                if all(
                    sum(costs.fixed[s] - working[s] for s in own)
                    + max(working[s] for s in own)
                    + most_bytes(order, worker, costs.stash)
                    <= memory
                    for worker, own in enumerate(order.worker_map.stages_of)
                ):
                    best = min(best, order_seconds(encode(order), costs))
    return best


def profile_bytes(profile: Profile, first: int, end: int) -> float:
    """Return the bytes of the weights of layers ``first`` to ``end``, exclusive."""
    return sum(layer.parameter_bytes for layer in profile.layers[first:end])


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Draw problems of at most three devices, on one server or one each, where all policies give the same placement."""
    cluster = draw(clusters(True, topologies=((1,), (2,), (3,), (1, 1), (1, 1, 1))))
    options = {name: draw(st.booleans()) for name in ("recompute", "overlap")}
    return Case(draw(profiles(5, free=False)), cluster, draw(st.sampled_from([1, 2, 3, 4])), options)


@given(small_cases(), st.sampled_from(["interleaved-1f1b", "looped-bfs"]))
def test_a_plan_is_the_fastest_of_all_cuts_replicas_and_sizes(case: Case, policy: str) -> None:
    if len(make(case).chain.parameter_bytes) < 2:
        return
    schedule = f"{policy}:v=2"
    wanted, found = least_seconds(case, schedule, 2), plan_best(make(case, schedule))
    if found is None:
        assert wanted == math.inf
    else:
        assert found.chosen.seconds == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def check(problem: PlanningProblem, plan: Plan, seconds: float) -> None:
    """Check that a plan can run and fits, that its workers are the schedule's, and how long its step takes."""
    check_plan(plan, problem.profile, problem.cluster)
    timeline = dapple.simulate(plan, problem.profile, problem.cluster)
    assert timeline.step_seconds == pytest.approx(seconds, rel=1e-9, abs=0)
    assert all(timeline.simulation.fits)
    wanted = plan.spec.worker_map(len(plan.stages))
    assert set(plan.worker_map.stages_of) == set(wanted.stages_of)
    assert max(plan.replicas) <= plan.micro_batch_size


@given(cases(8), st.sampled_from(NAMES))
def test_plans_of_several_stages_per_device_can_run_and_fit(case: Case, schedule: str) -> None:
    if len(make(case).chain.parameter_bytes) < int(schedule[-1]):
        return
    problem = make(case, schedule)
    found = plan_best(problem)
    for candidate in (found.chosen, *found.runners_up) if found else ():
        assert candidate.schedule == schedule
        check(problem, predict_plan(problem, candidate, "best")[0], candidate.seconds)
        assert candidate.seconds >= found.chosen.seconds


@given(st.sampled_from(sorted(set(CHUNKED) - {ZERO_BUBBLE_AUTO})), st.integers(1, 3))
def test_every_policy_of_several_stages_per_device_is_planned(policy: str, devices: int) -> None:
    problem = make_problem(EVEN, make_cluster(devices), global_batch_size=16, micro_batch_size=1, schedule=policy)
    found = plan_best(problem)
    assert found.chosen.device_count == devices
    check(problem, predict_plan(problem, found.chosen, "best")[0], found.chosen.seconds)


@pytest.mark.parametrize(("name", "others"), [("zb-auto", ["zb-h1", "zb-h2"]), ("zb-auto:v=2", ["zb-v"])])
def test_a_searched_schedule_is_written_out_in_the_plan_and_no_slower_than_those_with_names(
    name: str, others: list[str]
) -> None:
    def planned(schedule: str) -> tuple[Plan, Timeline]:
        problem = make_problem(EVEN, make_cluster(2), global_batch_size=16, micro_batch_size=2, schedule=schedule)
        found = run_planner(problem, "gpipe")
        return predict_plan(problem, found.chosen, "gpipe")

    plan, timeline = planned(name)
    assert is_text(plan.schedule)
    check_workers(plan)
    assert timeline.note.startswith("zb-auto: ")
    assert timeline.note in str(timeline)
    for other in others:
        assert timeline.step_seconds <= planned(other)[1].step_seconds * (1 + 1e-12)


@pytest.mark.parametrize(("name", "other"), [("zb-auto", "zb-h1"), ("zb-auto", "zb-h2"), ("zb-auto:v=2", "zb-v")])
def test_a_searched_plan_fits_and_is_no_slower_where_a_named_schedule_just_fits(name: str, other: str) -> None:
    def planned(schedule: str, memory: float) -> Plan:
        cluster = dataclasses.replace(make_cluster(2), device_memory=memory)
        problem = make_problem(STASHING, cluster, global_batch_size=16, micro_batch_size=2, schedule=schedule)
        return predict_plan(problem, run_planner(problem, "best").chosen, "best")[0]

    def figures(plan: Plan) -> tuple[float, float]:
        return plan.predicted["step_seconds"], max(plan.predicted["peak_memory_bytes"])

    seconds, peak = figures(planned(other, 1e18))
    found_seconds, found_peak = figures(planned(name, peak))
    assert found_seconds <= seconds * (1 + 1e-12)
    assert found_peak <= peak * (1 + 1e-9)


# --- planner "best"


@given(cases(8))
def test_best_is_never_slower_for_considering_several_stages_per_device(case: Case) -> None:
    problem = make(case)
    unchunked, found = plan_best(problem, chunks=()), plan_best(problem)
    if found is None:
        assert unchunked is None
        return
    assert unchunked is None or found.chosen.seconds <= unchunked.chosen.seconds
    check(problem, predict_plan(problem, found.chosen, "best")[0], found.chosen.seconds)
    if unchunked is not None and len(found.chosen.stages) > found.chosen.device_count:
        assert found.chosen.seconds < unchunked.chosen.seconds


@pytest.mark.parametrize(
    ("layers", "schedule", "seconds"),
    [
        # Four micro-batches on four devices. One stage each: (4 + 3) x 6 = 42 s. Two: 4 x 6 s, and 3 x 6 / 2 s idle.
        (8, "interleaved-1f1b:v=2", 33),
        # 16 layers: (4 + 3) x 12 = 84 s with one stage each; with four 4 x 12 s, and 3 x 12 / 4 s idle.
        (16, "interleaved-1f1b:v=4", 57),
        (4, "dapple-a", 21),  # a layer for each device
    ],
)
def test_best_interleaves_stages_where_micro_batches_are_few(layers: int, schedule: str, seconds: float) -> None:
    profile = make_profile(*[(4.0, 8.0)] * layers)
    plan = dapple.plan(profile, make_cluster(4), global_batch_size=4, micro_batch_size=1)
    assert (plan.schedule, plan.predicted["step_seconds"]) == (schedule, seconds)
    unchunked = dapple.plan(profile, make_cluster(4), global_batch_size=4, micro_batch_size=1, chunks=())
    assert unchunked.predicted["step_seconds"] > seconds or layers == 4


def test_best_interleaves_no_stages_whose_stashes_do_not_fit() -> None:
    """Eight layers on four devices, 4 bytes a layer and sample; with two stages per device 2 x 3 + 4 + 1 = 11 stashes.

    With memory for 8 layers only fewer devices, and so fewer micro-batches in flight, may have two stages each.
    """
    profile = make_profile(*[(4.0, 8.0, 0.0, 16.0)] * 8)

    def planned(memory: float) -> dapple.Plan:
        return dapple.plan(profile, make_cluster(4, memory=memory), global_batch_size=8, micro_batch_size=1)

    whole = planned(11 * 4)
    assert (whole.schedule, whole.device_count) == ("interleaved-1f1b:v=2", 4)
    little = planned(8 * 4)
    assert max(little.predicted["peak_memory_bytes"]) <= 8 * 4
    assert little.predicted["step_seconds"] > whole.predicted["step_seconds"]


# --- by hand


def test_the_memory_of_a_plan_is_that_of_its_devices() -> None:
    """Four layers of 10 bytes of weights, 40 with gradients and slots, on two devices; a micro-batch keeps 4 bytes."""
    profile = make_profile(*[(4.0, 8.0, 0.0, 16.0, 10.0)] * 4)
    options: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 1, "schedule": "interleaved-1f1b:v=2"}
    plan = dapple.plan(profile, make_cluster(2), **options)
    peaks = [2 * 40 + (2 * 1 + 2 + 1) * 4, 2 * 40 + (2 + 1) * 4]  # fixed bytes of two stages, and the warm-up
    assert plan.predicted["peak_memory_bytes"] == [*peaks, *peaks]
    assert len(dapple.plan(profile, make_cluster(2, memory=peaks[0]), **options).stages) == 4
    with pytest.raises(dapple.errors.PlanError, match="under schedule 'interleaved-1f1b:v=2': use schedule 'auto'"):
        dapple.plan(profile, make_cluster(2, memory=peaks[0] - 1), **options)


def test_stages_that_a_device_cannot_hold_together_are_named() -> None:
    profile = make_profile(*[(4.0, 8.0, 0.0, 16.0, 10.0)] * 4)
    options: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 1, "schedule": "interleaved-1f1b:v=2"}
    plan = dapple.plan(profile, make_cluster(2), **options)
    text = str(dapple.simulate(plan, profile, make_cluster(2, memory=95)))
    assert "stages 0, 2 do not fit on one device: they lack 5 B of the device's 95 B" in text
    assert "stages 1, 3" not in text


def test_cuts_balance_devices_where_one_layer_is_as_long_as_two_stages() -> None:
    """The last of the 5 layers takes half of the time, so its device should have little else."""
    profile = make_profile((4.0, 8.0), (4.0, 8.0), (4.0, 8.0), (4.0, 8.0), (16.0, 32.0))
    plan = dapple.plan(
        profile, make_cluster(2), global_batch_size=16, micro_batch_size=1, schedule="interleaved-1f1b:v=2"
    )
    assert [stage.last_layer for stage in plan.stages] in ([1, 2, 3, 4], [0, 1, 3, 4])
    assert plan.predicted["step_seconds"] >= 16 * 15


@pytest.mark.parametrize(
    ("memory", "seconds"),
    # The shortest step of all 245 157 cuts into eight stages, found once by trying them.
    [(1e9, 2785.0), (250.0, 2872.0), (160.0, 3114.0), (140.0, 3978.0)],
)
def test_more_cuts_than_can_be_tried_are_improved_by_moves(memory: float, seconds: float) -> None:
    """24 layers of unequal seconds; the first six have weights."""
    layers = [(4.0 * (1 + i % 5), 8.0 * (1 + i % 3), 0.0, 16.0, 10.0 * (i < 6)) for i in range(24)]
    plan = dapple.plan(
        make_profile(*layers),
        make_cluster(4, memory=memory),
        global_batch_size=64,
        micro_batch_size=1,
        schedule="interleaved-1f1b:v=2",
    )
    assert max(plan.predicted["peak_memory_bytes"]) <= memory
    assert plan.predicted["step_seconds"] <= seconds * 1.02


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "chunks"),
    [(V_SHAPED, 2, ((0, 3), (1, 2))), (SPLIT, 1, ((0, 2), (1, 3, 4)))],
)
def test_a_schedule_given_by_its_actions_is_planned_on_its_workers(
    schedule: str, micro_batches: int, chunks: tuple[tuple[int, ...], ...]
) -> None:
    problem = make_problem(EVEN, make_cluster(3), global_batch_size=4, schedule=schedule)
    found = plan_best(problem)
    plan = predict_plan(problem, found.chosen, "best")[0]
    check(problem, plan, found.chosen.seconds)
    assert (plan.micro_batches, plan.worker_map.stages_of, set(plan.replicas)) == (micro_batches, chunks, {1})


def test_workers_are_placed_by_each_policy_where_they_differ() -> None:
    assert list_worker_placements(make_cluster(2, 2), 2, 2) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    assert list_worker_placements(make_cluster(4), 2, 2) == (((0, 1), (2, 3)),)
    # On three of six devices: the first ones, or those of the larger server.
    assert ((2,), (3,), (4,)) in list_worker_placements(make_cluster(2, 4), 3, 1)
    assert list_worker_placements(make_cluster(2, 4), 3, 1)[0] == ((0,), (1,), (2,))


def test_cuts_one_move_away_keep_every_stage() -> None:
    workers = WorkerMap.looped(2, 2)
    found = [starts.tolist() for starts in moved_cuts(np.array([0, 2, 3, 4]), 6, workers, np.array([3.0, 1.0]))]
    assert found[0] == [0, 1, 3, 4]  # stage 0 of the busy worker gives its last block to stage 1
    assert [0, 2, 3, 5] in found  # stage 3 gives its first block to stage 2
    assert [0, 3, 4, 5] in found  # and to stage 0
    for starts in found:
        assert starts[0] == 0
        assert all(a < b for a, b in itertools.pairwise([*starts, 6]))
    assert len(list(all_cuts(6, 4))) == count_cuts(6, 4) == 10


def test_large_clusters_are_planned() -> None:
    profile, cluster = make_profile(*[(1.0, 2.0, 1e3, 1e3, 1e3)] * 24), make_cluster(*[8] * 12, inside=(1e9, 0))
    plan = dapple.plan(profile, cluster, global_batch_size=96, schedule="interleaved-1f1b:v=2")
    check_plan(plan, profile, cluster)
    assert plan.device_count <= 96
