"""Balanced stages: by hand, and against the plain Python of ``dapple_tf.graph_passes.passes.partition.balance``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.passes.partition import balance
from dapple_tf.planner.search.balanced_cuts import even_starts, even_sums


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


@pytest.mark.parametrize(
    ("costs", "worker_of", "starts"),
    [
        ([1, 1, 1, 1], [0, 1, 0, 1], [0, 1, 2, 3]),
        ([1] * 8, [0, 1, 0, 1], [0, 2, 4, 6]),
        # Worker 1, whose last stage has 5, gets little before: 1 + 5, and worker 0 2 + 3.
        ([1, 1, 1, 1, 1, 1, 5], [0, 1, 0, 1], [0, 2, 3, 6]),
        ([5, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0], [0, 1, 4, 6]),
    ],
)
def test_the_stages_of_each_worker_together_are_balanced(
    costs: list[float], worker_of: list[int], starts: list[int]
) -> None:
    found = cut_evenly(costs, worker_of)
    loads = [worker_loads(costs, worker_of, cut) for cut in (found, starts)]
    assert max(loads[0]) <= max(loads[1])


@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8), st.data())
def test_stages_of_one_worker_each_have_the_least_sum_of_squares(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    bytes_of = data.draw(st.lists(st.integers(0, 9).map(float), min_size=len(costs), max_size=len(costs)))
    factors = data.draw(st.lists(st.integers(0, 4).map(float), min_size=stages, max_size=stages))

    def squares(starts: Sequence[int]) -> float:
        pairs = itertools.pairwise([*starts, len(costs)])
        return sum((sum(costs[a:b]) + f * sum(bytes_of[a:b])) ** 2 for (a, b), f in zip(pairs, factors, strict=True))

    found = even_sums(*map(np.array, (costs, bytes_of, factors, list(range(stages)))), 1).tolist()
    others = itertools.combinations(range(1, len(costs)), stages - 1)
    assert squares(found) == min(squares((0, *starts)) for starts in others)


@given(st.lists(st.one_of(st.integers(0, 9), st.floats(0, 10)), min_size=1, max_size=12), st.data())
def test_every_stage_of_a_worker_gets_a_block(costs: list[float], data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=len(costs)))
    workers = list(dict.fromkeys(drawn))
    found = cut_evenly(costs, [workers.index(worker) for worker in drawn])
    assert found[0] == 0
    assert found == sorted(set(found))
    assert len(found) == len(drawn)


def cut_evenly(costs: Sequence[float], worker_of: Sequence[int]) -> list[int]:
    nothing = np.zeros(len(costs)), np.zeros(len(worker_of))
    return even_sums(np.array(costs, float), *nothing, np.array(worker_of), 4).tolist()


def worker_loads(costs: Sequence[float], worker_of: Sequence[int], starts: Sequence[int]) -> list[float]:
    loads = [0.0] * (max(worker_of) + 1)
    for worker, (first, end) in zip(worker_of, itertools.pairwise([*starts, len(costs)]), strict=True):
        loads[worker] += sum(costs[first:end])
    return loads
