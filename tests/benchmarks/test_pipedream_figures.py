"""PipeDream's Table 1: formulas and configurations by hand, and the search against all pipelines of one level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.pipedream_figures import name
from benchmarks.papers.pipedream_published import STRAIGHT, TABLE_1, VGG_16, Configuration, make_cluster
from benchmarks.papers.pipedream_variants import OneLevel, by_profiler, one_after_the_other, printed
from dapple_tf.planner.systems.hierarchy import derive_hierarchy
from dapple_tf.profiler.linearise import linearise
from tests.dapple_tf.planner.builders import figures, make_profile
from tests.dapple_tf.planner.pipedream_reference import Instance, least_seconds


def make_level(*layers: tuple[float, float, float], devices: int, bandwidth: float = 1.0) -> OneLevel:
    """Return layers of (seconds, bytes sent, bytes of weights) of the profile's 4 samples."""
    profile = make_profile(*[(seconds, 0.0, sent, 1.0, weights) for seconds, sent, weights in layers])
    return OneLevel(linearise(profile), 4, devices, bandwidth)


def test_seconds_of_a_stage_by_hand() -> None:
    compute, parameters = np.array([6.0, 60.0]), np.array([12.0, 12.0])
    # Three replicas at 2 bytes a second: 2 x 2 x 12 / 2 = 24 s as printed, a third of that by the text.
    assert printed(compute, parameters, 2.0, 3).tolist() == [8, 20]
    assert by_profiler(compute, parameters, 2.0, 3).tolist() == [8 / 3, 20]
    assert one_after_the_other(compute, parameters, 2.0, 3).tolist() == [14 / 3, 68 / 3]


def test_the_best_cuts_for_given_replicas_by_hand() -> None:
    level = make_level((6, 1, 1), (4, 2, 1), (2, 0, 9), devices=3)
    # 2-1: after layer 0 max(6 / 2, 2 x 1, 6) = 6; after layer 1 max(10 / 2, 2 x 2, 2) = 5.
    assert level.best_cuts((2, 1), printed) == 5
    assert level.best_cuts((1, 1, 1), printed) == 6
    assert level.best_cuts((3,), printed) == pytest.approx(2 * 2 * 11 / 3)
    assert level.best_cuts((1, 1, 1, 1), printed) == float("inf")
    assert level.search(printed) == (5, (2, 1))


@given(
    st.lists(st.tuples(figures(10).map(lambda x: x + 1), figures(10), figures(20)), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_the_search_finds_the_optimum_of_all_pipelines(layers: list[tuple[float, float, float]], devices: int) -> None:
    level = make_level(*layers, devices=devices, bandwidth=2.0)
    seconds, replicas = level.search(printed)
    compute, sent, weights = zip(*layers, strict=True)
    levels = [(devices, 2.0)] if devices > 1 else []
    assert seconds == pytest.approx(least_seconds(Instance(compute, weights, sent, levels)), rel=1e-9)
    assert sum(replicas) == devices
    assert level.best_cuts(replicas, printed) == pytest.approx(seconds, rel=1e-9)


def test_the_papers_clusters_and_configurations() -> None:
    assert [(level.count, level.bandwidth) for level in derive_hierarchy(make_cluster("a", 4)).levels] == [
        (4, 12e9),
        (4, 1.25e9),
    ]
    assert make_cluster("b", 2).devices == 16
    assert Configuration(VGG_16, 4, "a", "15-1").replicas == (15, 1)
    assert Configuration(VGG_16, 1, "a", STRAIGHT).replicas == (1, 1, 1, 1)
    assert all(sum(row.replicas) == row.cluster.devices for row in TABLE_1)
    assert [name((1, 1)), name((2, 1)), name((1,))] == ["straight", "2-1", "1"]
