"""Micro-batches and replicas for a number of samples, and plans for smaller batches."""

from __future__ import annotations

import pytest

from dapple_tf.autoplan.batch_fit import check_batch_size, fit_plan
from dapple_tf.errors import PlanError
from tests.dapple_tf.builders import make_plan


@pytest.mark.parametrize(("size", "micro_batches", "replicas"), [(8, 8, (1, 1)), (8, 4, (2, 1)), (7, 3, (2, 2))])
def test_batches_that_are_large_enough(size: int, micro_batches: int, replicas: tuple[int, ...]) -> None:
    check_batch_size(size, micro_batches, replicas)


@pytest.mark.parametrize(
    ("size", "micro_batches", "replicas", "message"),
    [
        (8, 0, (1,), "micro_batches=0: it must be at least 1"),
        (8, 9, (1,), "micro_batches=9 is more than the 8 samples of the batch: use at most 8"),
        (8, 4, (3, 1), "a batch of 8 samples in 4 micro-batches gives some only 2 samples, too few for 3 replicas"),
    ],
)
def test_batches_that_are_too_small(size: int, micro_batches: int, replicas: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_batch_size(size, micro_batches, replicas)


@pytest.mark.parametrize(
    ("samples", "micro_batches", "devices"),
    [
        (100, 8, [(0, 1, 2), (3,)]),
        (24, 8, [(0, 1, 2), (3,)]),
        (23, 7, [(0, 1, 2), (3,)]),
        (3, 1, [(0, 1, 2), (3,)]),
        (2, 1, [(0, 1), (3,)]),
        (1, 1, [(0,), (3,)]),
    ],
)
def test_a_smaller_batch_gets_fewer_micro_batches_and_then_fewer_replicas(
    samples: int, micro_batches: int, devices: list[tuple[int, ...]]
) -> None:
    plan = make_plan((0, 1, (0, 1, 2)), (2, 4, (3,)), micro_batches=8, schedule="K=5,1")
    fitted = fit_plan(plan, samples)
    assert (fitted.micro_batches, [stage.devices for stage in fitted.stages]) == (micro_batches, devices)
    assert fitted.schedule == ("K=5,1" if micro_batches >= 5 else "K=1,1")
    assert fit_plan(plan, 24) is plan


def test_every_given_size_must_be_enough_for_the_replicas() -> None:
    check_batch_size(8, 3, (2, 1), (2, 2, 4))
    with pytest.raises(PlanError, match="micro-batch 1 has 2 samples, too few for 3 replicas: make it larger, or use"):
        check_batch_size(9, 3, (1, 3), (3, 2, 4))


@pytest.mark.parametrize(
    ("samples", "sizes", "micro_batches"),
    [
        (9, (2, 3, 4), 3),
        (90, (2, 3, 4), 3),
        (10, (2, 3, 4), 3),
        (8, None, 3),  # 8 * 2 // 9 is one sample, for two replicas: three micro-batches of 2 or 3
        (5, None, 2),
        (1, None, 1),
    ],
)
def test_given_sizes_stay_in_proportion_or_become_equal(
    samples: int, sizes: tuple[int, ...] | None, micro_batches: int
) -> None:
    cut = {"global_batch_size": 9, "micro_batch_size": 4, "micro_batches": 3, "micro_batch_sizes": (2, 3, 4)}
    plan = make_plan((0, 1, (0, 1)), (2, 4, (3,)), **cut)
    fitted = fit_plan(plan, samples)
    assert (fitted.micro_batch_sizes, fitted.micro_batches) == (sizes, micro_batches)
    assert (fitted is plan) == (sizes is not None)
