"""Language models and sequences with padding: losses over the tokens that count."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    batches,
    cross_entropy,
    integers,
    mask,
    padded_tokens,
    tagger,
    token_model,
    train,
    trained_with,
)
from benchmarks.exactness_cases.case import Case, Training

# --- losses of (labels, logits [batch, LENGTH, VOCABULARY], mask [batch, LENGTH])


def masked_lm(y: Any, logits: Any, keep: Any) -> Any:
    return tf.reduce_sum(cross_entropy(y, logits) * keep) / tf.reduce_sum(keep)


def no_nan(y: Any, logits: Any, keep: Any) -> Any:
    return tf.math.divide_no_nan(tf.reduce_sum(cross_entropy(y, logits) * keep), tf.reduce_sum(keep))


def at_least_one(y: Any, logits: Any, keep: Any) -> Any:
    return tf.reduce_sum(cross_entropy(y, logits) * keep) / tf.maximum(tf.reduce_sum(keep), 1.0)


def epsilon(y: Any, logits: Any, keep: Any) -> Any:
    return tf.reduce_sum(cross_entropy(y, logits) * keep) / (tf.reduce_sum(keep) + 1e-8)


def mean_over_mean(y: Any, logits: Any, keep: Any) -> Any:
    return tf.reduce_mean(cross_entropy(y, logits) * keep) / tf.reduce_mean(keep)


def normalised_weights(y: Any, logits: Any, keep: Any) -> Any:
    return tf.reduce_sum(cross_entropy(y, logits) * (keep / tf.reduce_sum(keep)))


def of_each_row(y: Any, logits: Any, keep: Any) -> Any:
    rows = tf.reduce_sum(cross_entropy(y, logits) * keep, 1) / (tf.reduce_sum(keep, 1) + 1e-6)
    return tf.reduce_mean(rows)


def selected(y: Any, logits: Any, keep: Any) -> Any:
    return tf.reduce_mean(tf.boolean_mask(cross_entropy(y, logits), keep > 0))


def selected_logits(y: Any, logits: Any, keep: Any) -> Any:
    return tf.reduce_mean(cross_entropy(tf.boolean_mask(y, keep > 0), tf.boolean_mask(logits, keep > 0)))


def from_padding(y: Any, logits: Any) -> Any:
    keep = tf.cast(y != 0, logits.dtype)
    return tf.reduce_sum(cross_entropy(y, logits) * keep) / tf.reduce_sum(keep)


def where_not_padding(y: Any, logits: Any) -> Any:
    losses = tf.where(y != 0, cross_entropy(y, logits), 0.0)
    return tf.reduce_sum(losses) / tf.cast(tf.math.count_nonzero(y), logits.dtype)


def longest(y: Any, logits: Any) -> Any:
    """Losses up to the longest sequence of the batch, padding included."""
    length = tf.reduce_max(tf.reduce_sum(tf.cast(y != 0, tf.int32), 1))
    return tf.reduce_mean(cross_entropy(y[:, :length], logits[:, :length]))


def mask_and_l2(y: Any, logits: Any, keep: Any) -> Any:
    return masked_lm(y, logits, keep) + 1e-2 * tf.reduce_mean(tf.square(logits))


def keras_ignore_class(reduction: str) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, reduction=reduction)
    return trained_with(tagger, lambda y, logits: loss(y, logits), padded_tokens(), padded_tokens())


def ignore_class_function(seed: int) -> Training:
    losses = keras.losses.sparse_categorical_crossentropy
    return trained_with(
        tagger,
        lambda y, logits: tf.reduce_mean(losses(y, logits, from_logits=True, ignore_class=0)),
        padded_tokens(),
        padded_tokens(),
    )(seed)


# --- models with Keras masks


def keras_masks(*middle: Any) -> Any:
    """Return the ``make`` of a model whose mask reaches the Keras loss. ``middle`` make its layers."""

    def make(seed: int) -> Training:
        model = token_model(*(layer() for layer in middle), mask_zero=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        data = batches(seed, padded_tokens(), integers(VOCABULARY, LENGTH))
        return train(model, tf.function(lambda x, y: loss(y, model(x, training=True))), data)

    return make


def pooled(*middle: Any) -> Any:
    """Return the ``make`` of a classifier of padded sequences. ``middle`` make its layers."""
    mean = keras.losses.SparseCategoricalCrossentropy

    def make(seed: int) -> Training:
        return trained_with(
            lambda: token_model(*(layer() for layer in middle), outputs=3, mask_zero=True),
            mean(from_logits=True),
            padded_tokens(),
            integers(3),
        )(seed)

    return make


class SelfAttention(keras.layers.Layer):
    """Multi-head attention of a sequence to itself, which uses and passes on the Keras mask."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        return x + self.attention(x, x)


def dense() -> Any:
    return keras.layers.Dense(WIDTH, "tanh")


def lstm(sequences: bool = True) -> Any:
    return keras.layers.LSTM(WIDTH, return_sequences=sequences)


def gru(sequences: bool = True) -> Any:
    return keras.layers.GRU(WIDTH, return_sequences=sequences)


TOKENS, LABELS = padded_tokens(), integers(VOCABULARY, LENGTH)

CASES = (
    *(
        Case(name, "masked", trained_with(tagger, loss, integers(VOCABULARY, LENGTH), LABELS, mask(LENGTH)))
        for name, loss in {
            "masked_lm": masked_lm,
            "masked_lm_divide_no_nan": no_nan,
            "masked_lm_at_least_one": at_least_one,
            "masked_lm_epsilon": epsilon,
            "masked_lm_mean_over_mean": mean_over_mean,
            "masked_lm_normalised_weights": normalised_weights,
            "masked_mean_of_each_row": of_each_row,
            "masked_lm_boolean_mask": selected,
            "masked_lm_boolean_mask_of_logits": selected_logits,
            "masked_lm_and_a_mean": mask_and_l2,
        }.items()
    ),
    *(
        Case(name, "masked", trained_with(tagger, loss, TOKENS, TOKENS))
        for name, loss in {
            "padding_from_labels": from_padding,
            "padding_counted": where_not_padding,
            "padding_to_the_longest": longest,
        }.items()
    ),
    Case("ignore_class", "masked", lambda seed: keras_ignore_class("sum_over_batch_size")(seed)),
    Case("ignore_class_sum", "masked", lambda seed: keras_ignore_class("sum")(seed)),
    Case("ignore_class_function", "masked", ignore_class_function),
    Case("keras_mask_dense", "masked", keras_masks(dense, dense)),
    Case("keras_mask_lstm", "masked", keras_masks(lstm, dense)),
    Case("keras_mask_gru", "masked", keras_masks(gru, gru)),
    Case("keras_mask_attention", "masked", keras_masks(SelfAttention, dense)),
    Case("keras_mask_last_state", "masked", pooled(lstm, lambda: lstm(False), dense)),
    Case("keras_mask_bidirectional", "masked", pooled(lambda: keras.layers.Bidirectional(gru(False)), dense)),
    Case("keras_mask_average_pooling", "masked", pooled(dense, keras.layers.GlobalAveragePooling1D, dense)),
)
