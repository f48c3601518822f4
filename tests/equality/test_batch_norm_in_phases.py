"""Batch norm in a step of two phases: the reference that its documented exception describes, written by hand.

The critic's phase does not train the generator, so its batch norm takes statistics of the whole batch, once. In the
generator's phase each micro-batch is normalised by itself, and moves the moving statistics in turn.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from tests.equality.training_steps import BATCH, values_of

pytestmark = pytest.mark.usefixtures("float64")

MICRO_BATCHES = 3


def models() -> tuple[Any, Any, Any, Any]:
    keras.utils.set_random_seed(5)
    hidden = [keras.layers.Dense(6), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Activation("tanh")]
    generator = keras.Sequential([keras.Input([3]), *hidden, keras.layers.Dense(4)])
    critic = keras.Sequential([keras.Input([4]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    return generator, critic, keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.1)


def step_of(made: tuple[Any, Any, Any, Any], parts: int) -> Any:
    """Return the step, whose generator's phase adds up the gradients of ``parts`` equal micro-batches."""
    generator, critic, of_generator, of_critic = made

    def train_step(real: Any, noise: Any) -> Any:
        with tf.GradientTape() as tape:
            fake = critic(generator(noise, training=True), training=True)
            critic_loss = tf.reduce_mean(fake) - tf.reduce_mean(critic(real, training=True))
        gradients = tape.gradient(critic_loss, critic.trainable_variables)
        of_critic.apply_gradients(zip(gradients, critic.trainable_variables, strict=True))
        losses, total = [], None
        for rows in tf.split(noise, parts) if parts > 1 else [noise]:
            with tf.GradientTape() as tape:
                loss = -tf.reduce_mean(critic(generator(rows, training=True), training=True))
            found = tape.gradient(loss, generator.trainable_variables)
            total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
            losses.append(loss)
        mean = [gradient / parts for gradient in total]
        of_generator.apply_gradients(zip(mean, generator.trainable_variables, strict=True))
        return critic_loss, tf.add_n(losses) / parts

    return train_step


@pytest.mark.filterwarnings("ignore::dapple_tf.errors.DappleWarning")
def test_a_generator_with_batch_norm_trains_as_its_documented_reference() -> None:
    ours, reference = models(), models()
    by_hand = tf.function(step_of(reference, MICRO_BATCHES))
    step = dapple.train_step(step_of(ours, 1), stages=2, micro_batches=MICRO_BATCHES)
    rng = np.random.default_rng(0)
    for _ in range(3):
        real, noise = rng.normal(size=(BATCH, 4)), rng.normal(size=(BATCH, 3))
        found = step(real, noise)
        np.testing.assert_allclose(found, by_hand(tf.constant(real), tf.constant(noise)), rtol=1e-12, atol=1e-12)
    for mine, one in zip(values_of(list(ours)), values_of(list(reference)), strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-12, atol=1e-12)
