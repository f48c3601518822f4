"""Recurrent models with what needs the lengths behind a loop over time: draws, reshapes, attention and cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import ExactnessError
from tests.dapple_tf.keras.plain import assert_equal_to_plain

layers = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(14, 6, 4))
Y = RANDOM.normal(size=(14, 1))
IDS = np.where(np.arange(6) < RANDOM.integers(1, 7, (14, 1)), RANDOM.integers(1, 9, (14, 6)), 0)
FRAMES = RANDOM.normal(size=(14, 3, 5, 5, 2))


@keras.saving.register_keras_serializable("tests")
class Cell(layers.Layer):
    """A recurrent cell of a user's own."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = self.state_size = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units))
        self.recurrent = self.add_weight(shape=(self.units, self.units), initializer="orthogonal")

    def call(self, inputs: Any, states: Any) -> Any:
        state = keras.ops.tanh(inputs @ self.kernel + states[0] @ self.recurrent)
        return state, [state]


class DrawingCell(Cell):
    """A cell that draws in each step."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(units, **options)
        self.drop = layers.Dropout(0.3)

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        return super().call(inputs, [self.drop(states[0], training=training)])


class Unrolled(keras.Model):
    """A loop in TensorFlow's own ops, whose result has no static length; ``loop`` takes the input and a matrix."""

    def __init__(self, loop: Callable[[Any, Any], Any]) -> None:
        super().__init__(name="net")
        self.loop, self.drop, self.last = loop, layers.Dropout(0.3), layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.matrix = self.add_weight(shape=(4, 4))
        self.last.build((None, 24))

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.drop(self.loop(x, tf.convert_to_tensor(self.matrix)), training=training)
        return self.last(tf.reshape(hidden, [-1, 24]))


def by_scan(x: Any, matrix: Any) -> Any:
    by_time = tf.transpose(x, [1, 0, 2])
    states = tf.scan(lambda state, step: tf.tanh(state @ matrix + step), by_time, tf.zeros_like(by_time[0]))
    return tf.transpose(states, [1, 0, 2])


def by_while(x: Any, matrix: Any) -> Any:
    length = tf.shape(x)[1]
    states = tf.TensorArray(x.dtype, length)
    found = tf.while_loop(
        lambda i, state, states: i < length,
        lambda i, state, states: (i + 1, tf.tanh(state @ matrix + x[:, i]), states.write(i, state)),
        (0, tf.zeros_like(x[:, 0]), states),
    )
    return tf.transpose(found[2].stack(), [1, 0, 2])


def by_map(x: Any, matrix: Any) -> Any:
    return tf.transpose(tf.map_fn(lambda step: tf.tanh(step @ matrix), tf.transpose(x, [1, 0, 2])), [1, 0, 2])


def by_length(x: Any, matrix: Any) -> Any:
    samples, length = tf.shape(x)[0], tf.shape(x)[1]
    x = tf.cond(length > 3, lambda: tf.reshape(x @ matrix, [samples, length, 4]), lambda: x)
    return tf.switch_case(length // 4, [lambda: x, lambda: tf.tile(x @ matrix, [1, 2, 1])[:, :length], lambda: -x])


@tf.function
def sizes(x: Any) -> Any:
    return tf.shape(x)[0], tf.shape(x)[1]


def by_functions(x: Any, matrix: Any) -> Any:
    samples, length = sizes(x)
    return tf.reshape(tf.reshape(x, [samples * length, 4]) @ matrix, [samples, 2 * length, 2])


def encoder_decoder() -> keras.Model:
    inputs = keras.Input((6, 4))
    encoded, *state = layers.LSTM(3, return_state=True, return_sequences=True)(inputs)
    decoded = layers.Dropout(0.2)(layers.LSTM(3, return_sequences=True)(inputs, initial_state=state))
    both = layers.Concatenate()([decoded, layers.Attention()([decoded, encoded])])
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(both)), name="net")


def attention() -> keras.Model:
    inputs = keras.Input((6, 4))
    hidden = layers.LSTM(4, return_sequences=True)(inputs)
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 2, dropout=0.1)(hidden, hidden))
    return keras.Model(inputs, layers.Dense(1)(layers.GaussianNoise(0.1)(layers.Flatten()(hidden))), name="net")


def chain(*items: Callable[[], Any], shape: Any = (6, 4), dtype: Any = None) -> Callable[[], keras.Model]:
    """Return a function that makes a Sequential model of new layers, and a Dense(1) behind these."""
    return lambda: keras.Sequential(
        [keras.Input(shape, dtype=dtype), *(make() for make in items), layers.Dense(1)], name="net"
    )


def dropout() -> keras.layers.Layer:
    return layers.Dropout(0.3)


def embedding() -> keras.layers.Layer:
    return layers.Embedding(9, 4, mask_zero=True)


def cells() -> list[keras.layers.Layer]:
    return [layers.LSTMCell(3), layers.GRUCell(2, dropout=0.2, recurrent_dropout=0.2), Cell(3)]


def recurrent(kind: Any, *arguments: Any, **options: Any) -> Callable[[], keras.layers.Layer]:
    return lambda: kind(*arguments, **options)


def sequence(kind: Any, *arguments: Any, **options: Any) -> Callable[[], keras.layers.Layer]:
    return recurrent(kind, *arguments, return_sequences=True, **options)


