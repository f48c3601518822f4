"""Models with steps of many kinds train over a pipeline as without one: history, variables, slots and metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dapple_tf.errors import ExactnessError
from tests.dapple_tf.keras.more_step_models import COMBINE_SAMPLES, MODELS, train

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


def check(name: str, **options: Any) -> Any:
    wanted, variables, _ = train(name)
    found, ours, step = train(name, **options, **({"batch_loss": True} if name in COMBINE_SAMPLES else {}))
    assert found.keys() == wanted.keys()
    for metric, values in wanted.items():
        np.testing.assert_allclose(found[metric], values, **TOLERANCE, err_msg=metric)
    for mine, theirs in zip(ours, variables, strict=True):
        np.testing.assert_allclose(mine.astype(float), theirs.astype(float), **TOLERANCE)
    return step


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_and_three_micro_batches_train_as_plain_keras(name: str) -> None:
    step = check(name, stages=2, micro_batches=3)
    assert step.exactness.exact


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_other_cuts_train_as_plain_keras(name: str, stages: int, micro_batches: int) -> None:
    check(name, stages=stages, micro_batches=micro_batches)


@pytest.mark.parametrize("name", sorted(COMBINE_SAMPLES))
def test_a_loss_that_combines_samples_says_so_at_its_line(name: str) -> None:
    with pytest.raises(ExactnessError, match=r"more_step_models\.py:\d+: .*\n(.*\n)*.*pass\s+batch_loss=True"):
        train(name, stages=2, micro_batches=3)
