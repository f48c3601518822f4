"""The local search on devices of different kinds: its steps, and that it is deterministic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.layout import UNFIT
from dapple_tf.planner.layout_search import layout_of
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.unequal_layout import make_unequal_tables, make_unequal_workspace
from dapple_tf.planner.unequal_refine import refine_unequal
from dapple_tf.planner.unequal_search import find_unequal_stages, unequal_candidates
from dapple_tf.plans import StagePlan
from profiler.cluster import Cluster, DeviceKind, Link, Server
from profiler.profile import KindSeconds, LayerCost, Profile, Timing
from tests.dapple_tf.planner.layouts import seconds_of

NAMES = ("fast", "slow", "slower")


@st.composite
def problems(draw: st.DrawFn) -> PlanningProblem:
    """Two to six layers on two to ten devices of up to three kinds, some of which have seconds of their own."""
    seconds = st.floats(0.01, 1)
    own = draw(st.booleans())
    timed = not own and draw(st.booleans())
    layers = tuple(
        LayerCost(
            f"layer{i}",
            draw(seconds),
            draw(seconds),
            draw(st.sampled_from([1e3, 1e6])),
            draw(st.sampled_from([1e4, 1e6])),
            draw(st.sampled_from([0.0, 1e4, 2e6])),
            kinds={"slow": KindSeconds(draw(seconds), draw(seconds))} if own else {},
        )
        for i in range(draw(st.integers(2, 6)))
    )
    unsplittable = tuple(p for p in range(1, len(layers)) if draw(st.integers(0, 3)) == 0)
    timings = (Timing(2, *(tuple(draw(seconds) for _ in layers) for _ in range(2))),) if timed else ()
    profile = Profile("net", 8, "fast", layers, unsplittable=unsplittable, timings=timings)
    memory = st.sampled_from([2e7, 1e9])
    kinds = {name: DeviceKind(draw(memory), speed) for name, speed in zip(NAMES, (1.0, 0.5, 0.3), strict=True)}
    groups = [
        [(name, draw(st.integers(1, 2))) for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2))]
        for _ in range(draw(st.integers(0, 2)))
    ]
    named = [[("fast", 1), ("slow", 1)], *groups]
    servers = tuple(Server.of_kinds(f"s{i}", of_server) for i, of_server in enumerate(named))
    cluster = Cluster(servers, None, Link(1e9, 1e-5), Link(draw(st.sampled_from([1e7, 1e8])), 1e-4), kinds=kinds)
    return make_problem(
        profile,
        cluster,
        global_batch_size=12,
        overlap=draw(st.booleans()),
        contention=draw(st.booleans()),
        recompute=draw(st.booleans()),
        schedule="dapple-a",
    )


def draw_stages(problem: PlanningProblem, random: np.random.Generator) -> list[StagePlan]:
    """Return stages at random cuts, each with one device or more, of which some may be unused."""
    blocks, devices = problem.chain.positions, problem.cluster.devices
    count = int(random.integers(1, min(devices, len(blocks) - 1) + 1))
    cuts = sorted(random.choice(blocks[1:-1], count - 1, replace=False).tolist()) if count > 1 else []
    owner = np.concatenate([np.arange(count), random.integers(-1, count, devices - count)])
    owner = random.permutation(owner)
    bounds = [0, *cuts, blocks[-1]]
    return [
        StagePlan(bounds[s], bounds[s + 1] - 1, tuple(int(d) for d in np.flatnonzero(owner == s))) for s in range(count)
    ]


@given(problem=problems(), seed=st.integers(0, 2**32 - 1))
def test_a_layout_costs_what_the_simulator_says(problem: PlanningProblem, seed: int) -> None:
    random = np.random.default_rng(seed)
    tables = make_unequal_tables(problem, np.array(problem.micro_batch_sizes), may_recompute=False)
    most_stages = min(problem.cluster.devices, len(problem.chain.parameter_bytes))
    workspace = make_unequal_workspace(most_stages, problem.cluster.devices, 12)
    for _ in range(8):
        stages, size = draw_stages(problem, random), int(random.choice(problem.micro_batch_sizes))
        if max(stage.replicas for stage in stages) > size:
            continue
        found = problem.evaluate(stages, size, "test")
        layout = layout_of(
            problem, tables.layout.moves.sizes, Candidate(tuple(stages), size, "", 0.0, "", problem.recompute)
        )
        simulated = seconds_of(tables, layout, workspace, contention=problem.contention)
        if found is None:
            assert simulated >= UNFIT
        else:
            assert simulated == pytest.approx(found.seconds, rel=1e-9, abs=0)


def test_the_same_problem_has_the_same_plan_on_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tuple(LayerCost(f"layer{i}", 0.1 + i % 3 / 10, 0.3, 1e5, 1e5, 1e6) for i in range(9))
    kinds = {"fast": DeviceKind(1e9, 1.0), "slow": DeviceKind(1e9, 0.4)}
    servers = tuple(Server.of_kinds(f"s{i}", [("fast", 1), ("slow", 2)]) for i in range(2))
    cluster = Cluster(servers, None, Link(1e10, 1e-5), Link(1e8, 1e-4), kinds=kinds)
    problem = make_problem(Profile("net", 8, "fast", layers), cluster, global_batch_size=24)
    candidates = unequal_candidates(problem, find_unequal_stages(problem))
    found = []
    for cores in (1, 3):
        monkeypatch.setattr("dapple_tf.planner.layout_search.count_cores", lambda cores=cores: cores)
        found.append(refine_unequal(replace(problem), candidates, 300_000))
    assert found[0] == found[1]
    assert min(c.seconds for c in found[0]) <= min(c.seconds for c in candidates) * (1 + 1e-12)


def test_a_step_of_no_seconds_is_planned() -> None:
    kinds = {"V": DeviceKind(1e12, 1.0), "P": DeviceKind(1e12, 0.5)}
    servers = tuple(Server.of_kinds(f"s{i}", [("V", 1), ("P", 1)]) for i in range(4))
    link = Link(1e9, 1e-5)
    cluster = Cluster(servers, None, link, link, {("s1", "s3"): Link(1e4, 0.0)}, kinds)
    profile = Profile("net", 8, "test", tuple(LayerCost(f"layer{i}", 0.0, 0.0, 1e6, 1e6, 1e6) for i in range(8)))
    plan = dapple.plan(profile, cluster, global_batch_size=16)
    assert plan.predicted is not None
    assert plan.predicted["step_seconds"] == 0.0
