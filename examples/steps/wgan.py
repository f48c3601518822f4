"""A Wasserstein GAN: two critic steps with clipped weights, then the generator.

Run it with ``python examples/steps/wgan.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def make() -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)
    generator = keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(4)]
    )
    critic = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    )
    generator_optimizer, critic_optimizer = keras.optimizers.RMSprop(0.02), keras.optimizers.RMSprop(0.01)

    def train_step(real: Any, noise: Any) -> Any:
        critic_losses = []
        for number in range(2):
            latent = noise[:, number]
            with tf.GradientTape() as tape:
                critic_loss = tf.reduce_mean(critic(generator(latent))) - tf.reduce_mean(critic(real))
            gradients = tape.gradient(critic_loss, critic.trainable_variables)
            critic_optimizer.apply_gradients(zip(gradients, critic.trainable_variables))
            for weight in critic.trainable_variables:
                weight.assign(tf.clip_by_value(weight, -0.2, 0.2))
            critic_losses.append(critic_loss)
        with tf.GradientTape() as tape:
            generator_loss = -tf.reduce_mean(critic(generator(noise[:, 2])))
        gradients = tape.gradient(generator_loss, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables))
        return critic_losses, generator_loss

    return train_step, [generator, critic, generator_optimizer, critic_optimizer]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps: real samples, and noise for each of the three forwards."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 4)), rng.normal(size=(samples, 3, 3))) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
