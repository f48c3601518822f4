"""Random training steps compute what one device computes, or are refused by name: never a wrong number."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given

import dapple_tf as dapple
from dapple_tf.errors import DappleError
from tests.draws import draw
from tests.equality.random_steps import RandomStep, make, random_steps
from tests.equality.training_steps import BATCH, values_of

pytestmark = pytest.mark.usefixtures("float64")


def batches() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(1)
    return [(tf.constant(rng.normal(size=(BATCH, 4))), tf.constant(rng.normal(size=(BATCH, 2)))) for _ in range(3)]


def outcome(drawn: RandomStep) -> str:
    """Return "equal", or "refused: " and why; raises AssertionError where a step gives other numbers."""
    plain, wanted = make(drawn)
    whole, expected = tf.function(plain), []
    for batch in batches():
        expected.append([np.asarray(value) for value in whole(*batch)])
    function, found = make(drawn)
    step = dapple.train_step(function, **drawn.options)
    try:
        results = [[np.asarray(value) for value in step(*batch)] for batch in batches()]
    except DappleError as error:
        return f"refused: {error}"
    for ours, theirs in zip(results, expected, strict=True):
        for mine, one in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, one, rtol=1e-11, atol=1e-12)
    for mine, one in zip(values_of(found), values_of(wanted), strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-11, atol=1e-12)
    return "equal"


@pytest.mark.timeout(1200)
def test_random_training_steps_are_equal_to_one_device_or_refused() -> None:
    outcomes: collections.Counter[str] = collections.Counter()

    @draw(few=3, phases=(Phase.explicit, Phase.reuse, Phase.generate), report_multiple_bugs=False)
    @given(random_steps())
    def check(drawn: RandomStep) -> None:
        outcomes[outcome(drawn).partition(":")[0]] += 1

    check()
    print(dict(outcomes))  # shown with -rP
    assert outcomes["equal"] > outcomes["refused"], outcomes
