"""Translate sequences with LSTMs, attention and masks: the target is the source backwards. Over two stages.

Run it with ``python examples/keras/translation.py``, or as a job of two processes with ``mpirun -np 2 python
examples/keras/translation.py``. With the argument ``plain`` it trains without the pipeline; the history is the same.
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import dapple_tf as dapple

TOKENS, LENGTH, START = 12, 8, 11


def make_sentences(samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sources, what the decoder has seen of the targets, and the targets; 0 pads the ends."""
    random = np.random.default_rng(0)
    sources, targets = np.zeros((2, samples, LENGTH), "int32")
    for source, target in zip(sources, targets, strict=True):
        length = random.integers(3, LENGTH + 1)
        source[:length] = random.integers(1, START, length)
        target[:length] = source[:length][::-1]
    seen = np.where(targets > 0, np.roll(targets, 1, 1), 0)
    seen[:, 0] = START
    return sources, seen, targets


def train(*, pipelined: bool = True) -> dict[str, list[float]]:
    """Train three epochs, and return the history."""
    keras.utils.set_random_seed(0)
    source, seen = (
        keras.Input([LENGTH], dtype="int32", name="source"),
        keras.Input([LENGTH], dtype="int32", name="seen"),
    )
    words = keras.layers.Embedding(TOKENS, 16, mask_zero=True, name="source_words")(source)
    encoded, *state = keras.layers.LSTM(24, return_sequences=True, return_state=True, name="encoder")(words)
    words = keras.layers.Embedding(TOKENS, 16, mask_zero=True, name="target_words")(seen)
    decoded = keras.layers.LSTM(24, return_sequences=True, name="decoder")(words, initial_state=state)
    attended = keras.layers.AdditiveAttention(name="attention")([decoded, encoded])
    both = keras.layers.Concatenate(name="both")([decoded, attended])
    scores = keras.layers.Dense(TOKENS, name="scores")(both)
    model = keras.Model([source, seen], scores)
    model.compile(
        keras.optimizers.RMSprop(0.005, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],  # weighted: only what is not padded counts
    )
    if pipelined:
        dapple.keras.pipeline(model, stages=["target_words"], micro_batches=4)

    sources, seen_targets, targets = make_sentences(160)
    history = model.fit([sources, seen_targets], targets, batch_size=32, epochs=3, validation_split=0.1, verbose=2)
    return history.history


if __name__ == "__main__":
    dapple.init()
    train(pipelined="plain" not in sys.argv[1:])
