"""Generative models: variational autoencoders, adversarial losses, gradient penalties, diffusion."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    WIDTH,
    batches,
    mlp,
    normal,
    train,
    uniform,
)
from benchmarks.exactness_cases.case import Case, Training

LATENT = 2


class Sampling(keras.layers.Layer):
    """Draw from the normal distribution that two inputs describe, as in the Keras example of a VAE."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(seed)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        noise = keras.random.normal(keras.ops.shape(mean), dtype=mean.dtype, seed=self.generator)
        return mean + keras.ops.exp(0.5 * log_variance) * noise


def autoencoder(seed: int) -> Any:
    """Return a model [batch, FEATURES] -> reconstruction, mean, log variance."""
    entry = keras.Input((FEATURES,))
    x = keras.layers.Dense(WIDTH, "tanh")(entry)
    mean, log_variance = keras.layers.Dense(LATENT)(x), keras.layers.Dense(LATENT)(x)
    z = Sampling(seed)([mean, log_variance])
    x = keras.layers.Dense(WIDTH, "tanh")(z)
    return keras.Model(entry, [keras.layers.Dense(FEATURES)(x), mean, log_variance])


def divergence(mean: Any, log_variance: Any) -> Any:
    """Return the KL divergence from the prior, of every latent of every sample."""
    return -0.5 * (1.0 + log_variance - tf.square(mean) - tf.exp(log_variance))


def vae(kind: str) -> Any:
    """Return the ``make`` of a VAE whose KL is a mean over the batch, or a sum divided by a constant."""

    def make(seed: int) -> Training:
        model = autoencoder(seed)

        @tf.function
        def loss_fn(x: Any) -> Any:
            again, mean, log_variance = model(x, training=True)
            kl = divergence(mean, log_variance)
            reconstruction = tf.reduce_mean(tf.reduce_sum(tf.square(x - again), 1))
            if kind == "mean":
                return reconstruction + tf.reduce_mean(tf.reduce_sum(kl, 1))
            if kind == "beta":
                return reconstruction + 4.0 * tf.reduce_sum(kl) / 12.0
            return tf.reduce_sum(tf.square(x - again)) + tf.reduce_sum(kl)

        return train(model, loss_fn, batches(seed, normal(FEATURES)), keras.optimizers.SGD(0.01))

    return make


def stateless_vae(counted: bool) -> Any:
    """Return the ``make`` of a VAE with ``tf.random.stateless_normal``, of one seed or of the number of the step."""

    def make(seed: int) -> Training:
        encoder, decoder = mlp(2 * LATENT, layers=2), mlp(FEATURES, features=LATENT, layers=2)
        step = tf.Variable(0, dtype=tf.int32, trainable=False, name="step")

        @tf.function
        def loss_fn(x: Any) -> Any:
            mean, log_variance = tf.split(encoder(x), 2, 1)
            now = step.assign_add(1) if counted else 7
            noise = tf.random.stateless_normal(tf.shape(mean), tf.stack([seed, now]), dtype=x.dtype)
            again = decoder(mean + tf.exp(0.5 * log_variance) * noise)
            return tf.reduce_mean(tf.square(x - again)) + 0.1 * tf.reduce_mean(divergence(mean, log_variance))

        return train(encoder, loss_fn, batches(seed, normal(FEATURES)), extra=decoder.trainable_variables)

    return make


def hinge_gan(seed: int) -> Training:
    """The discriminator's hinge loss on real and on generated samples."""
    model = mlp(1)

    @tf.function
    def loss_fn(real: Any, fake: Any) -> Any:
        return tf.reduce_mean(tf.nn.relu(1.0 - model(real))) + tf.reduce_mean(tf.nn.relu(1.0 + model(fake)))

    return train(model, loss_fn, batches(seed, normal(FEATURES), normal(FEATURES)))


def generator_through_critic(seed: int) -> Training:
    """The generator is trained through a frozen discriminator, from given noise."""
    generator, critic = mlp(FEATURES, features=LATENT, layers=2), mlp(1, layers=2)
    critic.trainable = False
    loss_fn = tf.function(lambda noise: tf.reduce_mean(tf.math.softplus(-critic(generator(noise)))))
    return train(generator, loss_fn, batches(seed, normal(LATENT)))


