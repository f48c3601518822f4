"""Classify sequences of tokens with a BERT of keras_hub, made from its configuration, over two stages.

Run it with ``python examples/keras/text_classification.py`` (it needs ``pip install keras-hub``), or as a job of two
processes with ``mpirun -np 2 python examples/keras/text_classification.py``. With the argument ``plain`` it trains
without the pipeline; the history is the same.
"""

from __future__ import annotations

import sys

import keras
import keras_hub
import numpy as np

import dapple_tf as dapple

TOKENS, LENGTH = 50, 12


def make_texts(samples: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return padded sequences of tokens, and whether token 7 is among them."""
    random = np.random.default_rng(0)
    lengths = random.integers(4, LENGTH + 1, (samples, 1))
    mask = np.arange(LENGTH) < lengths
    tokens = np.where(mask, random.integers(8, TOKENS, (samples, LENGTH)), 0)
    found = random.integers(0, 2, samples)
    tokens[found == 1, 2] = 7
    inputs = {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": mask.astype("int32")}
    return inputs, found


def train(*, pipelined: bool = True) -> dict[str, list[float]]:
    """Train three epochs, and return the history."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)
    model.compile(
        keras.optimizers.AdamW(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    if pipelined:
        dapple.keras.pipeline(model, stages=2, micro_batches=4)

    texts, found = make_texts(160)
    weights = {0: 1.0, 1: 1.5}
    history = model.fit(texts, found, batch_size=32, epochs=3, class_weight=weights, shuffle=False, verbose=2)
    return history.history


if __name__ == "__main__":
    dapple.init()
    train(pipelined="plain" not in sys.argv[1:])
