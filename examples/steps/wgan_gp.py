"""A Wasserstein GAN with a gradient penalty, by the ``train_step`` of a Keras model: several critic steps a step.

Run it with ``python examples/steps/wgan_gp.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class WGAN(keras.Model):
    """A critic, trained ``critic_steps`` times a step, and a generator."""

    def __init__(self, discriminator: Any, generator: Any, critic_steps: int, gp_weight: float = 10.0) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_steps = critic_steps
        self.gp_weight = gp_weight
        self.seed_generator = keras.random.SeedGenerator(3)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        """Take an optimizer for each network."""
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer

    def gradient_penalty(self, real: Any, fake: Any) -> Any:
        """Return the penalty for gradients, on points between real and made samples, whose norm is not 1."""
        alpha = keras.random.uniform([tf.shape(real)[0], 1], dtype=real.dtype, seed=self.seed_generator)
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=1))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, data: Any) -> Any:
        """Train on one batch."""
        real, latent = data
        for i in range(self.d_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(latent[:, i], training=True)
                fake_logits = self.discriminator(fake, training=True)
                real_logits = self.discriminator(real, training=True)
                d_cost = tf.reduce_mean(fake_logits) - tf.reduce_mean(real_logits)
                d_loss = d_cost + self.gradient_penalty(real, fake) * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables))

        with tf.GradientTape() as tape:
            generated = self.generator(latent[:, self.d_steps], training=True)
            g_loss = -tf.reduce_mean(self.discriminator(generated, training=True))
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


def make(critic_steps: int = 2) -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)
    generator = keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(4)]
    )
    critic = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    )
    model = WGAN(critic, generator, critic_steps)
    model.compile(keras.optimizers.Adam(0.01, beta_1=0.5), keras.optimizers.Adam(0.02, beta_1=0.5))

    def train_step(real: Any, latent: Any) -> Any:
        return model.train_step((real, latent))

    return train_step, [model, model.d_optimizer, model.g_optimizer, model.seed_generator.state]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps: real samples, and noise for up to five critic steps and the generator."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 4)), rng.normal(size=(samples, 6, 3))) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
