"""Planner "autopipe": its simulator, Algorithm 1 and heuristic against all choices, by hand, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.slicer import count_slices, sliced_1f1b
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.systems.autopipe import Blocks, balance, search_scheme, simulate_1f1b, sub_layer_blocks
from dapple_tf.plans import Plan
from dapple_tf.profiler.linearise import linearise
from dapple_tf.profiler.profile import Profile
from tests.dapple_tf.planner.autopipe_reference import Pipeline, iteration_seconds, master_stage, sums
from tests.dapple_tf.planner.builders import figures, make_cluster, make_profile
from tests.dapple_tf.planner.comparators import all_bounds
from tests.graph_passes.builders import refused


def simulate(pipeline: Pipeline) -> tuple[float, int]:
    return simulate_1f1b(np.array(pipeline.f, float), np.array(pipeline.b, float), pipeline.comm, pipeline.m)


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int, most_more: int) -> Pipeline:
    """Draw whole seconds, so that paths are often equally long; at least as many micro-batches as stages."""
    n = draw(st.integers(1, most_stages))
    f, b = (tuple(float(draw(st.integers(1, 4))) for _ in range(n)) for _ in range(2))
    return Pipeline(f, b, float(draw(st.integers(0, 2))), n + draw(st.integers(0, most_more)))


@st.composite
def models(draw: st.DrawFn) -> tuple[Blocks, int]:
    """Draw up to seven blocks and a depth."""
    rows = draw(st.lists(st.tuples(figures(8), figures(12)), min_size=1, max_size=7))
    forward, backward = (np.array(column, float) for column in zip(*rows, strict=True))
    depth = draw(st.integers(1, min(4, len(rows))))
    return Blocks(forward, backward, draw(figures(2)), draw(st.integers(1, 10))), depth


# --- the simulator


@given(pipelines(5, 8))
def test_the_iteration_time_is_that_of_the_printed_formulas(pipeline: Pipeline) -> None:
    assert simulate(pipeline)[0] == iteration_seconds(pipeline)


@given(pipelines(4, 2))
def test_the_master_stage_is_that_of_the_longest_path_closest_to_the_last_stage(pipeline: Pipeline) -> None:
    assert simulate(pipeline)[1] == master_stage(pipeline)


def test_fewer_micro_batches_than_stages() -> None:
    # One micro-batch: three FPs and three BPs, between which it is sent four times.
    assert simulate(Pipeline((1, 2, 3), (2, 4, 6), 0.5, 1))[0] == 6 + 12 + 4 * 0.5
    assert simulate(Pipeline((1, 1, 1, 1), (2, 2, 2, 2), 0.0, 2)) == (4 + 8 + 3, 3)


@pytest.mark.parametrize("heaviest", range(4))
def test_the_heaviest_stage_is_the_master(heaviest: int) -> None:
    f = [1.0] * 4
    f[heaviest] = 1.5
    assert simulate(Pipeline(tuple(f), tuple(2 * s for s in f), 0.0, 12))[1] == heaviest


def test_the_last_of_equal_stages_is_the_master() -> None:
    assert simulate(Pipeline((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), 0.0, 6))[1] == 2


def test_moving_the_master_stage_forward_shortens_the_iteration_as_in_figure_7() -> None:
    """(a) stage 2 is the heaviest; (b) stages 1 and 2 swapped; (c) stages 2 and 3 redistributed."""
    loads = {"a": (2.0, 2.0, 3.0, 2.5), "b": (2.0, 3.0, 2.0, 2.5), "c": (2.0, 3.0, 1.5, 3.0)}
    found = {name: simulate(Pipeline(f, tuple(2 * s for s in f), 0.0, 8)) for name, f in loads.items()}
    assert found["a"][1] == 2
    assert found["b"][1] == 1
    assert found["b"][0] < found["a"][0]


# --- Algorithm 1 and the heuristic


@given(models())
def test_algorithm_1_has_the_least_largest_stage(model: tuple[Blocks, int]) -> None:
    blocks, depth = model
    work = (blocks.forward + blocks.backward).tolist()
    least = min(max(sums(work, scheme)) for scheme in all_bounds(len(work), depth))
    found = balance(np.array(work), depth).bounds(depth)
    assert found in set(all_bounds(len(work), depth))
    assert max(sums(work, found)) == pytest.approx(least, rel=1e-12)


def seconds_of(blocks: Blocks, scheme: tuple[int, ...]) -> float:
    f, b = (sums(row.tolist(), scheme) for row in (blocks.forward, blocks.backward))
    return simulate(Pipeline(f, b, blocks.comm, blocks.micro_batches))[0]


@given(models())
def test_the_heuristic_is_between_algorithm_1_and_the_optimum(model: tuple[Blocks, int]) -> None:
    blocks, depth = model
    found = search_scheme(blocks, depth)
    least = min(seconds_of(blocks, scheme) for scheme in all_bounds(len(blocks.forward), depth))
    first = seconds_of(blocks, balance(blocks.forward + blocks.backward, depth).bounds(depth))
    assert found.seconds == pytest.approx(seconds_of(blocks, found.scheme), rel=1e-12)
    assert least * (1 - 1e-12) <= found.seconds <= first * (1 + 1e-12)


def make_blocks(*seconds: float, micro_batches: int = 8) -> Blocks:
    return Blocks(np.array(seconds), 2 * np.array(seconds), 0.0, micro_batches)


def test_the_heuristic_improves_on_algorithm_1() -> None:
    """Of three equal blocks Algorithm 1 gives the last stage two; with two in the first one it is faster."""
    blocks = make_blocks(1.0, 1.0, 1.0)
    assert balance(blocks.forward * 3, 2).bounds(2) == (0, 1, 3)
    # One FP of 1 s, eight times 2 + 4 s, one BP of 2 s.
    assert seconds_of(blocks, (0, 1, 3)) == 51
    # Two of 2 s, but the last BP follows 1 + 2 s of the last stage at once: 2 + 1 + 2 + 4, then 7 x 6 s.
    assert search_scheme(blocks, 2)[:2] == ((0, 2, 3), 49)


def test_the_heuristic_does_not_always_find_the_optimum() -> None:
    """The master stage has one block, which cannot move: the search ends with Algorithm 1's scheme."""
    blocks = make_blocks(2.0, 1.0, 4.0, 2.0, 1.0)
    found = search_scheme(blocks, 4)
    assert found == ((0, 1, 2, 3, 5), 111, 2)
    assert min((seconds_of(blocks, scheme), scheme) for scheme in all_bounds(5, 4)) == (107, (0, 2, 3, 4, 5))


