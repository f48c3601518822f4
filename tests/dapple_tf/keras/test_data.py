"""Every source of batches, and every nesting of them, gives what plain Keras gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning
from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.models import CLASSES, CROSS_ENTROPY, SAMPLES, WEIGHTS, X, Y
from tests.dapple_tf.keras.plain import assert_equal_to_plain


class Batches(keras.utils.PyDataset):
    """A data set in Python, of batches of 8 samples."""

    def __len__(self) -> int:
        return -(-SAMPLES // 8)

    def __getitem__(self, index: int) -> Any:
        rows = slice(8 * index, 8 * index + 8)
        return X[rows], Y[rows], WEIGHTS[rows]


def generate() -> Iterator[Any]:
    while True:
        for index in range(len(Batches())):
            yield Batches()[index]


def fit_batches(model: keras.Model, source: Callable[[], Any], **options: Any) -> Any:
    history = model.fit(source(), epochs=2, verbose=0, **options).history
    evaluated = model.evaluate(source(), verbose=0, steps=options.get("steps_per_epoch"))
    return history, evaluated, model.predict(X, verbose=0)


SOURCES = {
    "PyDataset": (Batches, {}),
    "generator": (generate, {"shuffle": False, "steps_per_epoch": 3}),
    "tf.data": (lambda: tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(8), {"shuffle": False}),
    "tf.data without end": (
        lambda: tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).repeat().batch(8),
        {"shuffle": False, "steps_per_epoch": 4},
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_sources(source: str) -> None:
    make, options = SOURCES[source]
    model = partial(models.sequential, metrics=["mae"], weighted_metrics=["mse"], steps_per_execution=2)
    assert_equal_to_plain(model, lambda model: fit_batches(model, make, **options))


@pytest.mark.parametrize("drop", [False, True])
def test_losses_of_outputs_are_weighed_as_keras_does(drop: bool) -> None:
    """Keras weighs them by the samples of a batch only where the data set fixes these."""

    def source() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, (Y, CLASSES))).batch(8, drop_remainder=drop)

    assert_equal_to_plain(
        models.two_outputs, lambda model: model.fit(source(), epochs=2, shuffle=False, verbose=0).history
    )


def of_a_dictionary() -> keras.Model:
    first, second = keras.Input([6], name="first"), keras.Input([6], name="second", optional=True)
    hidden = keras.layers.Dense(5, "tanh", name="hidden")(first)
    joined = MaybeAdd(name="add")(hidden, second)
    model = keras.Model({"first": first, "second": second}, keras.layers.Dense(1, name="last")(joined), name="net")
    model.compile("sgd", "mse")
    return model


class MaybeAdd(keras.layers.Layer):
    """Adds the sum of a second input, where it is given."""

    def call(self, x: Any, other: Any) -> Any:
        return x if other is None else x + keras.ops.sum(other, -1, keepdims=True)

    def compute_output_shape(self, x_shape: Any, other_shape: Any) -> Any:
        return x_shape


def test_inputs_in_a_dictionary_may_be_missing() -> None:
    def use(model: keras.Model) -> Any:
        found: list[Any] = []
        for second in (None, X[::-1].copy(), None):
            inputs = {"first": X, "second": second}
            found += [model.train_on_batch(inputs, Y), model.test_on_batch(inputs, Y), model.predict_on_batch(inputs)]
        return found

    assert_equal_to_plain(of_a_dictionary, use)


class OwnLoss(keras.Model):
    """A model with a loss and metrics of its own."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.hidden = keras.layers.Dense(5, "tanh", name="hidden")
        self.last = keras.layers.Dense(2, name="last")
        self.spread = keras.metrics.Mean(name="spread")

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        mean, spread = y_pred[:, :1], keras.ops.softplus(y_pred[:, 1:])
        return keras.ops.mean(keras.ops.log(spread) + keras.ops.square((y - mean) / spread))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.spread.update_state(keras.ops.softplus(y_pred[:, 1:]), sample_weight=sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def own_loss() -> keras.Model:
    model = OwnLoss()
    model.compile("adam")
    return model


def test_a_loss_and_metrics_of_ones_own() -> None:
    def use(model: keras.Model) -> Any:
        history = model.fit(X, Y, sample_weight=WEIGHTS, batch_size=8, epochs=2, verbose=0).history
        return history, model.evaluate(X, Y, batch_size=8, verbose=0)

    assert_equal_to_plain(own_loss, use)


def test_predictions_of_steps_per_execution_and_of_nested_outputs() -> None:
    def make() -> keras.Model:
        model = models.two_outputs(as_dict=True, loss={"value": "mse", "kind": CROSS_ENTROPY})
        model.steps_per_execution = 2  # as by ``compile``
        return model

    def use(model: keras.Model) -> Any:
        return [model.predict(X, batch_size=5, verbose=0), model.predict(X[:3], verbose=0)]

    assert_equal_to_plain(make, use)


def test_the_state_of_metrics_is_that_of_plain_keras_in_every_callback() -> None:
    """Logs of every batch, and what the callback reads of the model, are equal."""

    def use(model: keras.Model) -> Any:
        seen: list[Any] = []

        def note(batch: int, logs: Any) -> None:
            values = [float(model.optimizer.iterations), float(np.sum(model.get_weights()[0]))]
            seen.append([batch, dict(logs), values])

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=note, on_test_batch_end=note)
        model.fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[callback])
        return seen

    assert_equal_to_plain(partial(models.sequential, metrics=["mae"]), use)


