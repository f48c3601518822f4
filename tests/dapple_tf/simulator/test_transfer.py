"""Costs of transfers and AllReduce: by hand, and against a sum over all pairs of intervals."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, ring_seconds, transfer_cost

INSIDE, BETWEEN = Link(4, 0.5), Link(1, 1)


def make(servers: int = 3, **links: Link) -> Cluster:
    """Servers a, b, c of four devices; ``ab`` is the link of a and b."""
    names = "abc"[:servers]
    own = {(pair[0], pair[1]): link for pair, link in links.items()}
    return Cluster(tuple(Server(name, 4) for name in names), 1, INSIDE, BETWEEN, own)


def cost(senders: str, receivers: str, cluster: Cluster | None = None) -> tuple[float, float]:
    """Latency and seconds a byte between replicas on these servers, by name."""
    numbers = [["abc".index(name) for name in names] for names in (senders, receivers)]
    return transfer_cost(*numbers, link_tables(cluster or make()))


@pytest.mark.parametrize(
    ("senders", "receivers", "latency", "rate"),
    [
        # As many replicas on both sides exchange one to one.
        ("a", "a", 0.5, 1 / 4),
        ("aa", "aa", 0.5, 1 / 2 / 4),
        ("ab", "ab", 0.5, 1 / 2 / 4),
        ("a", "b", 1, 1),
        ("aa", "bb", 1, 1),  # both halves leave the same server
        ("ab", "ba", 1, 1 / 2),  # one half leaves each
        # Split and concat on one server: the one device sends or receives it all.
        ("aa", "a", 0.5, 1 / 4),
        ("a", "aa", 0.5, 1 / 4),
        ("aaa", "aa", 0.5, 1 / 2 / 4),
        # 3:2: replica 1 of 3 has samples 1/3 to 2/3, half for each receiver: 1/2 leaves a, 1/2 stays.
        ("aaa", "ab", 1, 1 / 2),
        ("aba", "aa", 1, 1 / 3),
        # The interface that has most to do decides, leaving or entering.
        ("ab", "cc", 1, 1),
        ("aa", "bc", 1, 1),
        ("abc", "a", 1, 2 / 3),
        ("a", "abc", 1, 2 / 3),
        ("aaaab", "aaaab", 0.5, 1 / 5 / 4),
    ],
)
def test_transfer_costs_by_hand(senders: str, receivers: str, latency: float, rate: float) -> None:
    assert cost(senders, receivers) == pytest.approx((latency, rate), rel=1e-12)


def test_links_inside_a_server_can_be_the_slowest() -> None:
    cluster = Cluster((Server("a", 2), Server("b", 2)), 1, Link(1, 0), Link(10, 2))
    # The first half stays, at 1 byte a second; the second leaves at 10.
    assert cost("aa", "ab", cluster) == (2, 1 / 2)


def test_the_own_link_of_a_pair_carries_only_the_bytes_of_the_pair() -> None:
    cluster = make(ab=Link(8, 0.25))
    assert cost("a", "b", cluster) == (0.25, 1 / 8)
    assert cost("b", "a", cluster) == (0.25, 1 / 8)
    assert cost("aa", "bb", cluster) == (0.25, 1 / 8)
    assert cost("ab", "ba", cluster) == (0.25, 1 / 2 / 8)
    assert cost("aa", "bc", cluster) == (1, 1 / 2), "half leaves by the interface, which is slower"
    assert cost("a", "c", cluster) == (1, 1)


def test_links_inside_servers_can_differ() -> None:
    cluster = make(aa=Link(16, 0.125))
    assert cost("a", "a", cluster) == (0.125, 1 / 16)
    assert cost("b", "b", cluster) == (0.5, 1 / 4)


@pytest.mark.parametrize(
    ("homes", "latency", "rate"),
    [
        ("a", 0, 0),
        ("aa", 2 * 0.5, 2 * 1 / 2 / 4),
        ("aaa", 4 * 0.5, 2 * 2 / 3 / 4),
        ("aabb", 6 * 1, 2 * 3 / 4 / 1),
        ("abc", 4 * 1, 2 * 2 / 3 / 1),
    ],
)
def test_allreduce_is_as_slow_as_its_slowest_link(homes: str, latency: float, rate: float) -> None:
    numbers = ["abc".index(name) for name in homes]
    assert allreduce_cost(numbers, link_tables(make())) == pytest.approx((latency, rate), rel=1e-12)


def test_allreduce_over_own_links_of_pairs() -> None:
    tables = link_tables(make(ab=Link(8, 0), cc=Link(0.5, 0)))
    assert allreduce_cost([0, 1], tables) == (0, 1 / 8)
    assert allreduce_cost([0, 0, 1], tables) == pytest.approx((4 * 0.5, 4 / 3 / 4)), "the links of a have latency"
    assert allreduce_cost([0, 1, 2], tables) == pytest.approx((4 * 1, 4 / 3))
    assert allreduce_cost([2, 2], tables) == (0, 2)


def test_the_latency_of_a_ring_is_that_of_any_of_its_links_not_of_the_slowest() -> None:
    tables = link_tables(make(ab=Link(2, 0.125)))
    assert allreduce_cost([0, 0, 1], tables) == pytest.approx((4 * 0.5, 4 / 3 / 2))


def test_a_ring_of_no_bytes_is_not_started() -> None:
    assert (ring_seconds(3, 2, 0), ring_seconds(3, 2, 5)) == (0, 13)


homes = st.lists(st.integers(0, 2), min_size=1, max_size=7)
bandwidths = st.integers(1, 20)


@given(homes, homes, bandwidths, bandwidths, st.one_of(st.none(), bandwidths))
def test_transfer_costs_agree_with_a_sum_over_all_pairs_of_intervals(
    senders: list[int], receivers: list[int], inside: int, between: int, own: int | None
) -> None:
    links = {("a", "b"): Link(own, 3)} if own else {}
    cluster = Cluster(tuple(Server(name, 7) for name in "abc"), 1, Link(inside, 1), Link(between, 2), links)
    n, m, zero = len(senders), len(receivers), Fraction(0)
    load: dict[tuple[object, ...], Fraction] = {}
    latencies = []
    for (i, a), (j, b) in product(enumerate(senders), enumerate(receivers)):
        share = min(Fraction(i + 1, n), Fraction(j + 1, m)) - max(Fraction(i, n), Fraction(j, m))
        if share <= 0:
            continue
        if a == b:
            keys, speed, latency = [("sends", i), ("receives", j)], inside, 1
        elif own and {a, b} == {0, 1}:
            keys, speed, latency = [("link", a, b)], own, 3
        else:
            keys, speed, latency = [("leaves", a), ("enters", b)], between, 2
        latencies.append(latency)
        for key in keys:
            load[key] = load.get(key, zero) + share / speed
    found = transfer_cost(senders, receivers, link_tables(cluster))
    assert found == pytest.approx((max(latencies), float(max(load.values()))), rel=1e-12)
    assert transfer_cost(receivers, senders, link_tables(cluster)) == pytest.approx(found, rel=1e-12)


def test_tables_are_of_floats_whatever_numbers_the_cluster_has() -> None:
    """For other types all compiled code of the planners is compiled again, which takes more than a minute."""
    link = Link(4, 1)
    tables = link_tables(Cluster((Server("a", 4), Server("b", 4)), 1, link, link, {("a", "b"): link}))
    assert {np.asarray(entry).dtype for entry in tables[:-1]} == {np.dtype(np.float64)}
    assert [type(entry) for entry in (tables.interface, tables.interface_latency, tables.has_own)] == [
        float,
        float,
        bool,
    ]
