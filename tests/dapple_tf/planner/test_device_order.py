"""The order of servers by the link graph."""

from __future__ import annotations

import itertools

import pytest

from dapple_tf.planner.device_order import list_devices, order_servers, worst_connected_server
from tests.dapple_tf.planner.builders import make_cluster

FAST = (100.0, 0.0)


def test_equal_links_keep_the_given_order() -> None:
    assert order_servers(make_cluster(1, 2, 3)) == (0, 1, 2)
    same = {("s0", "s1"): (1.0, 0.0), ("s0", "s2"): (1.0, 0.0), ("s1", "s2"): (1.0, 0.0)}
    assert order_servers(make_cluster(1, 1, 1, links=same)) == (0, 1, 2)
    assert order_servers(make_cluster(1, 1, links={("s0", "s1"): FAST})) == (0, 1)


@pytest.mark.parametrize("pairs", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))])
def test_racks_stay_together(pairs: tuple[tuple[int, int], ...]) -> None:
    order = order_servers(make_cluster(1, 1, 1, 1, links={(f"s{a}", f"s{b}"): FAST for a, b in pairs}))
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset(pair) for pair in pairs}


def test_neighbours_on_a_ring_are_neighbours_in_the_order() -> None:
    ring = [0, 3, 1, 4, 2]
    links = {(f"s{a}", f"s{b}"): FAST for a, b in zip(ring, ring[1:] + ring[:1], strict=True)}
    order = order_servers(make_cluster(*[1] * 5, links=links))
    positions = [ring.index(server) for server in order]
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert all((a - b) % 5 in (1, 4) for a, b in itertools.pairwise(positions))


def test_devices_follow_their_servers() -> None:
    assert list_devices(make_cluster(2, 1, 2), (2, 0, 1)) == (3, 4, 0, 1, 2)


SLOW = (0.01, 0.0)


def test_the_worst_connected_server_is_an_end_of_the_slowest_link() -> None:
    links = {("s0", "s2"): SLOW, ("s1", "s2"): FAST}
    assert worst_connected_server(make_cluster(2, 2, 2, 2, links=links)) == 0
    assert worst_connected_server(make_cluster(2, 2, 2, 2, links={**links, ("s0", "s3"): (1e3, 0.0)})) == 2


def test_no_server_is_worst_connected_where_slow_links_are_common() -> None:
    assert worst_connected_server(make_cluster(1, 1, 1)) is None
    assert worst_connected_server(make_cluster(1, 1, links={("s0", "s1"): SLOW})) is None
    racks = {("s0", "s1"): FAST, ("s2", "s3"): FAST}
    assert worst_connected_server(make_cluster(1, 1, 1, 1, links=racks)) is None