def gradient_penalty(draw: bool) -> Any:
    """Return the ``make`` of WGAN-GP: a tape inside of the loss, between samples by drawn or given shares."""

    def make(seed: int) -> Training:
        model = mlp(1)

        @tf.function
        def loss_fn(real: Any, fake: Any, share: Any) -> Any:
            if draw:
                share = tf.random.stateless_uniform(tf.shape(share), [seed, 5], dtype=real.dtype)
            between = share * real + (1.0 - share) * fake
            with tf.GradientTape() as tape:
                tape.watch(between)
                scores = model(between)
            norm = tf.norm(tape.gradient(scores, between), axis=1)
            critic = tf.reduce_mean(model(fake)) - tf.reduce_mean(model(real))
            return critic + 10.0 * tf.reduce_mean(tf.square(norm - 1.0))

        data = batches(seed, normal(FEATURES), normal(FEATURES), uniform(1))
        return train(model, loss_fn, data, keras.optimizers.SGD(0.01))

    return make


def denoising(seed: int) -> Training:
    """Diffusion: noise of a level drawn for each sample, by Keras's generators."""
    model = mlp(FEATURES, features=FEATURES + 1)
    generator = keras.random.SeedGenerator(seed)

    @tf.function
    def loss_fn(x: Any) -> Any:
        level = keras.random.uniform((tf.shape(x)[0], 1), dtype=x.dtype, seed=generator)
        noise = keras.random.normal(tf.shape(x), dtype=x.dtype, seed=generator)
        noisy = tf.sqrt(1.0 - level) * x + tf.sqrt(level) * noise
        return tf.reduce_mean(tf.square(noise - model(tf.concat([noisy, level], 1))))

    return train(model, loss_fn, batches(seed, normal(FEATURES)))


def integer_levels(seed: int) -> Training:
    """Diffusion with integer time steps and a table of noise levels."""
    model = mlp(FEATURES, features=FEATURES + 1)
    table = tf.constant([0.1 * i for i in range(1, 10)], keras.config.floatx())

    @tf.function
    def loss_fn(x: Any) -> Any:
        times = tf.random.stateless_uniform((tf.shape(x)[0],), [seed, 1], 0, 9, tf.int32)
        level = tf.gather(table, times)[:, None]
        noise = tf.random.stateless_normal(tf.shape(x), [seed, 2], dtype=x.dtype)
        guess = model(tf.concat([tf.sqrt(1.0 - level) * x + tf.sqrt(level) * noise, level], 1))
        return tf.reduce_mean(tf.square(noise - guess))

    return train(model, loss_fn, batches(seed, normal(FEATURES)))


def gumbel(seed: int) -> Training:
    """A relaxed categorical draw for each sample; rows of noise with a fixed number of samples."""
    model = mlp(LATENT)

    @tf.function
    def loss_fn(x: Any) -> Any:
        logits = model(x)
        drawn = tf.random.stateless_uniform(tf.shape(logits), [seed, 3], 1e-6, 1.0, dtype=x.dtype)
        chosen = tf.nn.softmax((logits - tf.math.log(-tf.math.log(drawn))) / 0.7)
        return tf.reduce_mean(tf.reduce_sum(tf.square(chosen - 0.5), 1))

    return train(model, loss_fn, batches(seed, normal(FEATURES)))


def truncated(seed: int) -> Training:
    """Truncated normal noise, of which no number of samples is known before."""
    model = mlp(FEATURES)

    @tf.function
    def loss_fn(x: Any) -> Any:
        noise = tf.random.stateless_truncated_normal(tf.shape(x), [seed, 4], dtype=x.dtype)
        return tf.reduce_mean(tf.square(x - model(x + 0.3 * noise)))

    return train(model, loss_fn, batches(seed, normal(FEATURES)))


CASES = (
    Case("vae", "generative", vae("mean")),
    Case("vae_beta_by_constant", "generative", vae("beta")),
    Case("vae_sums", "generative", vae("sum")),
    Case("vae_stateless", "generative", stateless_vae(counted=False)),
    Case("vae_stateless_counted", "generative", stateless_vae(counted=True)),
    Case("gan_hinge", "generative", hinge_gan),
    Case("gan_generator", "generative", generator_through_critic),
    Case("gradient_penalty", "generative", gradient_penalty(draw=False)),
    Case("gradient_penalty_drawn", "generative", gradient_penalty(draw=True)),
    Case("diffusion", "generative", denoising),
    Case("diffusion_integer_levels", "generative", integer_levels),
    Case("gumbel_softmax", "generative", gumbel),
    Case("truncated_noise", "generative", truncated),
)
