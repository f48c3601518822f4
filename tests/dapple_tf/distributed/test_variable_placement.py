"""Under mpirun: a rank holds what its stage owns, however many steps and plans there are, and its memory falls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.programs.release_model import LARGE_BYTES, X, loss_of, optimizers
from tests.processes import needs_horovod, run_ranks

pytestmark = needs_horovod

WHOLE = 6 * 3 * LARGE_BYTES  # six matrices, each with two slots
# TensorFlow's oneDNN kernels come with an allocator that keeps freed memory for the next tensors: without them the
# resident set follows what is held.
PLAIN_ALLOCATOR = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_MMAP_THRESHOLD_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks saved the model."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    done = run_ranks(
        ["-m", "tests.dapple_tf.distributed.programs.release_ranks", str(folder)], 2, environment=PLAIN_ALLOCATOR
    )
    return [json.loads(rank.stdout) for rank in done]


def test_memory_holds_a_ranks_own_half_of_the_weights_and_slots(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        resident = seen["resident"]
        assert resident["trained"] < 0.7 * WHOLE  # traces and Horovod's buffers take some 80 MB
        assert resident["gathered"] > WHOLE
        assert resident["gathered"] - resident["trained"] > 0.45 * WHOLE
        assert resident["gathered"] - resident["again"] > 0.45 * WHOLE


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")  # Keras's own
def test_steps_of_other_plans_train_one_model_in_turn(ranks: list[dict[str, Any]], folder: Path) -> None:
    """Each finds what the other trained, though it lives elsewhere, and leaves the model as one device would."""
    drawn = keras.models.load_model(folder / "drawn.keras")
    first, second = optimizers()
    one = step_of(loss_of(drawn), optimizer=first, stages=1, micro_batches=2)
    other = step_of(loss_of(drawn), optimizer=second, stages=1, micro_batches=2)
    wanted = [float(step(X)) for step in (one, one, other, other, one, other, one, one)]
    for rank, seen in enumerate(ranks):
        np.testing.assert_allclose(seen["losses"], wanted, rtol=1e-12)
        saved = keras.models.load_model(folder / f"{rank}.keras")
        for found, variable in zip(saved.get_weights(), drawn.get_weights(), strict=True):
            np.testing.assert_allclose(found, variable, rtol=1e-12, atol=1e-15)
        assert "call step.gather() on every rank before this" in seen["why"]
    a, b, everything = ([0], [1, 2, 3]), ([0, 1, 2], [3]), [0, 1, 2, 3]
    for rank, seen in enumerate(ranks):
        assert seen["readable"] == [*(plan[rank] for plan in (a, b, b, b, a, b, a, a)), everything]
