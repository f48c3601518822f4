"""A variational autoencoder, by the ``train_step`` of a Keras model.

Run it with ``python examples/steps/vae.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class VAE(keras.Model):
    """An ``encoder`` gives mean and log-variance, from which a sample is drawn that a ``decoder`` takes."""

    def __init__(self, encoder: Any, decoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.seed_generator = keras.random.SeedGenerator(7)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        """The metrics that Keras resets."""
        return [self.total_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data: Any) -> Any:
        """Train on one batch."""
        with tf.GradientTape() as tape:
            z_mean, z_log_var = self.encoder(data, training=True)
            epsilon = keras.random.normal(tf.shape(z_mean), dtype=z_mean.dtype, seed=self.seed_generator)
            z = z_mean + tf.exp(0.5 * z_log_var) * epsilon
            reconstruction = self.decoder(z, training=True)
            reconstruction_loss = tf.reduce_mean(tf.reduce_sum(tf.square(data - reconstruction), axis=1))
            kl_loss = -0.5 * (1 + z_log_var - tf.square(z_mean) - tf.exp(z_log_var))
            kl_loss = tf.reduce_mean(tf.reduce_sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def make() -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([5])
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    encoder = keras.Model(inputs, [keras.layers.Dense(2)(hidden), keras.layers.Dense(2)(hidden)])
    decoder = keras.Sequential([keras.Input([2]), keras.layers.Dense(6, "tanh"), keras.layers.Dense(5)])
    model = VAE(encoder, decoder)
    model.compile(keras.optimizers.Adam(0.01))
    return model.train_step, [model, model.optimizer, *model.metrics, model.seed_generator.state]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 5)),) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
