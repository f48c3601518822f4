"""Rounds in turn, medians and shares: hand-worked numbers and properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.measure import LEAST_ROUNDS, choose_starts, measure_in_turn, relative_spread, share_out


def test_probes_run_in_turn_and_the_first_round_is_dropped() -> None:
    numbers = itertools.count()
    calls: list[str] = []

    def probe(name: str, figures: int) -> np.ndarray:
        calls.append(name)
        return np.full(figures, float(next(numbers)))

    ended: list[int] = []
    first, second = measure_in_turn(
        [lambda: probe("a", 1), lambda: probe("b", 2)], 3, 60.0, lambda: ended.append(len(calls))
    )
    assert calls == ["a", "b"] * 4
    assert first.tolist() == [[2.0], [4.0], [6.0]]
    assert second.tolist() == [[3.0, 3.0], [5.0, 5.0], [7.0, 7.0]]
    assert ended == [4, 6, 8]


@pytest.mark.parametrize(("repeats", "rounds"), [(1, 1), (2, 2), (50, LEAST_ROUNDS)])
def test_no_budget_still_buys_the_least_rounds(repeats: int, rounds: int) -> None:
    (found,) = measure_in_turn([lambda: np.zeros(1)], repeats, 0.0)
    assert found.shape == (rounds, 1)


def test_the_spread_is_that_of_the_sums() -> None:
    # sums 10, 12, 8, 10, 40: median 10, distances 0, 2, 2, 0, 30, their median 2
    rounds = np.array([[4.0, 6.0], [6.0, 6.0], [1.0, 7.0], [5.0, 5.0], [20.0, 20.0]])
    assert relative_spread(rounds) == pytest.approx(0.2)
    assert relative_spread(np.zeros((3, 2))) == 0


def test_seconds_are_shared_by_weight_and_alike_without_any() -> None:
    shared = share_out(np.array([6.0, 4.0]), [0, 3, 5], np.array([1.0, 0.0, 2.0, 0.0, 0.0]))
    assert shared.tolist() == [2.0, 0.0, 4.0, 2.0, 2.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.data())
def test_shares_add_up(weights: list[float], data: st.DataObject) -> None:
    starts = data.draw(st.sets(st.integers(1, len(weights))).map(lambda s: sorted(s - {len(weights)})))
    bounds = [0, *starts, len(weights)]
    seconds = np.array(data.draw(st.lists(st.floats(0, 10), min_size=len(bounds) - 1, max_size=len(bounds) - 1)))
    shared = share_out(seconds, bounds, np.array(weights))
    for k, (first, end) in enumerate(itertools.pairwise(bounds)):
        assert shared[first:end].sum() == pytest.approx(seconds[k])
    assert (shared >= 0).all()


def test_starts_even_out_the_weights() -> None:
    weights = np.array([1.0, 1.0, 4.0, 2.0, 2.0, 2.0])  # 12 in all; before each: 0 1 2 6 8 10
    assert choose_starts(weights, range(1, 6), 2) == [3]
    assert choose_starts(weights, range(1, 6), 3) == [2, 4]  # 4 is as near to 2 as to 6: the first
    assert choose_starts(weights, (1, 5), 2) == [5]  # 6 is nearer to 10 than to 1
    assert choose_starts(weights, range(1, 6), 1) == []
    assert choose_starts(weights, (), 4) == []


@given(
    st.lists(st.floats(0, 1e3), min_size=2, max_size=30),
    st.integers(1, 40),
    st.sets(st.integers(1, 29)),
)
def test_starts_are_allowed_ascending_and_few(weights: list[float], count: int, places: set[int]) -> None:
    positions = sorted(place for place in places if place < len(weights))
    starts = choose_starts(np.array(weights), positions, count)
    assert set(starts) <= set(positions)
    assert starts == sorted(set(starts))
    assert len(starts) < count or not starts
