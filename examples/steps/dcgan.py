"""A DCGAN as TensorFlow's tutorial trains it: one forward under two tapes, then both updates.

Run it with ``python examples/steps/dcgan.py``.
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
        [
            keras.Input([3]),
            keras.layers.Dense(2 * 2 * 3, use_bias=False),
            keras.layers.LeakyReLU(),
            keras.layers.Reshape([2, 2, 3]),
            keras.layers.Conv2DTranspose(2, 3, strides=2, padding="same", use_bias=False, activation="tanh"),
            keras.layers.Conv2DTranspose(1, 3, strides=2, padding="same", use_bias=False, activation="tanh"),
        ]
    )
    discriminator = keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(2, 3, strides=2, padding="same"),
            keras.layers.LeakyReLU(),
            keras.layers.Dropout(0.3, seed=4),
            keras.layers.Conv2D(3, 3, strides=2, padding="same"),
            keras.layers.LeakyReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    generator_optimizer, discriminator_optimizer = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-2)

    def discriminator_loss(real_output: Any, fake_output: Any) -> Any:
        real_loss = cross_entropy(tf.ones_like(real_output), real_output)
        fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
        return real_loss + fake_loss

    @tf.function
    def train_step(images: Any, noise: Any) -> Any:
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated_images = generator(noise, training=True)

            real_output = discriminator(images, training=True)
            fake_output = discriminator(generated_images, training=True)

            gen_loss = cross_entropy(tf.ones_like(fake_output), fake_output)
            disc_loss = discriminator_loss(real_output, fake_output)

        gradients_of_generator = gen_tape.gradient(gen_loss, generator.trainable_variables)
        gradients_of_discriminator = disc_tape.gradient(disc_loss, discriminator.trainable_variables)

        generator_optimizer.apply_gradients(zip(gradients_of_generator, generator.trainable_variables))
        discriminator_optimizer.apply_gradients(zip(gradients_of_discriminator, discriminator.trainable_variables))
        return gen_loss, disc_loss

    return train_step, [generator, discriminator, generator_optimizer, discriminator_optimizer]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 8, 8, 1)), rng.normal(size=(samples, 3))) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
