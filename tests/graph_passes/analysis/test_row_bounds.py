"""Rows of micro-batches and replicas: each sample once, in order, and none without a sample where there are enough."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.analysis.row_bounds import (
    fit_micro_batches,
    fit_sizes,
    least_rows,
    micro_batch_bounds,
    micro_batch_sizes,
    replica_bounds,
    share_bounds,
    whole_shares,
)


def test_ten_samples_in_four_micro_batches() -> None:
    assert [micro_batch_bounds(10, m, 4) for m in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_seven_rows_between_three_replicas() -> None:
    assert [share_bounds(10, 17, i, 3) for i in range(3)] == [(10, 12), (12, 14), (14, 17)]
    assert [replica_bounds(10, 1, 4, i, 2) for i in range(2)] == [(2, 3), (3, 5)]


@given(samples=st.integers(1, 40), micro_batches=st.integers(1, 9), replicas=st.integers(1, 5))
def test_every_replica_has_a_sample_of_every_fitted_micro_batch(
    samples: int, micro_batches: int, replicas: int
) -> None:
    count = fit_micro_batches(samples, micro_batches, replicas)
    assert 1 <= count <= micro_batches
    pieces = [replica_bounds(samples, m, count, i, replicas) for m in range(count) for i in range(replicas)]
    assert list(itertools.chain(*(range(*piece) for piece in pieces))) == list(range(samples))
    if samples >= replicas:
        assert all(first < end for first, end in pieces)
        assert count == micro_batches or samples // (count + 1) < replicas  # no more than must be left out


def test_given_sizes_are_kept_and_other_batches_are_cut_in_their_proportion() -> None:
    sizes = (2, 2, 4)
    assert [micro_batch_bounds(8, m, 3, sizes) for m in range(3)] == [(0, 2), (2, 4), (4, 8)]
    assert [micro_batch_bounds(7, m, 3, sizes) for m in range(3)] == [(0, 1), (1, 3), (3, 7)]
    assert [replica_bounds(8, 2, 3, i, 3, sizes) for i in range(3)] == [(4, 5), (5, 6), (6, 8)]
    assert micro_batch_sizes(7, 3, sizes) == (1, 2, 4)
    assert micro_batch_sizes(10, 4) == (2, 3, 2, 3)


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@given(sizes=SIZES, samples=st.integers(0, 60))
def test_micro_batches_of_given_sizes_are_a_partition_in_proportion(sizes: list[int], samples: int) -> None:
    count, whole = len(sizes), sum(sizes)
    bounds = [micro_batch_bounds(samples, m, count, sizes) for m in range(count)]
    assert list(itertools.chain(*(range(*piece) for piece in bounds))) == list(range(samples))
    assert micro_batch_sizes(whole, count, sizes) == tuple(sizes)
    for (first, end), size in zip(bounds, sizes, strict=True):
        assert abs((end - first) * whole - samples * size) < whole  # less than a sample away


@given(count=st.integers(1, 9), size=st.integers(1, 5), samples=st.integers(0, 60))
def test_equal_sizes_cut_as_no_sizes_do(count: int, size: int, samples: int) -> None:
    wanted = [(samples * m // count, samples * (m + 1) // count) for m in range(count)]
    assert [micro_batch_bounds(samples, m, count, [size] * count) for m in range(count)] == wanted
    assert [micro_batch_bounds(samples, m, count) for m in range(count)] == wanted


@given(sizes=SIZES, samples=st.integers(1, 60), replicas=st.integers(1, 4))
def test_sizes_are_given_up_where_a_replica_would_get_no_sample(sizes: list[int], samples: int, replicas: int) -> None:
    count = len(sizes)
    shares = [replica_bounds(samples, m, count, i, replicas, sizes) for m in range(count) for i in range(replicas)]
    every_replica_has_one = all(first < end for first, end in shares)
    assert fit_sizes(samples, sizes, replicas) == (sizes if every_replica_has_one else ())
    assert fit_sizes(samples, (), replicas) == ()


def test_eight_rows_between_a_fast_and_a_slow_replica() -> None:
    assert [share_bounds(10, 18, i, 2, (5, 3)) for i in range(2)] == [(10, 15), (15, 18)]
    assert [replica_bounds(16, 1, 2, i, 3, (), (2, 1, 1)) for i in range(3)] == [(8, 12), (12, 14), (14, 16)]


SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)


@given(shares=SHARES, rows=st.integers(0, 60))
def test_shares_hold_every_row_once_and_in_proportion(shares: tuple[int, ...], rows: int) -> None:
    pieces = [share_bounds(100, 100 + rows, i, len(shares), shares) for i in range(len(shares))]
    assert [piece[0] for piece in pieces] == [100, *(piece[1] for piece in pieces[:-1])]
    assert pieces[-1][1] == 100 + rows
    for share, (first, end) in zip(shares, pieces, strict=True):
        assert abs(end - first - Fraction(rows * share, sum(shares))) < 1


@given(shares=SHARES, rows=st.integers(1, 60))
def test_every_replica_has_a_row_of_the_least_rows_and_more(shares: tuple[int, ...], rows: int) -> None:
    pieces = [share_bounds(0, rows, i, len(shares), shares) for i in range(len(shares))]
    if rows >= least_rows(len(shares), shares):
        assert all(first < end for first, end in pieces)
    assert least_rows(len(shares)) == least_rows(len(shares), (1,) * len(shares)) == len(shares)


@pytest.mark.parametrize(
    ("shares", "whole"),
    [
        ((), ()),
        ((3.0,), ()),
        ((2.0, 2.0), ()),
        ((10.0, 6.0), (5, 3)),
        ((0.75, 0.25), (3, 1)),
        ((0.5, 0.25, 0.25), (2, 1, 1)),
        ((1.0, 1 / 3), (3, 1)),
        ((2.0**40, 1.0), (10**6, 1)),
        ((1.0, 1.0 + 1e-12), ()),
    ],
)
def test_shares_become_whole_numbers(shares: tuple[float, ...], whole: tuple[int, ...]) -> None:
    assert whole_shares(shares) == whole
