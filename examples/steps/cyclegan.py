"""Two generators and two critics, as in CycleGAN: a persistent tape over both cycles, four gradients, four updates.

Run it with ``python examples/steps/cyclegan.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def make() -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)

    def network(outputs: int) -> Any:
        return keras.Sequential(
            [
                keras.Input([3]),
                keras.layers.Dense(5, "tanh"),
                keras.layers.Dense(4, "tanh"),
                keras.layers.Dense(outputs),
            ]
        )

    generator_g, generator_f, discriminator_x, discriminator_y = network(3), network(3), network(1), network(1)
    optimizers = [keras.optimizers.Adam(0.01, beta_1=0.5) for _ in range(4)]
    loss_obj = keras.losses.BinaryCrossentropy(from_logits=True)

    def generator_loss(generated: Any) -> Any:
        return loss_obj(tf.ones_like(generated), generated)

    def discriminator_loss(real: Any, generated: Any) -> Any:
        return 0.5 * (loss_obj(tf.ones_like(real), real) + loss_obj(tf.zeros_like(generated), generated))

    def cycle_loss(real: Any, cycled: Any) -> Any:
        return 10 * tf.reduce_mean(tf.abs(real - cycled))

    @tf.function
    def train_step(real_x: Any, real_y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            fake_y = generator_g(real_x, training=True)
            cycled_x = generator_f(fake_y, training=True)
            fake_x = generator_f(real_y, training=True)
            cycled_y = generator_g(fake_x, training=True)

            disc_real_x, disc_real_y = discriminator_x(real_x, training=True), discriminator_y(real_y, training=True)
            disc_fake_x, disc_fake_y = discriminator_x(fake_x, training=True), discriminator_y(fake_y, training=True)

            total_cycle_loss = cycle_loss(real_x, cycled_x) + cycle_loss(real_y, cycled_y)
            total_gen_g_loss = generator_loss(disc_fake_y) + total_cycle_loss
            total_gen_f_loss = generator_loss(disc_fake_x) + total_cycle_loss
            disc_x_loss = discriminator_loss(disc_real_x, disc_fake_x)
            disc_y_loss = discriminator_loss(disc_real_y, disc_fake_y)

        losses = [total_gen_g_loss, total_gen_f_loss, disc_x_loss, disc_y_loss]
        models = [generator_g, generator_f, discriminator_x, discriminator_y]
        gradients = [tape.gradient(loss, model.trainable_variables) for loss, model in zip(losses, models)]
        for of_model, model, optimizer in zip(gradients, models, optimizers):
            optimizer.apply_gradients(zip(of_model, model.trainable_variables))
        return losses

    return train_step, [generator_g, generator_f, discriminator_x, discriminator_y, *optimizers]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 3)), rng.normal(size=(samples, 3))) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
