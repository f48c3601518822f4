"""An actor and a critic learn from given rollouts, each with its own optimizer.

Run it with ``python examples/steps/actor_critic.py``.
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
        layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(outputs)]
        return keras.Sequential([keras.Input([4]), *layers])

    actor, critic = network(3), network(1)
    actor_optimizer, critic_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)

    @tf.function
    def train_step(states: Any, actions: Any, returns: Any) -> Any:
        with tf.GradientTape() as tape:
            values = critic(states, training=True)[:, 0]
            critic_loss = tf.reduce_mean(tf.square(returns - values))
        gradients, critic_norm = tf.clip_by_global_norm(tape.gradient(critic_loss, critic.trainable_variables), 0.5)
        critic_optimizer.apply_gradients(zip(gradients, critic.trainable_variables))

        with tf.GradientTape() as tape:
            logits = actor(states, training=True)
            chosen = -tf.nn.sparse_softmax_cross_entropy_with_logits(labels=actions, logits=logits)
            advantages = tf.stop_gradient(returns - critic(states)[:, 0])
            entropy = -tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), axis=1)
            actor_loss = -tf.reduce_mean(chosen * advantages) - 0.01 * tf.reduce_mean(entropy)
        gradients = tape.gradient(actor_loss, actor.trainable_variables)
        actor_optimizer.apply_gradients(zip(gradients, actor.trainable_variables))
        return critic_loss, actor_loss, critic_norm

    return train_step, [actor, critic, actor_optimizer, critic_optimizer]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(samples, 4)), rng.integers(0, 3, samples), rng.normal(size=samples)) for _ in range(steps)
    ]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
