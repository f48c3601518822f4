"""The three policies (DAPPLE, Fig. 5) by hand, and the placements that they reach against a plain recursion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.planner.search.placement import (
    Placement,
    append_first,
    device_indices,
    find_all_placements,
    find_placements,
    fresh_first,
    scatter_first,
)
from tests.dapple_tf.planner.builders import make_cluster
from tests.dapple_tf.planner.exhaustive import pick_devices

Used = tuple[int, ...]


@pytest.mark.parametrize(
    ("sizes", "used", "wanted", "fresh", "append", "scatter"),
    [
        # All fresh: one server after the other, or a share of each.
        ((4, 4, 4), (0, 0, 0), 4, (4, 0, 0), (4, 0, 0), (2, 1, 1)),
        ((4, 4, 4), (0, 0, 0), 6, (4, 2, 0), (4, 2, 0), (2, 2, 2)),
        # One in use.
        ((4, 4), (2, 0), 2, (2, 2), (4, 0), (4, 0)),
        ((4, 4), (2, 0), 3, (2, 3), (4, 1), (4, 1)),
        # Two in use: only Scatter First takes from both at once.
        ((4, 4, 4), (1, 1, 0), 3, (1, 1, 3), (4, 1, 0), (3, 2, 0)),
        ((4, 4, 4), (2, 1, 0), 4, (2, 1, 4), (4, 3, 0), (4, 3, 0)),
        # Where one kind of server does not have enough the other kind gives the rest.
        ((4, 2), (2, 0), 3, (3, 2), (4, 1), (4, 1)),
        ((4, 4, 4), (3, 0, 0), 4, (3, 4, 0), (4, 3, 0), (4, 2, 1)),
        ((1, 4, 2), (0, 0, 0), 6, (1, 4, 1), (1, 4, 1), (1, 3, 2)),
        ((2, 2), (2, 0), 2, (2, 2), (2, 2), (2, 2)),
    ],
)
def test_the_three_policies_by_hand(
    sizes: Used, used: Used, wanted: int, fresh: Used, append: Used, scatter: Used
) -> None:
    assert fresh_first(used, sizes, wanted) == fresh
    assert append_first(used, sizes, wanted) == append
    assert scatter_first(used, sizes, wanted) == scatter


def count(sizes: Used, devices: frozenset[int] | set[int]) -> Used:
    """Return how many of these devices are on each server."""
    homes = make_cluster(*sizes).homes
    return tuple(sum(homes[device] == server for device in devices) for server in range(len(sizes)))


def walk(sizes: Used, counts: set[int]) -> dict[Used, set[Used]]:
    """Return the states of use that can follow each, by the slow placement of tests.dapple_tf.planner.exhaustive."""
    cluster, found = make_cluster(*sizes), dict[Used, set[Used]]()

    def visit(used: frozenset[int]) -> None:
        left = cluster.devices - len(used)
        if count(sizes, used) in found or not left:
            return
        following = {
            used | set(pick_devices(cluster, used, wanted, policy))
            for wanted in (counts | {left})
            if wanted <= left
            for policy in ("fresh", "append", "scatter")
        }
        found[count(sizes, used)] = {count(sizes, after) for after in following}
        for after in following:
            visit(after)

    visit(frozenset())
    return found


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) <= 9),
    st.sets(st.integers(1, 6), min_size=1),
)
def test_every_placement_that_the_policies_reach_is_found(sizes: list[int], counts: set[int]) -> None:
    expected = walk(tuple(sizes), counts)
    placements = find_placements(sizes, sorted(counts))
    assert placements.complete
    pairs = [(item.before, item.after) for item in placements.items]
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == {(before, after) for before, found in expected.items() for after in found}
    starts = [item.after for item in placements.items] + [(0,) * len(sizes)]
    for start, follow in zip(starts, placements.successors, strict=True):
        assert {pairs[index] for index in follow} == {(start, after) for after in expected.get(start, ())}
    for item in placements.items:
        assert item.devices_left == sum(sizes) - sum(item.after)
        assert item.replicas == sum(item.after) - sum(item.before)


def test_beyond_the_limit_of_placements_a_stage_takes_all_devices_left() -> None:
    whole = find_placements((2, 2, 2), range(1, 7))
    some = find_placements((2, 2, 2), range(1, 7), most=len(whole.successors[-1]) + 1)
    assert not some.complete
    assert some.successors[-1] == whole.successors[-1], "any first stage is there"
    assert {(i.before, i.after) for i in some.items} < {(i.before, i.after) for i in whole.items}
    assert all(item.devices_left == 0 for item in some.items if sum(item.before) > 1)
    ends = [item for item, follow in zip(some.items, some.successors, strict=False) if not follow]
    assert {item.devices_left for item in ends} == {0}, "every chain can be completed"


def test_the_last_of_a_given_number_of_stages_takes_all_devices_left() -> None:
    found = find_placements((2, 2), range(1, 5), stages=2)
    assert found.complete
    assert {item.before for item in found.items if item.devices_left} == {(0, 0)}
    assert {(item.before, item.after) for item in found.items if sum(item.before) == 1} == {((1, 0), (2, 2))}


def test_append_first_alone_places_stages_in_order() -> None:
    found = find_placements((2, 2), [2], policies=[append_first])
    assert [(item.before, item.after) for item in found.items] == [
        ((0, 0), (2, 0)),
        ((0, 0), (2, 2)),
        ((2, 0), (2, 2)),
    ]


def test_device_indices_follow_the_order_of_servers() -> None:
    placement = Placement(before=(1, 0, 2), after=(3, 2, 2), devices_left=3)
    assert placement.replicas == 4
    assert placement.servers() == (0, 0, 1, 1)
    assert device_indices(make_cluster(3, 4, 3), placement, (0, 1, 2)) == (1, 2, 3, 4)
    # The entries stand for servers 1, 0 and 2, whose devices begin at 3, 0 and 7.
    assert device_indices(make_cluster(3, 4, 3), placement, (1, 0, 2)) == (0, 1, 4, 5)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), st.integers(1, 120))
def test_all_placements_are_found_unless_they_are_too_many(sizes: Used, most: int) -> None:
    found = find_placements(sizes, range(1, sum(sizes) + 1), most=most)
    assert find_all_placements(sizes, most) == (found if found.complete else None)
