"""A critic and a generator, one after the other: each sees the variables as the update before has left them.

Run it with ``python examples/steps/gan.py``.
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
    loss_object = keras.losses.BinaryCrossentropy(from_logits=True)
    generator_optimizer, critic_optimizer = keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.01)
    critic_mean = keras.metrics.Mean()

    @tf.function
    def train_step(real: Any, noise: Any) -> Any:
        with tf.GradientTape() as tape:
            made = generator(noise, training=True)
            of_real, of_made = critic(real, training=True), critic(made, training=True)
            critic_loss = loss_object(tf.ones_like(of_real), of_real) + loss_object(tf.zeros_like(of_made), of_made)
        gradients = tape.gradient(critic_loss, critic.trainable_variables)
        critic_optimizer.apply_gradients(zip(gradients, critic.trainable_variables))

        with tf.GradientTape() as tape:
            of_made = critic(generator(noise, training=True), training=True)
            generator_loss = loss_object(tf.ones_like(of_made), of_made)
        gradients = tape.gradient(generator_loss, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables))
        critic_mean.update_state(critic_loss)
        return {"critic": critic_loss, "generator": generator_loss, "mean": critic_mean.result(), "made": made}

    return train_step, [generator, critic, generator_optimizer, critic_optimizer, critic_mean]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 4)), rng.normal(size=(samples, 3))) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
