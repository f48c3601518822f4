"""Training steps as users write them compute what one device computes: results, variables, slots, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from tests.equality.training_steps import BATCH, CASES, batches_of, values_of

pytestmark = pytest.mark.usefixtures("float64")


def assert_equal(found: Any, wanted: Any) -> None:
    tf.nest.assert_same_structure(found, wanted, expand_composites=True)
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True)
    for ours, theirs in pairs:
        if theirs is not None:
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def assert_trains_as_one_device(make: Any, batches: Iterable[Sequence[Any]], **options: Any) -> Any:
    """Pipelined, the step that ``make`` returns gives what it gives on one device; return the pipelined step."""
    (plain, wanted), (function, found) = make(), make()
    whole = plain if hasattr(plain, "get_concrete_function") else tf.function(plain)
    step = dapple.train_step(function, **options)
    for batch in batches:
        assert_equal(step(*batch), whole(*batch))
    step.gather()
    for ours, theirs in zip(values_of(found), values_of(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    return step


def check(name: str, **options: Any) -> None:
    assert_trains_as_one_device(CASES[name], batches_of(name), **options)


@pytest.mark.parametrize("name", CASES)
def test_one_stage_and_one_micro_batch_train_as_one_device(name: str) -> None:
    check(name, stages=1, micro_batches=1)


@pytest.mark.parametrize("name", CASES)
def test_three_stages_and_a_micro_batch_for_each_sample_train_as_one_device(name: str) -> None:
    check(name, stages=3, micro_batches=BATCH)


@pytest.mark.parametrize("name", CASES)
def test_replicas_train_as_one_device(name: str) -> None:
    check(name, stages=2, replicas=[2, 1], micro_batches=3)
