"""``step.release`` in a job gives every rank all trained values, and training goes on from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.programs.tied_model import X, make_model
from tests.processes import needs_horovod

pytestmark = [needs_horovod, pytest.mark.slow]


def train_plainly() -> tuple[list[float], list[dict[str, Any]]]:
    """Return the losses of three steps on one device, and the model's variables after each."""
    loss, optimizer, made = make_model()
    trained = [made[f"w{i}"] for i in range(3)]
    losses, values = [], []
    for _ in range(3):
        with tf.GradientTape() as tape:
            value = loss(X)
        optimizer.apply(tape.gradient(value, trained), trained)
        losses.append(float(value))
        values.append({name: variable.numpy() for name, variable in made.items()})
    return losses, values


def test_every_rank_has_all_values_after_a_release_and_trains_on(launches: Launches) -> None:
    results = launches.results("two ranks that release", "released")
    losses, (_, second, third) = train_plainly()
    for seen in results:
        np.testing.assert_allclose(seen["losses"], losses, rtol=1e-12)
        for when, wanted in (("released", second), ("released again", third)):
            assert seen[when].keys() == results[0][when].keys() >= wanted.keys()
            for name, value in wanted.items():
                np.testing.assert_allclose(seen[when][name], value, rtol=1e-12, atol=1e-15, err_msg=name)
            assert seen[when] == results[0][when]  # bit by bit
        assert seen["trained"] == seen["trained again"] != sorted(seen["released"])  # only the rank's own