def test_training_stops_at_a_loss_that_is_not_a_number() -> None:
    def use(model: keras.Model) -> Any:
        targets = np.where(np.arange(SAMPLES)[:, None] == 12, np.nan, Y)
        callbacks = [keras.callbacks.TerminateOnNaN()]
        found = model.fit(X, targets, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        return [len(values) for values in found.history.values()]

    assert assert_equal_to_plain(models.sequential, use) == [1]


def sentences() -> tf.data.Dataset:
    """Batches of 8 sentences, of lengths that vary."""

    def generate_sentences() -> Iterator[Any]:
        random = np.random.default_rng(0)
        for length in (8, 5, 7, 8, 10):
            yield random.integers(0, 11, (8, length)).astype("int32"), random.integers(0, 3, (8, length))

    specs = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None], tf.int64)
    batches = tf.data.Dataset.from_generator(generate_sentences, output_signature=specs)
    return batches.apply(tf.data.experimental.assert_cardinality(5))


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_data_of_unknown_size_train_as_those_of_known_size_and_the_difference_to_keras_is_said_once() -> None:
    counts = []
    for known in (True, False):
        keras.utils.set_random_seed(1)
        model = open_tagger()
        dapple.keras.pipeline(model, stages=2, micro_batches=2)
        data = sentences() if known else sentences().filter(lambda x, y: True)
        with contextlib.nullcontext() if known else pytest.warns(DappleWarning, match="data of unknown size") as caught:
            model.fit(data, epochs=3, verbose=0, shuffle=False)
        counts.append((int(model.optimizer.iterations), [variable.numpy().tolist() for variable in model.variables]))
        assert known or len([w for w in caught if "unknown size" in str(w.message)]) == 1
    assert counts[0] == counts[1]


def open_tagger() -> keras.Model:
    """A masked model of sentences of any length."""
    ids = keras.Input([None], dtype="int32")
    x = keras.layers.Embedding(11, 6, mask_zero=True)(ids)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 9)(x, x))
    model = keras.Model(ids, keras.layers.Dense(3, "softmax")(x))
    model.compile(keras.optimizers.Adam(0.01), CROSS_ENTROPY, metrics=["accuracy"])
    return model


def test_sentences_of_any_length() -> None:
    assert_equal_to_plain(open_tagger, lambda model: fit_batches(model, sentences, shuffle=False))


def test_two_builds_serve_sentences_of_all_lengths() -> None:
    model = open_tagger()
    step = dapple.keras.pipeline(model, stages=2, micro_batches=2)
    model.fit(sentences(), verbose=0, shuffle=False)
    assert len(step._compiled.models) == 2
