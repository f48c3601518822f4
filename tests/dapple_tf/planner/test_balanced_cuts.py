"""Balanced stages: by hand, and against the plain Python of ``graph_passes.passes.partition.balance``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.planner.balanced_cuts import even_starts
from graph_passes.passes.partition import balance


def starts_of(costs: Sequence[float], stages: int) -> list[int]:
    return even_starts(np.array(costs, float), stages).tolist()


def largest(costs: Sequence[float], starts: Sequence[int]) -> float:
    return max(sum(costs[first:end]) for first, end in itertools.pairwise([*starts, len(costs)]))


@pytest.mark.parametrize(
    ("costs", "stages", "starts"),
    [
        ([1, 1, 1, 1], 1, [0]),
        ([1, 1, 1, 1], 2, [0, 2]),
        ([1, 1, 1, 1], 4, [0, 1, 2, 3]),
        ([5, 1, 1, 1], 2, [0, 1]),
        ([2, 3, 4, 5, 6], 3, [0, 3, 4]),  # 9, 5, 6
        ([4, 1, 1, 1, 1], 3, [0, 1, 4]),  # 4, 3, 1: of equal maxima the last stages are the smallest
    ],
)
def test_the_largest_stage_is_as_small_as_possible(costs: list[float], stages: int, starts: list[int]) -> None:
    assert starts_of(costs, stages) == starts


@given(st.lists(st.one_of(st.integers(0, 9), st.floats(0, 10)), min_size=1, max_size=12), st.data())
def test_the_largest_stage_equals_that_of_balance(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    starts = starts_of(costs, stages)
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert len(starts) == stages
    positions = range(1, len(costs))
    wanted = [0, *balance(costs, positions, [0.0] * len(positions), stages)]
    assert largest(costs, starts) == pytest.approx(largest(costs, wanted), rel=1e-12, abs=1e-12)
