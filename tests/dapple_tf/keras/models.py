"""Small compiled models of every kind, and their data: 22 samples, so that the last batch of 8 is a smaller one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

RANDOM = np.random.default_rng(0)
SAMPLES = 22
X = RANDOM.normal(size=(SAMPLES, 6))
Y = RANDOM.normal(size=(SAMPLES, 1))
CLASSES = RANDOM.integers(0, 3, SAMPLES)
WEIGHTS = RANDOM.uniform(0.1, 2, SAMPLES)
IDS = np.where(np.arange(7) < RANDOM.integers(1, 8, (SAMPLES, 1)), RANDOM.integers(1, 11, (SAMPLES, 7)), 0)
TAGS = RANDOM.integers(0, 3, (SAMPLES, 7))


def sequential(**options: Any) -> keras.Model:
    layers = [keras.layers.Dense(5, "tanh", name="hidden"), keras.layers.Dropout(0.3, name="dropout")]
    model = keras.Sequential([keras.Input([6]), *layers, keras.layers.Dense(1, name="last")], name="net")
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", **options})
    return model


def classifier(**options: Any) -> keras.Model:
    inputs = keras.Input([6])
    hidden = keras.layers.Dense(5, "tanh", name="hidden")(inputs)
    scores = keras.layers.Dense(3, "softmax", name="scores")(hidden)
    model = keras.Model(inputs, scores, name="net")
    model.compile(
        **{"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "sparse_categorical_crossentropy", **options}
    )
    return model


def two_outputs(as_dict: bool = False, **options: Any) -> keras.Model:
    inputs = keras.Input([6])
    hidden = keras.layers.Dense(5, "tanh", name="hidden")(inputs)
    outputs = {
        "value": keras.layers.Dense(1, name="value")(hidden),
        "kind": keras.layers.Dense(3, "softmax", name="kind")(hidden),
    }
    model = keras.Model(inputs, outputs if as_dict else list(outputs.values()), name="net")
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": ["mse", CROSS_ENTROPY], **options})
    return model


CROSS_ENTROPY = "sparse_categorical_crossentropy"


class PassingFit(keras.Sequential):
    """A model whose ``fit`` takes options without naming them, as those of keras_hub do."""

    def fit(self, x: Any, y: Any, **options: Any) -> Any:
        return super().fit(x, y, **options)


def tagger(**options: Any) -> keras.Model:
    """A masked model: each id gets one of three tags."""
    layers = [
        keras.layers.Embedding(11, 4, mask_zero=True, name="embedding"),
        keras.layers.LSTM(5, return_sequences=True, name="lstm"),
        keras.layers.Dense(3, "softmax", name="tags"),
    ]
    model = PassingFit([keras.Input([7], dtype="int32"), *layers], name="net")
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": CROSS_ENTROPY, **options})
    return model


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model that is not built before its first batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l1", name="hidden")
        self.dropout = keras.layers.Dropout(0.3, name="dropout")
        self.last = keras.layers.Dense(1, name="last")

    def call(self, x: Any, training: bool | None = None) -> Any:
        hidden = self.hidden(x)
        if training:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
        return self.last(self.dropout(hidden, training=training))


def subclassed(**options: Any) -> keras.Model:
    model = Subclassed(name="net")
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", **options})
    return model
