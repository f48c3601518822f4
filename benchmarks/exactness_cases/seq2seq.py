"""Sequence-to-sequence models with padding, and losses over alignments (CTC)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Column,
    batches,
    integers,
    normal,
    padded_tokens,
    train,
)
from benchmarks.exactness_cases.case import SINGLE_PRECISION, Case, Training

FRAMES, CLASSES, TARGETS = 9, 5, 3


def masked_mean(y: Any, logits: Any) -> Any:
    keep = tf.cast(y != 0, logits.dtype)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    return tf.reduce_sum(losses * keep) / tf.reduce_sum(keep)


def embedding() -> Any:
    return keras.layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)


def recurrent(seed: int) -> Training:
    """An LSTM encoder hands its last state to an LSTM decoder."""
    source, target = (keras.Input((LENGTH,), dtype="int32") for _ in range(2))
    _, *state = keras.layers.LSTM(WIDTH, return_state=True)(embedding()(source))
    decoded = keras.layers.LSTM(WIDTH, return_sequences=True)(embedding()(target), initial_state=state)
    model = keras.Model([source, target], keras.layers.Dense(VOCABULARY)(decoded))
    data = batches(seed, padded_tokens(), padded_tokens(), padded_tokens())
    return train(model, tf.function(lambda x, given, y: masked_mean(y, model([x, given]))), data)


def with_attention(layer: Any) -> Any:
    """Return the ``make`` of GRUs whose decoder attends to the encoder's outputs through ``layer()``."""

    def make(seed: int) -> Training:
        source, target = (keras.Input((LENGTH,), dtype="int32") for _ in range(2))
        encoded = keras.layers.GRU(WIDTH, return_sequences=True)(embedding()(source))
        decoded = keras.layers.GRU(WIDTH, return_sequences=True)(embedding()(target))
        found = layer()([decoded, encoded])
        joined = keras.layers.Concatenate()([decoded, found])
        model = keras.Model([source, target], keras.layers.Dense(VOCABULARY)(joined))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        data = batches(seed, padded_tokens(), padded_tokens(), padded_tokens())
        return train(model, tf.function(lambda x, given, y: loss(y, model([x, given]))), data)

    return make


def transformer(seed: int) -> Training:
    """An encoder and a decoder with cross attention; the mask of the source is given by hand."""
    source, target = (keras.Input((LENGTH,), dtype="int32") for _ in range(2))
    table = keras.layers.Embedding(VOCABULARY, WIDTH)
    attend = [keras.layers.MultiHeadAttention(2, 4) for _ in range(3)]
    norm = [keras.layers.LayerNormalization() for _ in range(3)]
    kept = keras.layers.Lambda(lambda ids: keras.ops.not_equal(ids, 0)[:, None, :], output_shape=(1, LENGTH))(source)
    x = table(source)
    x = norm[0](x + attend[0](x, x, attention_mask=kept))
    y = table(target)
    y = norm[1](y + attend[1](y, y, use_causal_mask=True))
    y = norm[2](y + attend[2](y, x, attention_mask=kept))
    model = keras.Model([source, target], keras.layers.Dense(VOCABULARY)(y))
    data = batches(seed, padded_tokens(), padded_tokens(), padded_tokens())
    return train(model, tf.function(lambda a, b, c: masked_mean(c, model([a, b], training=True))), data)


# --- CTC


def lengths(low: int, high: int) -> Column:
    return lambda generator: tf.constant(generator.integers(low, high + 1, (ROWS,)), tf.int32)


def targets(generator: np.random.Generator) -> Any:
    return tf.constant(generator.integers(1, CLASSES, (ROWS, TARGETS)), tf.int32)


def frames_model() -> Any:
    x = entry = keras.Input((FRAMES, FEATURES))
    for _ in range(3):
        x = keras.layers.Dense(WIDTH, "tanh")(x)
    return keras.Model(entry, keras.layers.Dense(CLASSES)(x))


def ctc(divide_by_length: bool) -> Any:
    """Return the ``make`` of ``tf.nn.ctc_loss``, which computes in float32."""

    def make(seed: int) -> Training:
        model = frames_model()

        @tf.function
        def loss_fn(x: Any, y: Any, y_length: Any, x_length: Any) -> Any:
            logits = tf.cast(model(x), tf.float32)
            losses = tf.nn.ctc_loss(y, logits, y_length, x_length, logits_time_major=False, blank_index=0)
            losses = tf.cast(losses, x.dtype)
            if divide_by_length:
                return tf.reduce_sum(losses) / tf.cast(tf.reduce_sum(y_length), x.dtype)
            return tf.reduce_mean(losses)

        data = batches(seed, normal(FRAMES, FEATURES), targets, lengths(1, TARGETS), lengths(2 * TARGETS, FRAMES))
        return train(model, loss_fn, data)

    return make


def keras_ctc(seed: int) -> Training:
    model, loss = frames_model(), keras.losses.CTC()
    data = batches(seed, normal(FRAMES, FEATURES), targets)
    return train(model, tf.function(lambda x, y: loss(y, model(x))), data)


def connectionist_frames(seed: int) -> Training:
    """Frames labelled one by one, where the number of frames differs and is summed over the batch."""
    model = frames_model()

    @tf.function
    def loss_fn(x: Any, y: Any, length: Any) -> Any:
        keep = tf.sequence_mask(length, FRAMES, x.dtype)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x))
        return tf.reduce_sum(losses * keep) / tf.cast(tf.reduce_sum(length), x.dtype)

    return train(model, loss_fn, batches(seed, normal(FRAMES, FEATURES), integers(CLASSES, FRAMES), lengths(1, FRAMES)))


CASES = (
    Case("seq2seq_lstm", "seq2seq", recurrent),
    Case("seq2seq_gru_attention", "seq2seq", with_attention(keras.layers.Attention)),
    Case("seq2seq_gru_additive_attention", "seq2seq", with_attention(keras.layers.AdditiveAttention)),
    Case("seq2seq_transformer", "seq2seq", transformer),
    Case("frames_by_length", "seq2seq", connectionist_frames),
    Case("ctc", "seq2seq", ctc(False), tolerance=SINGLE_PRECISION),
    Case("ctc_by_length", "seq2seq", ctc(True), tolerance=SINGLE_PRECISION),
    Case("ctc_keras", "seq2seq", keras_ctc, tolerance=SINGLE_PRECISION),
)