MODELS: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "lstm": (chain(recurrent(layers.LSTM, 3, dropout=0.2, recurrent_dropout=0.3), dropout), X),
    "gru": (chain(sequence(layers.GRU, 3), recurrent(layers.GaussianNoise, 0.2), layers.Flatten), X),
    "simple": (chain(recurrent(layers.SimpleRNN, 3, recurrent_dropout=0.2), recurrent(layers.AlphaDropout, 0.2)), X),
    "unroll": (
        chain(lambda: layers.Dense(40), recurrent(layers.GRU, 3, unroll=True, recurrent_dropout=0.2), dropout),
        X,
    ),
    "backwards": (chain(sequence(layers.LSTM, 3, go_backwards=True), dropout, layers.Flatten), X),
    "both ways": (
        chain(lambda: layers.Bidirectional(layers.GRU(3, return_sequences=True)), dropout, recurrent(layers.LSTM, 3)),
        X,
    ),
    "own cell": (chain(lambda: layers.RNN(Cell(3), return_sequences=True), dropout, layers.Flatten), X),
    "list of cells": (chain(lambda: layers.RNN(cells()), dropout), X),
    "stacked cells": (chain(lambda: layers.RNN(layers.StackedRNNCells(cells())), dropout), X),
    "convolutions": (
        chain(
            sequence(layers.ConvLSTM2D, 3, 3, dropout=0.1, recurrent_dropout=0.1),
            dropout,
            recurrent(layers.ConvLSTM2D, 2, 3),
            layers.Flatten,
            shape=(3, 5, 5, 2),
        ),
        FRAMES,
    ),
    "mask": (
        chain(embedding, sequence(layers.LSTM, 3), dropout, recurrent(layers.GRU, 3), shape=(6,), dtype="int32"),
        IDS,
    ),
    "unknown length": (
        chain(
            embedding,
            sequence(layers.LSTM, 3, zero_output_for_mask=True),
            dropout,
            recurrent(layers.GRU, 3),
            dropout,
            shape=(None,),
            dtype="int32",
        ),
        IDS,
    ),
    "masking": (
        chain(layers.Masking, lambda: layers.Bidirectional(layers.LSTM(3)), dropout),
        np.where(IDS[..., np.newaxis] > 0, X, 0.0),
    ),
    "each step": (
        chain(
            lambda: layers.TimeDistributed(layers.Dense(3)),
            sequence(layers.GRU, 3),
            lambda: layers.TimeDistributed(layers.Dropout(0.2)),
            layers.Flatten,
        ),
        X,
    ),
    "loops in each step": (
        chain(
            lambda: layers.TimeDistributed(layers.LSTM(3)),
            dropout,
            recurrent(layers.LSTM, 3),
            dropout,
            shape=(3, 5, 2),
        ),
        FRAMES[:, :, 0],
    ),
    "reshape": (
        chain(
            recurrent(layers.Conv1D, 4, 2, padding="same"),
            sequence(layers.LSTM, 4),
            recurrent(layers.Reshape, (3, 8)),
            recurrent(layers.SpatialDropout1D, 0.2),
            recurrent(layers.Permute, (2, 1)),
            layers.GlobalMaxPooling1D,
        ),
        X,
    ),
    "encoder and decoder": (encoder_decoder, X),
    "attention": (attention, X),
    "scan": (lambda: Unrolled(by_scan), X),
    "while loop": (lambda: Unrolled(by_while), X),
    "map over time": (lambda: Unrolled(by_map), X),
    "branches by the length": (lambda: Unrolled(by_length), X),
    "nested functions": (lambda: Unrolled(by_functions), X),
}


def compiled(make: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    def model() -> keras.Model:
        built = make()
        built.compile(keras.optimizers.SGD(0.1), "mse")
        return built

    return model


def fit(x: Any) -> Callable[[keras.Model], Any]:
    """Train on 14 samples in batches of 8: the last batch is a smaller one."""
    return lambda model: model.fit(x, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.parametrize("case", MODELS)
def test_a_recurrent_model_trains_as_on_one_device(case: str) -> None:
    make, x = MODELS[case]
    assert_equal_to_plain(compiled(make), fit(x))


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("case", ["both ways", "mask", "scan"])
def test_micro_batches_of_any_size(case: str, micro_batches: int) -> None:
    make, x = MODELS[case]
    assert_equal_to_plain(compiled(make), fit(x), micro_batches=micro_batches)


@pytest.mark.parametrize("options", [{"stages": 1}, {"stages": 3}, {"stages": 2, "replicas": [2, 1]}])
def test_stages_and_replicas(options: dict[str, Any]) -> None:
    make, x = MODELS["both ways"]
    assert_equal_to_plain(compiled(make), fit(x), micro_batches=4, **options)


def test_a_cell_that_draws_in_a_loop_is_refused_and_works_unrolled() -> None:
    def make(unroll: bool) -> Callable[[], keras.Model]:
        return compiled(chain(lambda: layers.Dense(40), lambda: layers.RNN(DrawingCell(3), unroll=unroll)))

    model = make(unroll=False)()
    dapple.keras.pipeline(model, stages=2, micro_batches=3)
    with pytest.raises(ExactnessError, match=r"(?s)draw.*before.*unroll"):
        fit(X)(model)
    assert_equal_to_plain(make(unroll=True), fit(X))


def stateful() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6, 4), batch_size=7), layers.GRU(3, stateful=True), dropout(), layers.Dense(1)], name="net"
    )


def fit_whole_batches(model: keras.Model) -> Any:
    return model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0).history


def test_a_stateful_layer_trains_with_one_micro_batch() -> None:
    assert_equal_to_plain(compiled(stateful), fit_whole_batches, micro_batches=1)


def test_a_stateful_layer_with_several_micro_batches_is_refused_with_what_to_do() -> None:
    model = compiled(stateful)()
    dapple.keras.pipeline(model, stages=2, micro_batches=3)
    with pytest.raises(ExactnessError, match=r"(?s)rnn_state.*micro_batches=1"):
        fit_whole_batches(model)
