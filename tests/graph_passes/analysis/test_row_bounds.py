"""Rows of micro-batches and replicas: each sample once, in order, and none without a sample where there are enough."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from graph_passes.analysis.row_bounds import fit_micro_batches, micro_batch_bounds, replica_bounds, share_bounds


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
