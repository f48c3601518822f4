"""Train a GPT on the bytes of a text with a learning rate schedule of one's own, over two stages.

Run it with ``python examples/keras/language_model.py``, or as a job of two processes with ``mpirun -np 2 python
examples/keras/language_model.py``. With the argument ``plain`` it trains without the pipeline; the history is the same.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple

LENGTH, WIDTH = 16, 32


@keras.saving.register_keras_serializable("examples")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that grows to ``peak`` in ``steps`` steps, then falls by the root of the steps."""

    def __init__(self, peak: float, steps: int) -> None:
        self.peak, self.steps = peak, steps

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        done = (tf.cast(step, tf.float32) + 1) / self.steps
        return self.peak * tf.minimum(done, tf.math.rsqrt(done))

    def get_config(self) -> dict[str, float]:
        return {"peak": self.peak, "steps": self.steps}


@keras.saving.register_keras_serializable("examples")
class Block(keras.layers.Layer):
    """Attention to the bytes before, and a feed-forward network."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.first_norm, self.second_norm = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1)
        self.wide = keras.layers.Dense(4 * WIDTH, "gelu")
        self.narrow = keras.layers.Dense(WIDTH)
        self.dropout = keras.layers.Dropout(0.1)

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        normed = self.first_norm(x)
        x = x + self.attention(normed, normed, use_causal_mask=True, training=training)
        return x + self.dropout(self.narrow(self.wide(self.second_norm(x))), training=training)


@keras.saving.register_keras_serializable("examples")
class GPT(keras.Model):
    """Gives a score to each byte that may come next."""

    def __init__(self, layers: int, **options: object) -> None:
        super().__init__(**options)
        self.embedding = keras.layers.Embedding(256, WIDTH)
        self.positions = keras.layers.Embedding(LENGTH, WIDTH)
        self.blocks = [Block(name=f"block_{i}") for i in range(layers)]
        self.norm = keras.layers.LayerNormalization()
        self.scores = keras.layers.Dense(256, name="scores")

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        hidden = self.embedding(x) + self.positions(tf.range(LENGTH))
        for block in self.blocks:
            hidden = block(hidden, training=training)
        return self.scores(self.norm(hidden))


def make_dataset(windows: int) -> tf.data.Dataset:
    """Return batches of windows of a text, each with the same window one byte later."""
    text = " ".join(f"{i} and {i} make {2 * i}." for i in range(500)).encode()
    found = np.frombuffer(text, np.uint8)[: windows * (LENGTH + 1)].reshape(windows, LENGTH + 1).astype("int32")
    return tf.data.Dataset.from_tensor_slices((found[:, :-1], found[:, 1:])).shuffle(windows, seed=0).batch(32)


def train(*, pipelined: bool = True) -> dict[str, list[float]]:
    """Train three epochs, and return the history."""
    keras.utils.set_random_seed(0)
    model = GPT(layers=2, name="gpt")
    model.compile(
        keras.optimizers.AdamW(WarmUp(0.003, 8), weight_decay=0.01, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    if pipelined:
        dapple.keras.pipeline(model, stages=["block_1"], micro_batches=4)

    # 180 windows: the last batch is a smaller one. The data set shuffles itself.
    history = model.fit(make_dataset(180), epochs=3, shuffle=False, verbose=2)
    return history.history


if __name__ == "__main__":
    dapple.init()
    train(pipelined="plain" not in sys.argv[1:])
