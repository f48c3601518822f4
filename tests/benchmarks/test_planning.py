"""The helpers of the planning benchmarks, on numbers worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.papers import published
from benchmarks.papers.planning import WholeSlices
from benchmarks.papers.published import (
    Model,
    Published,
    calibrate_stash,
    count_units,
    find_cut,
    published_stages,
    stages_of,
)
from benchmarks.papers.table5 import fastest_split
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.profiler.cluster import Cluster, Link, Server, config
from dapple_tf.profiler.profile import LayerCost, Profile

MODEL = Model("made up", "none", r"cell", 8, 2, 0.0)


def make_profile() -> Profile:
    """Four cells of unequal work and a free view, for a batch of 2; 3, 9, 1 and 5 bytes cross in turn."""
    return Profile(
        "made up",
        2,
        "none",
        (
            LayerCost("cell0", 1.0, 2.0, 3.0, 3.0, 10.0),
            LayerCost("cell1", 2.0, 1.0, 9.0, 9.0, 20.0),
            LayerCost("view", 0.0, 0.0, 1.0, 0.0, 0.0),
            LayerCost("cell2", 1.0, 1.0, 5.0, 5.0, 30.0),
            LayerCost("cell3", 3.0, 0.0, 0.0, 0.0, 40.0),
        ),
    )


def make_cluster(memory: float = 1e9) -> Cluster:
    return Cluster((Server("a", 2), Server("b", 2)), memory, Link(100.0, 0.0), Link(10.0, 0.0))


def make_tight_problem(**fields: object) -> PlanningProblem:
    return PlanningProblem(make_profile(), make_cluster(), 8, (1, 2, 4, 8), **fields)


def test_a_cut_after_a_number_of_cells_is_where_the_fewest_bytes_cross() -> None:
    problem = make_tight_problem()
    # After the second cell a stage may start at the view (9 bytes cross) or at cell2 (1 byte).
    assert [find_cut(MODEL, problem, units) for units in (1, 2, 3)] == [1, 3, 4]


def test_a_published_plan_has_its_cut_and_its_devices_in_order() -> None:
    stages = published_stages(Published(MODEL, "a", "3:1", "2:2"), make_tight_problem())
    assert [(s.first_layer, s.last_layer, s.devices) for s in stages] == [(0, 2, (0, 1, 2)), (3, 4, (3,))]
    assert count_units(MODEL, make_profile(), stages) == (2, 2)


def test_the_cut_of_a_row_may_differ_from_the_printed_one() -> None:
    stages = published_stages(Published(MODEL, "a", "3:1", "2:2", units=1), make_tight_problem())
    assert stages[1].first_layer == 1


def test_published_dp_and_straight_plans() -> None:
    problem = make_tight_problem()
    assert [s.replicas for s in published_stages(Published(MODEL, "a", "DP"), problem)] == [4]
    straight = published_stages(Published(MODEL, "a", "straight"), problem)
    assert [s.devices for s in straight] == [(0,), (1,), (2,), (3,)]
    assert count_units(MODEL, problem.profile, straight) == (1, 1, 1, 1)


def test_the_stash_of_layers_with_a_backward_is_raised_to_the_published_memory() -> None:
    profile = make_profile()
    # Weights, gradients and one slot: 300. Working: cell1 has 9 + 3 = 12. Stash of cells with a backward: 17.
    grown = calibrate_stash(profile, memory=300 + 12 + 34, slots=1)
    assert [layer.stash_bytes for layer in grown.layers] == pytest.approx([6.0, 18.0, 0.0, 10.0, 0.0])
    assert [layer.activation_bytes for layer in grown.layers] == [3.0, 9.0, 1.0, 5.0, 0.0]


def test_the_stash_is_not_changed_where_the_published_memory_is_too_small() -> None:
    assert calibrate_stash(make_profile(), memory=200.0, slots=1) == make_profile()


def test_whole_slices_give_every_replica_the_profile_batch() -> None:
    problem = WholeSlices(make_profile(), make_cluster(), 8, (1, 2, 4, 8))
    stages = stages_of(problem, [3], [3, 1])
    # Three replicas of 2 samples each need micro-batches of 6: 8 is the only divisor that will do.
    assert [found.micro_batch_size for found in problem.evaluate_all_sizes(stages, "test")] == [8]
    free = PlanningProblem(make_profile(), make_cluster(), 8, (1, 2, 4, 8))
    assert [found.micro_batch_size for found in free.evaluate_all_sizes(stages, "test")] == [4, 8]


@pytest.mark.parametrize("planner", ["best", "dapple"])
def test_planners_give_replicas_whole_slices(planner: str) -> None:
    chosen = run_planner(WholeSlices(make_profile(), make_cluster(), 8, (1, 2, 4, 8)), planner).chosen
    assert max(stage.replicas for stage in chosen.stages) * 2 <= chosen.micro_batch_size


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("memory", [1e9, 300.0])
def test_the_fastest_split_is_that_of_all_splits(overlap: bool, memory: float) -> None:
    problem = replace(make_tight_problem(overlap=overlap), cluster=make_cluster(memory))
    candidates = []
    for cut, replicas in itertools.product(range(1, 5), range(1, 4)):
        candidates += problem.evaluate_all_sizes(stages_of(problem, [cut], [replicas, 4 - replicas]), "test")
    found = fastest_split(problem)
    assert found is not None
    assert found.seconds == min(candidate.seconds for candidate in candidates)


def test_there_is_no_split_where_none_fits() -> None:
    assert fastest_split(replace(make_tight_problem(), cluster=make_cluster(100.0))) is None


@pytest.mark.skipif(bool(published.find_missing_profiles()), reason=published.find_missing_profiles())
def test_the_papers_plans_on_its_profiles() -> None:
    cuts = {}
    for row in published.TABLE_5:
        problem = make_problem(
            published.read_profile(row.model), config(row.config), global_batch_size=row.model.global_batch
        )
        stages = published_stages(row, problem)
        assert sum(stage.replicas for stage in stages) == 16
        if len(stages) == 2:
            cuts[row.model.title] = problem.profile.layers[stages[1].first_layer].name
    assert cuts == {
        "VGG-19": "FC1",
        "GNMT-16": "node48 Dropout(p=0.2)",
        "BERT-48": "layer_23",
        "XLNet-36": "Layer_18",
        "AmoebaNet-36": "cell_27",
    }
