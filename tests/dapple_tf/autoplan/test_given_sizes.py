"""Micro-batches of given sizes: samples and shares as the samples of a first batch, and in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.autoplan.batch_fit import check_given_sizes, count_samples
from dapple_tf.autoplan.options import Options
from dapple_tf.errors import PlanError
from dapple_tf.profiler.cluster import config
from tests.equality.small_models import chain, data, sgd, weights


@pytest.mark.parametrize(
    ("sizes", "samples", "found"),
    [
        ([2, 2, 4], 8, (2, 2, 4)),
        (list(np.array([1, 7])), 8, (1, 7)),
        ([0.25, 0.25, 0.5], 8, (2, 2, 4)),
        ([1 / 3] * 3, 8, (3, 2, 3)),  # cut at 2.67 and 5.33
        (list(np.array([0.125, 0.875])), 8, (1, 7)),
        ([1.0], 5, (5,)),
    ],
)
def test_samples_of_each_micro_batch(sizes: Sequence[Any], samples: int, found: tuple[int, ...]) -> None:
    check_given_sizes(sizes)
    counted = count_samples(sizes, samples)
    assert counted == found
    assert {type(size) for size in counted} == {int}


@pytest.mark.parametrize(
    ("sizes", "samples", "message"),
    [
        (
            [2, 2, 4],
            9,
            r"micro_batches=\[2, 2, 4\] add up to 8 samples, but the first batch has 9: give sizes that add",
        ),
        ([0.9, 0.1], 4, r"micro_batches=\[0.9, 0.1\]: share 0.1 of 4 samples is no sample for micro-batch 1: use larg"),
    ],
)
def test_sizes_that_do_not_fit_the_first_batch(sizes: Sequence[Any], samples: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        count_samples(sizes, samples)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(100, 200))
def test_shares_are_rounded_by_less_than_a_sample(weights: list[int], samples: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    check_given_sizes(shares)
    found = count_samples(shares, samples)
    assert sum(found) == samples
    assert all(abs(size - share * samples) <= 1 for size, share in zip(found, shares, strict=True))


def test_equal_sizes_are_no_sizes() -> None:
    assert Options(micro_batches=[2, 2]).sizes(4) == Options(micro_batches=[0.5, 0.5]).sizes(4) == ()
    assert Options(micro_batches=[0.5, 0.5]).sizes(5) == (2, 3)
    assert Options(micro_batches=3).sizes(4) == ()


def test_a_plan_has_the_sizes_of_the_first_batch() -> None:
    step = dapple.pipeline(
        chain(weights(3)), optimizer=sgd(), stages=2, replicas=[1, 2], micro_batches=[0.25, 0.75], example_batch=data(9)
    )
    plan = step.plan
    assert (plan.micro_batch_sizes, plan.micro_batches, plan.micro_batch_size) == ((2, 7), 2, 7)
    assert "sizes=[2, 7]" in step.text
    assert "2 micro-batches of 2 and 7 samples" in str(step.report)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([2, 2, 4], "add up to 8 samples, but the first batch has 9"),
        ([0.1, 0.9], "micro-batch 0 has 1 sample, too few for 2 replicas: make it larger"),
    ],
)
def test_sizes_are_refused_before_the_model_is_traced_or_cut(sizes: list[float], message: str) -> None:
    traced: list[bool] = []
    plain = chain(weights(3))

    def loss(x: Any, y: Any) -> Any:
        traced.append(True)
        return plain(x, y)

    step = dapple.pipeline(loss, optimizer=sgd(), stages=2, replicas=[2, 1], micro_batches=sizes)
    with pytest.raises(PlanError, match=message):
        step(*data(9))
    assert not traced


def test_a_schedule_is_chosen_for_given_sizes_on_a_cluster() -> None:
    """The profile is taken at the largest size, and the step that is predicted has all of them."""
    step = dapple.pipeline(
        chain(weights(4)),
        optimizer=sgd(),
        stages=2,
        micro_batches=[1, 2, 5],
        cluster=config("c", 2),
        example_batch=data(8),
    )
    plan = step.plan
    assert (plan.global_batch_size, plan.micro_batch_size, plan.micro_batch_sizes) == (8, 5, (1, 2, 5))
    assert step.choice.micro_batches == 3
    assert plan.predicted is not None
    np.testing.assert_allclose(step(*data(8)), chain(weights(4))(*data(8)), rtol=1e-12)
