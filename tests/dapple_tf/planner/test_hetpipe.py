"""Planner "hetpipe": its partition against all, its policies and steps by hand, and plans with virtual workers."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.autoplan.options import Options, check_contradictions
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import make_problem, predict_plan
from dapple_tf.planner.best import comparator_candidates
from dapple_tf.planner.costs import ChainCosts
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.registry import find_result
from dapple_tf.planner.systems.hetpipe import allocate, partition_worker
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server
from tests.dapple_tf.planner.builders import AMPLE, Case, cases, make_cluster, make_profile
from tests.dapple_tf.planner.comparators import all_bounds
from tests.graph_passes.builders import refused

KINDS = {"fast": DeviceKind(AMPLE, 1.0), "slow": DeviceKind(AMPLE, 0.5), "small": DeviceKind(60.0, 1.0)}


def make_unequal(*servers: str, between: tuple[float, float] = (1000.0, 0.0)) -> Cluster:
    """Return servers with the devices that their texts name: "fast fast", "slow"."""
    found = []
    for index, server in enumerate(servers):
        found.append(Server.of_kinds(f"s{index}", [(kind, 1) for kind in server.split()]))
    return Cluster(tuple(found), None, Link(1000.0, 0.0), Link(*between), {}, KINDS)


def problem_of(cluster: Cluster, *layers: tuple[float, ...], batch: int = 8, **options: Any) -> PlanningProblem:
    return make_problem(make_profile(*layers, batch_size=1), cluster, global_batch_size=batch, **options)


# --- the partition of a worker


def least_time(problem: PlanningProblem, order: tuple[int, ...], samples: int, micro_batches: int) -> float:
    """Return the least largest time of a stage, of all partitions that fit, from the definition."""
    profile, cluster, ends = problem.profile, problem.cluster, problem.chain.positions
    scale, found = samples / profile.batch_size, [math.inf]

    def sent(position: int, a: int, b: int) -> float:
        link = cluster.link(cluster.homes[a], cluster.homes[b])
        sources = {source for source, reader in profile.links if source < position <= reader}
        return link.latency + sum(profile.layers[s].activation_bytes for s in sources) * scale / link.bandwidth

    for bounds in all_bounds(len(ends) - 1, len(order)) if len(order) < len(ends) else ():
        times = []
        for s, (i, j) in enumerate(itertools.pairwise(bounds)):
            device, layers = order[s], range(ends[i], ends[j])
            on = profile.of_kind(cluster.kind_of(device), cluster.speed_of(device))
            forward, backward = on.forward_seconds(samples), on.backward_seconds(samples)
            time = sum(forward[n] * (1 + bool(problem.recompute)) + backward[n] for n in layers)
            time += sent(ends[i], order[s - 1], device) if s else 0.0
            time += sent(ends[j], order[s + 1], device) if s + 1 < len(order) else 0.0
            held = min(len(order) - s, micro_batches)
            stash = sum(profile.layers[n].stash_bytes for n in layers) * scale
            need = sum(profile.layers[n].parameter_bytes for n in layers) * 4
            need += max(profile.working_bytes()[n] for n in layers) * scale
            if problem.recompute:
                sources = {a for a, b in profile.links if a < ends[i] <= b}
                need += stash + held * sum(profile.layers[a].activation_bytes for a in sources) * scale
            else:
                need += held * stash
            times.append(float(time) if need <= cluster.memory_of(device) else math.inf)
        found.append(max(times))
    return min(found)


@given(
    cases(largest=6), st.sampled_from(["fast fast", "fast slow slow", "small slow", "small", "fast small slow fast"])
)
def test_no_partition_of_a_worker_is_faster(case: Case, kinds: str) -> None:
    cluster = make_unequal(*kinds.split(), between=(case.cluster.inter_server.bandwidth, 0.5))
    problem = make_problem(case.profile, cluster, global_batch_size=case.batch, **case.options)
    order = tuple(range(cluster.devices))
    for size in problem.micro_batch_sizes:
        micro_batches = case.batch // size
        found = partition_worker(ChainCosts(problem, problem.chain, size), order, micro_batches)
        wanted = least_time(problem, order, size, micro_batches)
        assert (found[0] if found else math.inf) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


# --- allocation policies


def test_allocations_by_hand() -> None:
    problem = problem_of(make_unequal("slow slow", "fast fast", "fast fast", "slow slow"), (1, 1))
    assert allocate(problem, "NP") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert allocate(problem, "ED") == ((0, 2, 4, 6), (1, 3, 5, 7))
    # The fastest server, of devices 2 and 3, is paired with the slowest, of devices 6 and 7.
    assert allocate(problem, "HD") == ((2, 6), (3, 7), (4, 0), (5, 1))
    uneven = problem_of(make_unequal("fast fast", "slow"), (1, 1))
    assert [allocate(uneven, policy) for policy in ("NP", "ED", "HD")] == [((0, 1), (2,)), (), ()]
    odd = problem_of(make_unequal("fast", "slow"), (1, 1))
    assert (allocate(odd, "ED"), allocate(odd, "HD")) == (((0, 1),), ())


def test_workers_that_cut_alike_are_an_ordinary_plan_with_a_replica_for_each() -> None:
    problem = problem_of(make_unequal("fast fast", "slow slow"), *[(1, 1)] * 3, batch=8)
    result = find_result(problem, "hetpipe", policy="ED")
    # The fast devices have two layers, the slow ones one, which takes them as long; the cut may be on either side.
    sizes = {stage.devices: stage.last_layer - stage.first_layer + 1 for stage in result.chosen.stages}
    assert sizes == {(0, 1): 2, (2, 3): 1}
    assert all(stage.worker is None for stage in result.chosen.stages)


# --- plans with virtual workers


def unlike(**options: Any) -> tuple[PlanningProblem, Plan]:
    problem = problem_of(make_unequal("fast slow", "fast fast"), (1, 2, 0, 1, 4), (1, 2, 0, 1, 4), (2, 4, 0, 1, 8))
    result = find_result(problem, "hetpipe", policy="NP", **options)
    return problem, predict_plan(problem, result.chosen, "hetpipe")[0]


def test_unlike_workers_by_hand() -> None:
    """Layers of 3, 3 and 6 s; the slow device takes twice as long.

    The first worker: 6 s on either device, so the slow one has a layer of 3 s, the fast one the others. The second: 6
    and 6 s.
    """
    problem, plan = unlike()
    parts = plan.virtual_workers
    assert [stage.worker for stage in plan.stages] == [0, 0, 1, 1]
    assert [stage.devices for stage in plan.stages] == [(1,), (0,), (2,), (3,)]
    assert [part.starts for part in parts] == [(1,), (2,)]
    assert (plan.micro_batches, plan.micro_batch_size, parts[0].global_batch_size) == (4, 1, 4)
    assert plan.notation == "2 virtual workers, straight|straight"
    timeline = dapple.simulate(plan, problem.profile, problem.cluster)
    # The first worker: 2 s of forward on the slow device, then four times 9 s; 4 s of backward on the slow device.
    # Then layer 0 is reduced over devices 1 and 2 (4 bytes at 1000 a second), layer 1 over 0 and 2, layer 2 over 0, 3.
    assert timeline.step_seconds == pytest.approx(2 + 4 * 9 + 4 + 0.004, abs=0.02)
    assert plan.predicted["step_seconds"] == timeline.step_seconds
    assert len(plan.predicted["peak_memory_bytes"]) == 4
    assert timeline.note.startswith("virtual worker 0 of 2")


def test_a_comparison_says_where_virtual_workers_lose() -> None:
    problem, _ = unlike()
    found = dapple.compare(problem.profile, problem.cluster, global_batch_size=8, planners=["best", "hetpipe"])
    row = found.rows[1]
    assert (row.planner, row.notation.split(",")[0]) == ("hetpipe", "2 virtual workers")
    assert sum(row.parts.values()) == pytest.approx(row.step_seconds)


def test_the_bubble_counts_all_workers() -> None:
    problem, plan = unlike()
    busy = 4 * (6 + 9 + 6 + 6)  # four micro-batches on each of four devices
    step = plan.predicted["step_seconds"]
    assert plan.predicted["bubble"] == pytest.approx(1 - busy / (4 * step))
    assert problem.cluster.devices == 4


def test_a_plan_with_virtual_workers_is_saved_and_read(tmp_path: Path) -> None:
    _, plan = unlike()
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert [stage["worker"] for stage in data["stages"]] == [0, 0, 1, 1]
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_with_virtual_workers_is_not_run_and_best_does_not_choose_it() -> None:
    problem, plan = unlike()
    with refused(PlanError, "the plan has virtual workers", "policy='ED'"):
        check_contradictions(Options(plan=plan))
    assert not any(stage.worker is not None for c in comparator_candidates(problem) for stage in c.stages)


@pytest.mark.parametrize(
    ("workers", "devices", "told"),
    [
        ((0, 0, None, None), (0, 1, 2, 3), "give all stages one"),
        ((1, 1, 0, 0), (0, 1, 2, 3), "rising order"),
        ((0, 0, 2, 2), (0, 1, 2, 3), "number them from 0"),
        ((0, 0, 1, 1), (0, 1, 2, 0), "device 0 is in two stages"),
    ],
)
def test_wrong_workers_are_refused(workers: tuple[int | None, ...], devices: tuple[int, ...], told: str) -> None:
    _, plan = unlike()
    stages = [
        replace(stage, worker=worker, devices=(device,))
        for stage, worker, device in zip(plan.stages, workers, devices, strict=True)
    ]
    with refused(PlanError, told):
        replace(plan, stages=tuple(stages))


def test_workers_need_all_layers_and_one_device_a_stage() -> None:
    _, plan = unlike()
    with refused(PlanError, "each must have all layers"):
        replace(plan, stages=plan.stages[:3])
    with refused(PlanError, "give it one"):
        replace(plan, stages=(*plan.stages[:3], StagePlan(2, 2, (3, 4), worker=1)))


def test_a_batch_that_workers_cannot_share_equally_is_refused() -> None:
    problem, plan = unlike()
    with refused(PlanError, "2 virtual workers is not global_batch_size 9"):
        dapple.simulate(replace(plan, global_batch_size=9), problem.profile, problem.cluster)


def test_policies_that_do_not_exist_or_do_not_divide_the_servers_are_refused() -> None:
    problem = problem_of(make_unequal("fast fast", "slow"), (1, 1), (1, 1))
    with refused(PlanError, "policy='XX'", "NP, ED, HD"):
        find_result(problem, "hetpipe", policy="XX")
    with refused(PlanError, "policy='ED'", "[2, 1]", "policy='NP'"):
        find_result(problem, "hetpipe", policy="ED")
    with refused(PlanError, "8 samples has no equal parts for 3 or 5 virtual workers"):
        find_result(problem_of(make_unequal(*["fast " * 5] * 3), (1, 1), (1, 1)), "hetpipe")
    large = problem_of(make_unequal(*["fast"] * 1025), (1, 1))
    with refused(PlanError, "1025 devices"):
        find_result(large, "hetpipe")


def test_fewer_layers_than_devices_of_a_worker_are_told() -> None:
    cluster = make_unequal("fast fast fast", "slow slow slow slow")
    message = r"a virtual worker has up to 4 devices, one stage each, but the layers of 'net' form 2 blocks"
    with pytest.raises(PlanError, match=message):
        dapple.plan(make_profile((1, 2), (1, 2)), cluster, global_batch_size=8, planner="hetpipe")


def test_micro_batches_without_equal_parts_for_the_workers_are_told() -> None:
    cluster = make_unequal("fast", "slow slow")
    with pytest.raises(PlanError, match="micro-batches of 1 sample have no equal parts for 2 virtual workers"):
        dapple.plan(make_profile((1, 2)), cluster, global_batch_size=8, micro_batch_size=1, planner="hetpipe")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zb-auto"}, "schedule 'zb-auto.*' needs a single pipeline: use planner 'best'"),
        ({"mode": "async", "minibatches": 4}, "asynchronous windows need a single pipeline: use planner 'best'"),
    ],
)
def test_what_virtual_workers_cannot_have_is_told(options: dict[str, Any], message: str) -> None:
    servers = (Server("a", 1), Server("b", 2))
    cluster = Cluster(servers, AMPLE, Link(1000.0, 0.0), Link(1000.0, 0.0))
    profile = make_profile(*[(1, 2)] * 4)
    with pytest.raises(PlanError, match=f"virtual workers, each with its own cuts of the model, but {message}"):
        dapple.plan(profile, cluster, global_batch_size=16, planner="hetpipe", **options)


def test_a_worker_of_hundreds_of_equal_devices_is_tried() -> None:
    """One of a device of each server, by policy "ED"; 2 blocks are too few for it."""
    profile, cluster = make_profile((1, 2), (1, 2)), make_cluster(*[1] * 600)
    with pytest.raises(PlanError, match="planner 'hetpipe' has no plan on 600 devices"):
        dapple.plan(profile, cluster, global_batch_size=8, micro_batch_size=8, planner="hetpipe")
