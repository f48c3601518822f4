"""Formulas 1 to 3 by hand, and against the printed formulas in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.planner.search.dapple import pipeline_latency, pivot_stage
from tests.dapple_tf.planner.builders import figures
from tests.dapple_tf.planner.exhaustive import latency


def seconds(forward: list[float], backward: list[float], allreduce: list[float], micro_batches: int) -> float:
    return pipeline_latency(np.array(forward), np.array(backward), np.array(allreduce), micro_batches)


def pivot(both: list[float], micro_batches: int) -> int:
    half = np.array(both) / 2
    return pivot_stage(half, half, micro_batches)


def test_one_stage_runs_all_micro_batches_and_then_allreduce() -> None:
    assert seconds([2], [3], [4], 5) == 5 * (2 + 3) + 4


def test_the_last_stage_is_pivot_if_no_other_is_longer() -> None:
    forward, backward = [1, 1, 2], [2, 1, 4]
    assert pivot_stage(np.array(forward, float), np.array(backward, float), 4) == 2
    # Tw = 1 + 1 + 2, Ts = 3 x (2 + 4), Te = 2 + 1 + 4: the last backward goes back to the first stage.
    assert seconds(forward, backward, [0, 0, 0], 4) == 4 + 18 + 7
    assert seconds(forward, backward, [10, 0, 1], 4) == 4 + 18 + (10 + 7)
    assert seconds(forward, backward, [0, 0, 5], 4) == 4 + 18 + (5 + 4)


def test_the_first_stage_is_pivot_and_a_later_allreduce_ends_after_it() -> None:
    forward, backward = [5, 0.5, 1], [5, 0.5, 1]
    assert pivot_stage(np.array(forward), np.array(backward), 3) == 0
    assert seconds(forward, backward, [0, 0, 0], 3) == 5 + 20 + 5
    assert seconds(forward, backward, [2, 0, 0], 3) == 5 + 20 + (2 + 5)
    # The last stage began its AllReduce before the backwards of all three: 20 - (5 + 0.5 + 1).
    assert seconds(forward, backward, [0, 0, 20], 3) == 5 + 20 + 13.5


def test_a_middle_stage_is_pivot() -> None:
    forward, backward = [1, 0, 4, 0, 1], [1, 0, 4, 0, 1]
    assert pivot_stage(np.array(forward, float), np.array(backward, float), 2) == 2
    assert seconds(forward, backward, [0] * 5, 2) == (1 + 4) + 8 + (4 + 1)
    assert seconds(forward, backward, [0, 0, 0, 0, 12], 2) == 5 + 8 + (12 - 5)


def test_a_network_can_be_pivot() -> None:
    assert pivot([2, 10, 2], 3) == 1
    assert seconds([1, 5, 1], [1, 5, 1], [0, 0, 0], 3) == (1 + 5) + 20 + (5 + 1)


def test_with_one_micro_batch_the_latency_is_all_forwards_and_backwards() -> None:
    assert seconds([5, 0.5, 1], [5, 0.5, 1], [3, 0, 2], 1) == 6.5 + max(3 + 6.5, 2 + 1)


def test_a_stage_takes_over_only_if_longer_than_the_pivot_and_all_between() -> None:
    assert pivot([6, 4, 5], 2) == 2
    assert pivot([6, 0, 5], 2) == 0
    assert pivot([9, 4, 5], 2) == 2, "of equals the later stays"
    assert pivot([9.5, 4, 5], 2) == 0


def test_of_stages_that_are_equal_up_to_rounding_the_last_is_pivot() -> None:
    assert 0.1 + 0.2 > 0.3
    assert pivot_stage(np.array([0.1 + 0.2, 0, 0.3]), np.zeros(3), 2) == 2


stages = st.tuples(figures(10), figures(10), figures(30))


@given(st.lists(stages, min_size=1, max_size=9), st.integers(1, 20))
def test_agrees_with_the_formulas_in_plain_python(columns: list[tuple[float, ...]], micro_batches: int) -> None:
    forward, backward, allreduce = (list(row) for row in zip(*columns, strict=True))
    expected = latency(forward, backward, allreduce, micro_batches)
    assert seconds(forward, backward, allreduce, micro_batches) == pytest.approx(expected, rel=1e-12, abs=1e-12)