# --- blocks


def test_residual_additions_are_where_equally_few_bytes_cross() -> None:
    """Two residual blocks on a stream of 4 bytes, whose insides carry 8, 12 and again 8 bytes; then a head."""
    streams = [4, 8, 12, 8, 4, 8, 12, 4, 40, 1]
    profile = make_profile(*[(1.0, 2.0, float(sent), 1.0, 1.0) for sent in streams])
    found = sub_layer_blocks(linearise(profile))
    assert found.positions == (0, 1, 5, 8, 9, 10)


def test_residual_additions_are_found_in_a_graph() -> None:
    """Layer 3 adds the output of layer 0 to that of layer 2, and layer 6 that of layer 3 to that of layer 5."""
    edges = ((0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (4, 5), (5, 6), (3, 6), (6, 7))
    profile = make_profile(*[(1.0, 2.0, 4.0, 1.0, 1.0)] * 8, edges=edges)
    assert sub_layer_blocks(linearise(profile)).positions == (0, 1, 4, 7, 8)


def test_a_chain_that_shrinks_and_grows_keeps_its_cuts() -> None:
    """A convolutional network: 8 bytes cross before and behind, but fewer between, so no stream passes."""
    profile = make_profile(*[(1.0, 2.0, float(sent), 1.0, 1.0) for sent in (8, 16, 16, 4, 8, 8, 2, 2)])
    assert sub_layer_blocks(linearise(profile)).positions == tuple(range(9))


# --- the planner

TRANSFORMER = make_profile(*[(2.0, 4.0, 2.0, 8.0, 1.0), (1.0, 2.0, 2.0, 4.0, 1.0)] * 4, (1.0, 2.0, 0.0, 0.0, 1.0))


def plan(profile: Profile = TRANSFORMER, cluster: Any = None, batch: int = 32, **options: Any) -> Plan:
    cluster = make_cluster(4, inside=(1e3, 0.0)) if cluster is None else cluster
    return dapple.plan(profile, cluster, global_batch_size=batch, planner="autopipe", **options)


def test_a_plan_has_stages_slices_prediction_and_file(tmp_path: Any) -> None:
    cluster = make_cluster(4, inside=(1e3, 0.0))
    problem = make_problem(TRANSFORMER, cluster, global_batch_size=32, micro_batch_size=4)
    whole = run_planner(problem, "autopipe", stages=4, sliced=False)
    found = plan(micro_batch_size=4, stages=4)
    assert [s.devices for s in found.stages] == [(0,), (1,), (2,), (3,)]
    assert found.stages == whole.chosen.stages
    f, b = ([c.forward_seconds for c in costs] for costs in [simulated_costs(problem, whole.chosen)] * 2)
    count = count_slices(f, [2 * s for s in b], 4 * 2 / 4 / 1e3)
    assert count > 0
    assert found.schedule == str(sliced_1f1b(4, 8, count))
    assert found.micro_batch_sizes == (2, 2) * count + (4,) * (8 - count)
    assert found.global_batch_size == 32
    timeline = dapple.simulate(found, TRANSFORMER, cluster)
    assert found.predicted["step_seconds"] == timeline.step_seconds < whole.chosen.seconds
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


def simulated_costs(problem: Any, candidate: Any) -> Any:
    plan = problem.plan_of(candidate, "autopipe")
    return dapple.simulate(plan, problem.profile, problem.cluster).costs


def test_stages_are_replicated_alike_on_consecutive_devices() -> None:
    found = plan(stages=2)
    assert [s.devices for s in found.stages] == [(0, 1), (2, 3)]
    assert found.schedule == "dapple-a"  # two stages are not sliced


def test_the_depth_is_that_of_the_fastest_step() -> None:
    light = plan(make_profile(*[(2.0, 4.0, 100.0, 8.0, 1.0)] * 4), make_cluster(4))
    heavy = plan(make_profile(*[(2.0, 4.0, 1.0, 8.0, 1e3)] * 4), make_cluster(4))
    assert light.replicas == (4,)
    assert heavy.replicas == (1, 1, 1, 1)


def test_micro_batches_that_cannot_be_halved_are_not_sliced() -> None:
    assert plan(micro_batch_size=1, stages=4).micro_batch_sizes is None


def test_all_micro_batches_may_be_sliced() -> None:
    found = plan(batch=4, micro_batch_size=4, stages=4)
    assert found.micro_batch_sizes == (2, 2)
    assert (found.micro_batch_size, found.micro_batches) == (2, 2)


def test_all_options_of_a_plan_apply() -> None:
    found = plan(micro_batch_size=4, schedule="dapple-b", recompute=True, overlap=True, stages=4)
    assert (found.micro_batch_size, found.schedule, found.recompute, found.overlap) == (4, "dapple-b", True, True)
    problem = make_problem(TRANSFORMER, make_cluster(1), global_batch_size=4, recompute=True)
    assert run_planner(problem, "autopipe").formula_seconds == 13 + 26 + 13  # forward runs again


def test_the_iteration_of_the_papers_simulator_is_kept() -> None:
    result = run_planner(make_problem(TRANSFORMER, make_cluster(1), global_batch_size=4), "autopipe")
    assert (result.formula_seconds, result.formula) == (39, "1F1B by AutoPipe's simulator")


def test_many_blocks_are_merged() -> None:
    found = plan(make_profile(*[(1.0, 2.0, 1.0, 1.0, 1.0)] * 1500), stages=4, micro_batch_size=8)
    assert found.stages[-1].last_layer == 1499


def test_a_depth_that_does_not_divide_the_devices_is_refused() -> None:
    with refused(PlanError, "stages=3: on 4 devices, with equally many for each stage, the 9 blocks of 'net' can have"):
        plan(stages=3)


def test_a_plan_that_does_not_fit_the_memory_is_refused_with_advice() -> None:
    profile = make_profile(*[(1, 2, 1, 4, 100)] * 3)  # a stage of one layer needs 400 bytes, and two are 800
    with pytest.raises(PlanError, match=r"planner 'autopipe' has no plan that fits .*: use planner 'best'"):
        plan(profile, make_cluster(4, memory=420))
