"""A masked language model, by the ``train_step`` of a Keras model: the loss counts only the words that were masked.

Run it with ``python examples/steps/masked_lm.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class MaskedLanguageModel(keras.Model):
    """Predicts the words that ``sample_weight`` marks."""

    def train_step(self, inputs: Any) -> Any:
        """Train on one batch."""
        features, labels, sample_weight = inputs
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            losses = self.loss_fn(labels, predictions) * sample_weight
            loss = tf.reduce_sum(losses) / tf.reduce_sum(sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(losses, sample_weight=sample_weight)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        """The metrics that Keras resets."""
        return [self.loss_tracker]


def make() -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([6], dtype="int64")
    embedded = keras.layers.Embedding(9, 4)(inputs)
    attended = keras.layers.MultiHeadAttention(2, 2)(embedded, embedded)
    hidden = keras.layers.LayerNormalization()(embedded + attended)
    outputs = keras.layers.Dense(9, "softmax")(keras.layers.Dense(6, "relu")(hidden))
    model = MaskedLanguageModel(inputs, outputs)
    model.loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
    model.loss_tracker = keras.metrics.Mean(name="loss")
    model.compile(keras.optimizers.Adam(0.01))

    def train_step(features: Any, labels: Any, sample_weight: Any) -> Any:
        return model.train_step((features, labels, sample_weight))

    return train_step, [model, model.optimizer, model.loss_tracker]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps: words with some masked (0), all words, and 1 where one was masked."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(steps):
        words, masked = rng.integers(1, 9, (samples, 6)), rng.random((samples, 6)) < 0.3
        made.append((np.where(masked, 0, words), words, masked.astype("float64")))
    return made


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
