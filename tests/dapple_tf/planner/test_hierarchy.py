"""The levels of a cluster: derived from servers and links, checked, and made one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import PlanError
from dapple_tf.planner.systems.hierarchy import Hierarchy, Level, derive_hierarchy
from dapple_tf.profiler.cluster import config
from tests.dapple_tf.planner.builders import make_cluster
from tests.graph_passes.builders import refused

FAST, MIDDLE, SLOW = 100.0, 10.0, 1.0


def levels(hierarchy: Hierarchy) -> list[tuple[int, float]]:
    return [(level.count, level.bandwidth) for level in hierarchy.levels]


@pytest.mark.parametrize(
    ("servers", "wanted"),
    [
        ((1,), []),
        ((4,), [(4, MIDDLE)]),
        ((1, 1, 1), [(3, SLOW)]),
        ((4, 4), [(4, MIDDLE), (2, SLOW)]),  # figure 7
        ((4, 2), [(6, SLOW)]),  # PipeDream's components are equal
    ],
)
def test_servers_of_equal_links_are_at_most_two_levels(servers: tuple[int, ...], wanted: list[Any]) -> None:
    hierarchy = derive_hierarchy(make_cluster(*servers, inside=(MIDDLE, 0.0), between=(SLOW, 0.0)))
    assert levels(hierarchy) == wanted
    assert hierarchy.devices == tuple(range(sum(servers)))


def test_the_presets_of_the_dapple_paper() -> None:
    assert levels(derive_hierarchy(config("a"))) == [(8, 130e9), (2, 25e9 / 8)]
    assert levels(derive_hierarchy(config("c"))) == [(16, 10e9 / 8)]


def test_pairs_of_servers_with_fast_links_are_a_level() -> None:
    links = {("s0", "s3"): (FAST, 0.0), ("s1", "s2"): (FAST, 0.0)}
    hierarchy = derive_hierarchy(make_cluster(2, 2, 2, 2, inside=(500.0, 0.0), links=links))
    assert levels(hierarchy) == [(2, 500.0), (2, FAST), (2, SLOW)]
    assert hierarchy.devices == (0, 1, 6, 7, 2, 3, 4, 5)  # servers 0 and 3, then 1 and 2
    assert hierarchy.sizes == (1, 2, 4, 8)


def test_eight_servers_in_two_racks_of_two_pairs_are_three_levels() -> None:
    rack = {
        (f"s{a}", f"s{b}"): (FAST if a // 2 == b // 2 else MIDDLE, 0.0)
        for a in range(8)
        for b in range(a + 1, 8)
        if a // 4 == b // 4
    }
    hierarchy = derive_hierarchy(make_cluster(*[1] * 8, links=rack))
    assert levels(hierarchy) == [(2, FAST), (2, MIDDLE), (2, SLOW)]
    assert hierarchy.devices == tuple(range(8))


def test_one_fast_pair_alone_is_no_level() -> None:
    hierarchy = derive_hierarchy(make_cluster(1, 1, 1, 1, links={("s0", "s1"): (FAST, 0.0)}))
    assert levels(hierarchy) == [(4, SLOW)]


def test_a_level_has_the_least_bandwidth_between_its_parts() -> None:
    links = {("s0", "s1"): (FAST, 0.0), ("s1", "s2"): (MIDDLE, 0.0), ("s0", "s2"): (0.5, 0.0)}
    # At 100 only s0 and s1 are connected; at 10 all are, the slowest pair by 0.5.
    assert levels(derive_hierarchy(make_cluster(1, 1, 1, links=links))) == [(3, 0.5)]
    inside = {("s0", "s0"): (MIDDLE, 0.0), ("s1", "s1"): (FAST, 0.0)}
    assert levels(derive_hierarchy(make_cluster(2, 2, links=inside))) == [(2, MIDDLE), (2, SLOW)]
    unequal = {("s0", "s0"): (0.25, 0.0)}
    assert levels(derive_hierarchy(make_cluster(2, 1, links=unequal))) == [(3, 0.25)]


@given(st.integers(1, 6), st.integers(1, 3), st.data())
def test_any_links_give_levels_of_all_devices(servers: int, devices: int, data: st.DataObject) -> None:
    pairs = [(f"s{a}", f"s{b}") for a in range(servers) for b in range(a + 1, servers)]
    speeds = st.sampled_from([0.5, SLOW, MIDDLE, FAST])
    chosen = data.draw(st.dictionaries(st.sampled_from(pairs), speeds)) if pairs else {}
    cluster = make_cluster(*[devices] * servers, links={pair: (speed, 0.0) for pair, speed in chosen.items()})
    hierarchy = derive_hierarchy(cluster)
    assert sorted(hierarchy.devices) == list(range(cluster.devices))
    slowest = min([speed for _, speed in levels(hierarchy)], default=None)
    links = [cluster.link(a, b).bandwidth for a in range(servers) for b in range(a + 1, servers)]
    assert slowest == min([*links, *([10.0] if devices > 1 else [])], default=None)
    # What shares a component of a level is connected: the devices of a server always do.
    for first in range(0, cluster.devices, devices):
        assert len({cluster.homes[device] for device in hierarchy.devices[first : first + devices]}) == 1


def test_one_level_of_all_devices_has_the_least_bandwidth() -> None:
    flat = derive_hierarchy(make_cluster(2, 2)).flatten()
    assert levels(flat) == [(4, SLOW)]
    assert flat.flatten() == flat
    one = Hierarchy((), (0,))
    assert one.flatten() == one


@pytest.mark.parametrize(
    ("made", "devices", "said"),
    [
        ([Level(1, 1.0)], (0,), "level 1 has 1 components; it must have at least 2"),
        ([Level(2, 1.0), Level(2, 0.0)], (0, 1, 2, 3), "level 2 has a bandwidth of 0.0, not a finite number above 0"),
        ([Level(2, float("nan"))], (0, 1), "level 1 has a bandwidth of nan"),
        ([Level(2, 1.0)], (0, 1, 2), "the levels are for 2 devices, but 3 are given"),
        ([], (0, 1), "the levels are for 1 device, but 2 are given"),
        ([Level(2, 1.0)], (1, 1), "devices is [1, 1]: name each device once"),
    ],
)
def test_impossible_levels_are_refused(made: list[Level], devices: tuple[int, ...], said: str) -> None:
    with refused(PlanError, said):
        Hierarchy(tuple(made), devices)
