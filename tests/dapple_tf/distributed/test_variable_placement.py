"""A rank holds the variables of its stage and no others, under several steps and plans too, and its memory falls."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.programs.held_variable_models import LARGE_BYTES, X, loss_of, optimizers
from tests.processes import needs_horovod

pytestmark = needs_horovod

ALL_BYTES = 6 * 3 * LARGE_BYTES  # six matrices, each with two slots


@pytest.fixture
def results(launches: Launches) -> list[dict[str, Any]]:
    """Return the observations of two ranks."""
    return launches.results("held variables", "held_variables")


@pytest.mark.slow
def test_a_rank_keeps_its_own_half_of_weights_and_slots_in_memory(results: list[dict[str, Any]]) -> None:
    for seen in results:
        resident = seen["resident"]
        assert resident["trained"] < 0.7 * ALL_BYTES  # traces and Horovod's buffers take some 80 MB
        assert resident["gathered"] > ALL_BYTES
        assert resident["gathered"] - resident["trained"] > 0.45 * ALL_BYTES
        assert resident["gathered"] - resident["trained again"] > 0.45 * ALL_BYTES


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")  # Keras's own
@pytest.mark.slow
def test_steps_of_different_plans_train_one_model(results: list[dict[str, Any]], launches: Launches) -> None:
    """Each step uses the values that the other has trained on other ranks: the model ends as on one device."""
    folder = launches.folder("held variables")
    initial = keras.models.load_model(folder / "initial.keras")
    first, second = optimizers()
    one = step_of(loss_of(initial), optimizer=first, stages=1, micro_batches=2)
    other = step_of(loss_of(initial), optimizer=second, stages=1, micro_batches=2)
    losses = [float(step(X)) for step in (one, one, other, other, one, other, one, one)]
    for rank, seen in enumerate(results):
        np.testing.assert_allclose(seen["losses"], losses, rtol=1e-12)
        saved = keras.models.load_model(folder / f"{rank}.keras")
        for found, variable in zip(saved.get_weights(), initial.get_weights(), strict=True):
            np.testing.assert_allclose(found, variable, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_a_rank_can_read_the_layers_of_its_stage_under_the_last_plan(results: list[dict[str, Any]]) -> None:
    a, b, everything = ([0], [1, 2, 3]), ([0, 1, 2], [3]), [0, 1, 2, 3]
    for rank, seen in enumerate(results):
        assert seen["readable"] == [*(plan[rank] for plan in (a, b, b, b, a, b, a, a)), everything]
        assert "call step.gather() on every rank before this" in seen["save error"]
