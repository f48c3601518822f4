"""The next batch of a data set is read while a step runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

import dapple_tf as dapple
from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.models import X, Y


def test_fit_reads_the_next_batch_before_a_step_ends() -> None:
    asked = [threading.Event() for _ in range(3)]

    def batches() -> Iterator[Any]:
        for event in asked:
            event.set()
            yield X[:8], Y[:8]

    spec = (tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None, 1], tf.float64))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2, micro_batches=2)
    read = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: read.append(asked[min(batch + 1, 2)].wait(60))
    )
    model.fit(data, steps_per_epoch=3, shuffle=False, verbose=0, callbacks=[callback])
    assert read == [True] * 3
