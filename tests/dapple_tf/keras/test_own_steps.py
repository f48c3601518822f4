"""Models that override train_step, test_step or predict_step train, evaluate and predict as without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError

X = np.random.default_rng(0).uniform(size=(40, 8))
Y = X.sum(1, keepdims=True)


class Autoencoder(keras.Model):
    """A variational autoencoder as keras.io has it: its step gets the images alone."""

    def __init__(self) -> None:
        super().__init__()
        dense = keras.layers.Dense
        self.encoder = keras.Sequential([keras.Input([8]), dense(6, "relu"), dense(4)])
        self.decoder = keras.Sequential([keras.Input([2]), dense(6, "relu"), dense(8, "sigmoid")])
        self.seed = keras.random.SeedGenerator(1)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "divergence")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(data), 2, axis=1)
            noise = keras.random.normal(tf.shape(mean), seed=self.seed, dtype="float64")
            found = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
            entropy = keras.losses.binary_crossentropy(data[..., None], found[..., None])
            reconstruction = tf.reduce_mean(tf.reduce_sum(entropy, axis=1))
            of_row = -0.5 * (1 + log_variance - tf.square(mean) - tf.exp(log_variance))
            divergence = tf.reduce_mean(tf.reduce_sum(of_row, axis=1))
            loss = reconstruction + divergence
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, value in zip(self.trackers, (loss, reconstruction, divergence), strict=True):
            tracker.update_state(value)
        return {metric.name: metric.result() for metric in self.metrics}


class WithRate(keras.Sequential):
    """A model that adds to what Keras's own step does."""

    def train_step(self, data: Any) -> dict[str, Any]:
        logs: dict[str, Any] = super().train_step(data)
        return logs | {"rate": self.optimizer.learning_rate}


class Written(keras.Model):
    """A model whose steps are written out, as in Keras's guide."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]

    def call(self, x: Any, training: bool = False) -> Any:
        for part in self.parts:
            x = part(x)
        return x

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=found)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self._logs(y, found, loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        found = self(x, training=False)
        return self._logs(y, found, self.compute_loss(y=y, y_pred=found))

    def predict_step(self, data: Any) -> Any:
        return 2 * self(data[0] if isinstance(data, tuple) else data, training=False)

    def _logs(self, y: Any, found: Any, loss: Any) -> dict[str, Any]:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found)
        return {metric.name: metric.result() for metric in self.metrics}


def with_rate() -> keras.Model:
    dense = keras.layers.Dense
    return WithRate([keras.Input([8]), dense(6, "relu"), keras.layers.Dropout(0.2, seed=1), dense(4, "tanh"), dense(1)])


def run(make: Callable[[], keras.Model], *, pipelined: bool, steps: int = 1) -> tuple[dict[str, Any], list[Any]]:
    """Train two epochs, the last batch of which is short; evaluate and predict; return history and variables."""
    keras.utils.set_random_seed(3)
    model, alone = make(), make is Autoencoder
    loss = {} if alone else {"loss": "mse", "metrics": ["mae"]}
    model.compile(keras.optimizers.Adam(0.01), steps_per_execution=steps, **loss)
    if pipelined:
        dapple.keras.pipeline(model, stages=2, micro_batches=3)
    data = {"x": X} if alone else {"x": X, "y": Y, "validation_data": (X[:9], Y[:9])}
    history = model.fit(**data, epochs=2, batch_size=16, verbose=0, shuffle=False).history
    if not alone:
        history["predicted"] = model.predict(X[:5], verbose=0)
        after = model.fit(**data, batch_size=16, verbose=0, shuffle=False).history
        history |= {f"{name} of the epoch after": values for name, values in after.items()}
    return history, [variable.numpy() for variable in model.variables]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("make", [Autoencoder, with_rate, Written])
def test_a_model_with_steps_of_its_own_trains_as_without_a_pipeline(
    make: Callable[[], keras.Model], steps: int
) -> None:
    (wanted, variables), (found, ours) = (run(make, pipelined=on, steps=steps) for on in (False, True))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)
    for ours_now, theirs in zip(ours, variables, strict=True):
        np.testing.assert_allclose(ours_now.astype(float), theirs.astype(float), rtol=1e-12, atol=1e-12)


class Jacobian(keras.Sequential):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.jacobian(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_step_that_cannot_be_pipelined_is_refused_at_the_line_of_its_class() -> None:
    model = Jacobian([keras.Input([8]), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd")
    dapple.keras.pipeline(model, stages=2, micro_batches=2)
    with pytest.raises(CaptureError, match=r"test_own_steps.py:\d+: tape.jacobian"):
        model.fit(X, Y, verbose=0)
