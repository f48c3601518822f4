"""The local search: its steps, its plans against all assignments of devices, and cases that planners missed."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

import dapple_tf as dapple
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.baselines import baseline_candidates
from dapple_tf.planner.best import plan_best
from dapple_tf.planner.layout import UNFIT, make_layout_tables, make_workspace
from dapple_tf.planner.layout_search import layout_of
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.refine import refine
from profiler.cluster import Cluster, Link, Server
from profiler.profile import LayerCost, Profile
from tests.dapple_tf.planner.builders import Case, cases
from tests.dapple_tf.planner.exhaustive import StageCostModel, divisors, step_of
from tests.dapple_tf.planner.layouts import seconds_of

MISSED = Path(__file__).parents[4] / "shared" / "planner-cases"


@given(cases())
def test_a_layout_costs_what_the_simulator_says(case: Case) -> None:
    problem = make_problem(case.profile, case.cluster, global_batch_size=case.batch, contention=False, **case.options)
    tables = make_layout_tables(problem, np.array(problem.micro_batch_sizes), may_recompute=False)
    most_stages = min(case.cluster.devices, len(problem.chain.parameter_bytes))
    workspace = make_workspace(most_stages, case.cluster.devices, case.batch)
    for candidate in baseline_candidates(problem):
        layout = layout_of(problem, tables.moves.sizes, candidate)
        found = seconds_of(tables, layout, workspace, contention=False)
        assert found == pytest.approx(candidate.seconds, rel=1e-9, abs=0)
        assert found < UNFIT


@given(cases())
def test_a_layout_costs_what_the_simulator_says_with_contention(case: Case) -> None:
    options = {**case.options, "schedule": "dapple-a"}
    problem = make_problem(case.profile, case.cluster, global_batch_size=case.batch, contention=True, **options)
    tables = make_layout_tables(problem, np.array(problem.micro_batch_sizes), may_recompute=False)
    most_stages = min(case.cluster.devices, len(problem.chain.parameter_bytes))
    workspace = make_workspace(most_stages, case.cluster.devices, case.batch)
    for candidate in baseline_candidates(problem):
        layout = layout_of(problem, tables.moves.sizes, candidate)
        found = seconds_of(tables, layout, workspace, contention=True)
        assert found == pytest.approx(candidate.seconds, rel=1e-9, abs=0)


def all_plans(problem: PlanningProblem, most_stages: int) -> Iterator[float]:
    """Yield the seconds of every plan: cuts, device sets, sizes, stages that are re-computed or not, and policies."""
    profile, cluster = problem.profile, problem.cluster
    layers, devices = len(profile.layers), range(cluster.devices)
    for size in divisors(problem.global_batch_size):
        models = {
            again: StageCostModel(profile, cluster, size, again, False, problem.optimizer_slots)
            for again in (False, True)
        }
        for count in range(1, min(most_stages, layers) + 1):
            for cuts in itertools.combinations(range(1, layers), count - 1):
                bounds = [0, *cuts, layers]
                for owner in itertools.product(range(-1, count), repeat=cluster.devices):
                    sets = [tuple(d for d in devices if owner[d] == s) for s in range(count)]
                    if not all(0 < len(own) <= size for own in sets):
                        continue
                    stages = [(bounds[s], bounds[s + 1], sets[s]) for s in range(count)]
                    for flags in itertools.product((False, True), repeat=count):
                        costs = models[False].costs(tuple(stages))
                        for s, again in enumerate(flags):
                            if again:
                                row = models[True].stage(stages[s])
                                costs.forward[s], costs.backward[s], costs.exposed[s] = row[:3]
                                costs.fixed[s], costs.stash[s] = row[3:]
                        yield from step_of(costs, problem.global_batch_size // size, cluster.device_memory).values()


@pytest.mark.parametrize("seed", range(6))
def test_no_assignment_of_devices_is_faster_on_small_clusters(seed: int) -> None:
    draw = random.Random(seed)
    layers = [
        LayerCost(f"layer{i}", *(draw.choice([1, 2, 5, 9]) * 1.0 for _ in range(5))) for i in range(draw.choice([3, 4]))
    ]
    servers = draw.choice([(1, 1, 1, 1), (2, 2), (3, 1)])
    speeds = [0.5, 2.0, 20.0]
    pairs = list(itertools.combinations(range(len(servers)), 2))
    links = {(f"s{a}", f"s{b}"): Link(draw.choice(speeds), 0.1) for a, b in draw.sample(pairs, min(2, len(pairs)))}
    fixed = 4 * sum(layer.parameter_bytes for layer in layers)
    cluster = Cluster(
        tuple(Server(f"s{i}", count) for i, count in enumerate(servers)),
        draw.choice([1e9, fixed / 2 + 60, fixed / 2 + 30]),
        Link(20.0, 0.0),
        Link(draw.choice(speeds), 0.1),
        links,
    )
    # The local search simulates without contention.
    problem = make_problem(Profile("net", 1, "test", tuple(layers)), cluster, global_batch_size=6, contention=False)
    least = min(all_plans(problem, 3), default=np.inf)
    decision = plan_best(problem, chunks=())
    found = np.inf if decision is None else decision.chosen.seconds
    assert found <= least * (1 + 1e-9)


def test_the_same_problem_gives_the_same_plan() -> None:
    profile = Profile("net", 1, "test", tuple(LayerCost(f"layer{i}", 1 + i % 3, 2, 5, 5, 50) for i in range(9)))
    cluster = Cluster((Server("a", 3), Server("b", 2)), 1e9, Link(100, 0), Link(10, 0))
    problem = make_problem(profile, cluster, global_batch_size=12)
    first, second = (refine(problem, baseline_candidates(problem), 1_000_000) for _ in range(2))
    assert first == second
    assert first[0].seconds < min(c.seconds for c in baseline_candidates(problem))


def test_the_number_of_cores_does_not_change_the_plan() -> None:
    profile = Profile("net", 1, "test", tuple(LayerCost(f"layer{i}", 1 + i % 3, 2, 5, 5, 50) for i in range(9)))
    cluster = Cluster((Server("a", 3), Server("b", 2)), 1e9, Link(100, 0), Link(10, 0))
    problem = make_problem(profile, cluster, global_batch_size=12)
    on_all = refine(problem, baseline_candidates(problem), 1_000_000)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        on_one = refine(problem, baseline_candidates(problem), 1_000_000)
    finally:
        os.sched_setaffinity(0, cores)
    assert on_one == on_all != []


def test_a_few_layouts_that_are_equally_fast_do_not_end_the_search() -> None:
    profile = Profile("net", 2, "test", (LayerCost("layer", 3.0, 1.0, 1.0, 5.0, 2.0),))
    links = {("s0", "s1"): Link(20.0, 0.0)}
    cluster = Cluster(tuple(Server(f"s{i}", 2) for i in range(3)), 1e9, Link(2.0, 0.0), Link(0.5, 0.0), links)
    problem = make_problem(profile, cluster, global_batch_size=12, contention=False)
    decision = plan_best(problem, chunks=())
    assert decision is not None
    # Four replicas compute 3 samples each, and all links of their ring are the one between the first two servers.
    assert decision.chosen.seconds == pytest.approx(3 * (3.0 + 1.0) / 2 + 2 * 3 / 4 * 2.0 / 20)


def test_stages_that_are_given_are_found_again_only_where_they_are_faster() -> None:
    profile = Profile("net", 1, "test", tuple(LayerCost(f"layer{i}", 1 + i % 3, 2, 5, 5, 50) for i in range(9)))
    cluster = Cluster((Server("a", 3), Server("b", 2)), 1e9, Link(100, 0), Link(10, 0))
    problem = make_problem(profile, cluster, global_batch_size=12)
    best = refine(problem, baseline_candidates(problem), 1_000_000)[0]
    slow = replace(best, schedule="gpipe", seconds=2 * best.seconds)
    assert best.stages in [found.stages for found in refine(problem, [slow], 1)]
    assert best.stages not in [found.stages for found in refine(problem, [best], 1)]


@pytest.mark.parametrize("name", ["00-p-vgg16-A32-512", "02-d-amoeba-18-racks8x1-128", "amoeba-6s-A64-128"])
def test_plans_that_beat_an_earlier_planner_are_found(name: str) -> None:
    case = MISSED / name
    if not case.is_dir():
        pytest.skip(f"{case} is not there: the cases lie beside the project")
    profile, cluster = dapple.Profile.load(case / "profile.json"), dapple.Cluster.load(case / "cluster.json")
    other = dapple.Plan.load(case / "other.json")
    problem = make_problem(profile, cluster, global_batch_size=other.global_batch_size)
    decision = plan_best(problem, chunks=())
    assert decision is not None
    assert decision.chosen.seconds <= dapple.simulate(other, profile, cluster).step_seconds * 1.005
    assert not decision.proven_optimal
