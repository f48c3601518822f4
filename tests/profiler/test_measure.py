"""Interleaved rounds, medians, and seconds split by weight: hand-worked numbers and properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.profiler.measure import (
    LEAST_ROUNDS,
    Clock,
    choose_even_starts,
    measure_interleaved,
    relative_spread,
    split_by_weight,
)


class Machine:
    """A clock by which a probe takes one second, of which this process works the given shares in turn."""

    def __init__(self, *shares: float) -> None:
        self.shares = itertools.cycle(shares)
        self.wall = self.work = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.work)

    def probe(self, *figures: float) -> np.ndarray:
        self.wall += 1
        self.work += next(self.shares)
        return np.array(figures or [self.wall])


def test_probes_are_interleaved_and_the_first_round_is_dropped() -> None:
    machine, ended = Machine(1.0), []
    first, second = measure_interleaved(
        [machine.probe, lambda: machine.probe(5, machine.wall)],
        3,
        60.0,
        lambda: ended.append(machine.wall),
        clock=machine.clock,
    )
    assert first.tolist() == [[3.0], [5.0], [7.0]]
    assert second.tolist() == [[5.0, 3.0], [5.0, 5.0], [5.0, 7.0]]
    assert ended == [4, 6, 8]


@pytest.mark.parametrize(
    ("repeats", "budget", "rounds"), [(4, 60, 4), (50, 4.5, 5), (50, 0, LEAST_ROUNDS), (2, 0, 2), (1, 60, 1)]
)
def test_rounds_end_with_the_repeats_or_the_budget(repeats: int, budget: float, rounds: int) -> None:
    machine = Machine(1.0)
    (found,) = measure_interleaved([machine.probe], repeats, budget, clock=machine.clock)
    assert found.shape == (rounds, 1)


@pytest.mark.parametrize(
    ("full_share", "expected"),
    [
        (1.0, [[8.0, 4.0], [4.0, 2.0], [2.0, 1.0]]),  # of ten seconds it worked 0.8, 0.4, 0.2
        (None, [[10.0, 5.0], [5.0, 2.5], [2.5, 1.25]]),  # half and a quarter of the best
        (0.4, [[10.0, 5.0], [10.0, 5.0], [5.0, 2.5]]),  # never longer than measured
        (0.0, [[10.0, 5.0], [10.0, 5.0], [10.0, 5.0]]),
    ],
)
def test_processor_time_of_other_processes_is_subtracted(full_share: float | None, expected: list[list[float]]) -> None:
    machine = Machine(0.1, 0.8, 0.4, 0.2)  # the first while warming up
    (found,) = measure_interleaved([lambda: machine.probe(10, 5)], 3, 60.0, full_share=full_share, clock=machine.clock)
    np.testing.assert_allclose(found, expected)


def test_each_probe_is_compared_with_its_own_best_round() -> None:
    machine = Machine(1.0, 0.5)
    first, second = measure_interleaved([machine.probe, machine.probe], 3, 60.0, clock=machine.clock)
    assert first[:, 0] == pytest.approx([3, 5, 7])
    assert second[:, 0] == pytest.approx([4, 6, 8])


def test_a_clock_that_does_not_advance_gives_no_time() -> None:
    (found,) = measure_interleaved([lambda: np.ones(1)], 3, 60.0, clock=Clock(lambda: 0.0, lambda: 0.0))
    assert found.tolist() == [[0.0]] * 3


def test_the_spread_is_that_of_the_rounds_sums() -> None:
    # sums 10, 12, 8, 10, 40: median 10, distances 0, 2, 2, 0, 30, their median 2
    rounds = np.array([[4.0, 6.0], [6.0, 6.0], [1.0, 7.0], [5.0, 5.0], [20.0, 20.0]])
    assert relative_spread(rounds) == pytest.approx(0.2)
    assert relative_spread(np.zeros((3, 2))) == 0


def test_seconds_are_split_by_weight_and_equally_without_weights() -> None:
    shared = split_by_weight(np.array([6.0, 4.0]), [0, 3, 5], np.array([1.0, 0.0, 2.0, 0.0, 0.0]))
    assert shared.tolist() == [2.0, 0.0, 4.0, 2.0, 2.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.data())
def test_split_seconds_have_the_same_sum(weights: list[float], data: st.DataObject) -> None:
    starts = data.draw(st.sets(st.integers(1, len(weights))).map(lambda s: sorted(s - {len(weights)})))
    bounds = [0, *starts, len(weights)]
    seconds = np.array(data.draw(st.lists(st.floats(0, 10), min_size=len(bounds) - 1, max_size=len(bounds) - 1)))
    shared = split_by_weight(seconds, bounds, np.array(weights))
    for k, (first, end) in enumerate(itertools.pairwise(bounds)):
        assert shared[first:end].sum() == pytest.approx(seconds[k])
    assert (shared >= 0).all()


def test_starts_balance_the_weights() -> None:
    weights = np.array([1.0, 1.0, 4.0, 2.0, 2.0, 2.0])  # 12 in all; before each: 0 1 2 6 8 10
    assert choose_even_starts(weights, range(1, 6), 2) == [3]
    assert choose_even_starts(weights, range(1, 6), 3) == [2, 4]  # 4 is as near to 2 as to 6: the first
    assert choose_even_starts(weights, (1, 5), 2) == [5]  # 6 is nearer to 10 than to 1
    assert choose_even_starts(weights, range(1, 6), 1) == []
    assert choose_even_starts(weights, (), 4) == []


@given(
    st.lists(st.floats(0, 1e3), min_size=2, max_size=30),
    st.integers(1, 40),
    st.sets(st.integers(1, 29)),
)
def test_starts_are_allowed_positions_ascending_and_not_too_many(
    weights: list[float], count: int, places: set[int]
) -> None:
    positions = sorted(place for place in places if place < len(weights))
    starts = choose_even_starts(np.array(weights), positions, count)
    assert set(starts) <= set(positions)
    assert starts == sorted(set(starts))
    assert len(starts) < count or not starts
