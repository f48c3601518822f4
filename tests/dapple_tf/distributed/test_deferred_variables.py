"""Ranks make the values of their own stages only, and train as a model that was built eagerly."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.programs.deferred import X, make_model
from tests.processes import needs_horovod

pytestmark = needs_horovod


@pytest.mark.parametrize("case", ["made by owners", "read early"])
def test_ranks_hold_their_stage_only_and_train_as_one_device(launches: Launches, case: str) -> None:
    ranks = [result[case] for result in launches.results("two ranks", "deferred")]
    keras.utils.set_random_seed(5)
    model = make_model()
    optimizer = keras.optimizers.Adam(0.01)
    losses = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - X) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        losses.append(float(loss))
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"], losses, rtol=1e-5)
        for found, weight in zip(rank["weights"], model.weights, strict=True):
            np.testing.assert_allclose(found, weight.numpy(), rtol=1e-4, atol=1e-5)
    first, second = ({path for path in rank["held"] if "kernel" in path} for rank in ranks)
    owned = [{f"layer{i}/kernel" for i in layers} for layers in ((0, 1), (2, 3))]
    assert owned[0] <= first
    assert owned[1] <= second
    assert not {path for path in first if "layer2" in path or "layer3" in path}
    assert not {path for path in second if "layer1" in path}
    assert not {path for path in second if "layer0" in path and "adam" in path}  # its slots are where it is updated


def test_ranks_with_different_seeds_have_one_value_of_what_both_hold(launches: Launches) -> None:
    first, second = (result["two seeds"] for result in launches.results("two ranks", "deferred"))
    assert first["losses"] == second["losses"]
    assert first["weights"] == second["weights"]
    assert first["losses"][2] < first["losses"][0]


def test_files_of_keras_are_saved_and_loaded_while_each_rank_holds_its_stage_only(launches: Launches) -> None:
    for result in launches.results("two ranks", "deferred"):
        found = result["files"]
        assert len(found["memory"][0]) >= 6
        assert all(held == found["memory"][0] for held in found["memory"])
        assert found["losses"][1:3] == [found["losses"][0]] * 2
        for losses in found["losses"]:
            np.testing.assert_allclose(losses, found["losses"][0], rtol=1e-5)
        assert "missing.weights.h5" in found["error"]
