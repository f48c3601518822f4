"""The next batch is read while a step runs, in order, and no batch is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.keras.prefetch import Prefetch
from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.models import X, Y


def test_batches_come_in_order_to_the_end() -> None:
    prefetch, batches = Prefetch(), iter(tf.data.Dataset.range(5))
    assert [int(prefetch.next(batches)) for _ in range(5)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(StopIteration):
            prefetch.next(batches)
    again = iter(tf.data.Dataset.range(2))
    assert [int(prefetch.next(again)) for _ in range(2)] == [0, 1]


def test_an_error_of_the_data_set_is_raised_where_its_batch_is_due() -> None:
    data = tf.data.Dataset.range(3).map(lambda i: tf.debugging.check_numerics(1 / tf.cast(1 - i, tf.float32), "due"))
    prefetch, batches = Prefetch(), iter(data)
    assert float(prefetch.next(batches)) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="due"):
        prefetch.next(batches)


def test_other_iterators_are_not_read_ahead() -> None:
    source = iter(range(3))
    prefetch = Prefetch()
    assert prefetch.next(source) == 0
    assert next(source) == 1


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
