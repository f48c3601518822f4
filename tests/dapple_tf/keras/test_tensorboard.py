"""The TensorBoard callback of Keras writes for a pipelined model what it writes for the plain one."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.models import X, Y
from tests.requirements import needs_tensorboard


def events_of(folder: Path, *, pipelined: bool) -> dict[tuple[str, int, str], np.ndarray]:
    """Train for two epochs, and return the values of all events by writer, step and tag."""
    keras.utils.set_random_seed(0)
    model = models.sequential(metrics=["mae"])
    if pipelined:
        dapple.keras.pipeline(model, stages=2, micro_batches=2)
    callback = keras.callbacks.TensorBoard(folder, update_freq=1, histogram_freq=1)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, validation_split=0.3, shuffle=False, callbacks=[callback])
    found = {}
    for file in folder.rglob("events*"):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                found[file.parent.name, event.step, value.tag] = tf.make_ndarray(value.tensor)
    return found


@needs_tensorboard
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")  # Keras's own
def test_the_tensorboard_callback_writes_equal_curves_and_histograms(tmp_path: Path) -> None:
    plain = events_of(tmp_path / "plain", pipelined=False)
    found = events_of(tmp_path / "pipelined", pipelined=True)
    assert len(plain) > 20
    assert set(found) == set(plain)
    for key, value in plain.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6, err_msg=str(key))
