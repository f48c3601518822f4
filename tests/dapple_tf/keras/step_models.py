"""Models whose ``train_step`` is their own, as the examples of keras.io write them, each trained by ``fit``.

The networks are small. All is made anew, from the same seeds, at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

Wrap = Callable[[keras.Model], Any]
"""Puts a pipeline under a compiled model, or does nothing."""

SAMPLES, BATCH = 20, 8


def rows(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(SAMPLES, *shape))


def dense(width: int, activation: str | None = "tanh") -> Any:
    return keras.layers.Dense(width, activation)


# --- A variational autoencoder


class Sampling(keras.layers.Layer):
    """Draws from the distribution that mean and log-variance describe."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        z_mean, z_log_var = inputs
        batch = ops.shape(z_mean)[0]
        dim = ops.shape(z_mean)[1]
        epsilon = keras.random.normal(shape=(batch, dim), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    def __init__(self, encoder: Any, decoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1,)))
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


def vae(wrap: Wrap, **fit: Any) -> tuple[keras.Model, Any]:
    inputs = keras.Input([6, 1])
    hidden = dense(8, "relu")(keras.layers.Flatten()(inputs))
    z_mean, z_log_var = keras.layers.Dense(2)(hidden), keras.layers.Dense(2)(hidden)
    encoder = keras.Model(inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])])
    decoder = keras.Sequential([keras.Input([2]), dense(8, "relu"), dense(6, "sigmoid"), keras.layers.Reshape([6, 1])])
    model = VAE(encoder, decoder)
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    wrap(model)
    return model, model.fit(1 / (1 + np.exp(-rows(6, 1))), **fit)


# --- A masked language model


class MaskedLanguageModel(keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, inputs: Any) -> dict[str, Any]:
        if len(inputs) == 3:
            features, labels, sample_weight = inputs
        else:
            features, labels = inputs
            sample_weight = None
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = self.loss_fn(labels, predictions, sample_weight=sample_weight)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars))
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


def masked_lm(wrap: Wrap, **fit: Any) -> tuple[keras.Model, Any]:
    inputs = keras.Input([6], dtype="int64")
    embedded = keras.layers.Embedding(9, 4)(inputs)
    attended = keras.layers.MultiHeadAttention(2, 2)(embedded, embedded)
    hidden = keras.layers.LayerNormalization()(embedded + keras.layers.Dropout(0.1, seed=2)(attended))
    model = MaskedLanguageModel(inputs, keras.layers.Dense(9, "softmax")(dense(6)(hidden)))
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    wrap(model)
    rng = np.random.default_rng(0)
    words, masked = rng.integers(1, 9, (SAMPLES, 6)), rng.random((SAMPLES, 6)) < 0.3
    given = np.where(masked, 0, words), words, masked.astype("float64")
    return model, model.fit(tf.data.Dataset.from_tensor_slices(given).batch(BATCH), **_without_batch(fit))


def _without_batch(fit: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fit.items() if name != "batch_size"}


# --- A siamese network with the triplet loss


class SiameseModel(keras.Model):
    def __init__(self, siamese_network: Any, margin: float = 0.5) -> None:
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        return self.siamese_network(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.siamese_network.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        loss = self._compute_loss(data)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data: Any) -> Any:
        ap_distance, an_distance = self.siamese_network(data)
        loss = ap_distance - an_distance
        return tf.maximum(loss + self.margin, 0.0)

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


class Distances(keras.layers.Layer):
    def call(self, anchor: Any, positive: Any, negative: Any) -> Any:
        ap_distance = ops.sum(tf.square(anchor - positive), -1)
        an_distance = ops.sum(tf.square(anchor - negative), -1)
        return ap_distance, an_distance


def siamese(wrap: Wrap, **fit: Any) -> tuple[keras.Model, Any]:
    embedding = keras.Sequential([keras.Input([5]), dense(8), dense(6), keras.layers.Dense(3)])
    inputs = [keras.Input([5], name=name) for name in ("anchor", "positive", "negative")]
    model = SiameseModel(keras.Model(inputs, Distances()(*(embedding(item) for item in inputs))))
    model.compile(optimizer=keras.optimizers.Adam(0.01), weighted_metrics=[])
    wrap(model)
    anchor = rows(5)
    triples = tf.data.Dataset.from_tensor_slices((anchor, anchor + 0.1 * rows(5, seed=1), rows(5, seed=2)))
    batches = triples.batch(BATCH)
    return model, model.fit(batches, validation_data=batches.take(1), **_without_batch(fit))


# --- A DCGAN: its two optimizers are given to compile, and one batch has generated and real images


class GAN(keras.Model):
    def __init__(self, discriminator: Any, generator: Any, latent_dim: int) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images: Any) -> dict[str, Any]:
        batch_size = ops.shape(real_images)[0]
        random_latent_vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        generated_images = self.generator(random_latent_vectors)
        combined_images = ops.concatenate([generated_images, real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * keras.random.uniform((2 * batch_size, 1), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        random_latent_vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(random_latent_vectors))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def gan(wrap: Wrap, **fit: Any) -> tuple[keras.Model, Any]:
    discriminator = keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(2, 4, strides=2, padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Conv2D(3, 4, strides=2, padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(2 * 2 * 3),
            keras.layers.Reshape([2, 2, 3]),
            keras.layers.Conv2DTranspose(2, 4, strides=2, padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
        ]
    )
    model = GAN(discriminator, generator, 3)
    model.compile(
        d_optimizer=keras.optimizers.Adam(0.01),
        g_optimizer=keras.optimizers.Adam(0.01),
        loss_fn=keras.losses.BinaryCrossentropy(),
    )
    wrap(model)
    return model, model.fit(rows(8, 8, 1), **fit)


# --- Distillation of a teacher


class Distiller(keras.Model):
    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self,
        optimizer: Any,
        metrics: Any,
        student_loss_fn: Any,
        distillation_loss_fn: Any,
        alpha: float = 0.1,
        temperature: float = 3,
    ) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            student_predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, student_predictions)
            distillation_loss = (
                self.distillation_loss_fn(
                    tf.nn.softmax(teacher_predictions / self.temperature, axis=1),
                    tf.nn.softmax(student_predictions / self.temperature, axis=1),
                )
                * self.temperature**2
            )
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        trainable_vars = self.student.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, student_predictions)
        results = self.get_metrics_result()
        return results | {"student_loss": student_loss, "distillation_loss": distillation_loss}


def distillation(wrap: Wrap, **fit: Any) -> tuple[keras.Model, Any]:
    def network(width: int) -> Any:
        return keras.Sequential([keras.Input([4]), dense(width), dense(width), keras.layers.Dense(3)])

    model = Distiller(student=network(5), teacher=network(8))
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
    )
    wrap(model)
    return model, model.fit(rows(4), np.random.default_rng(0).integers(0, 3, SAMPLES), **fit)


MODELS: dict[str, Callable[..., tuple[keras.Model, Any]]] = {
    "vae": vae,
    "masked_lm": masked_lm,
    "siamese": siamese,
    "gan": gan,
    "distillation": distillation,
}


class Seen(keras.callbacks.Callback):
    """Notes the weights at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[list[Any]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weights.append([variable.numpy() for variable in self.model.weights])


def train_model(name: str, folder: Path, wrap: Wrap) -> tuple[dict[str, list[float]], list[list[Any]], list[Any]]:
    """Train two epochs, the last batch of which is short; return the history and the weights after each, and all."""
    keras.utils.set_random_seed(3)
    seen = Seen()
    callbacks = [
        seen,
        keras.callbacks.CSVLogger(str(folder / f"{name}.csv")),
        keras.callbacks.TerminateOnNaN(),
    ]
    model, history = MODELS[name](wrap, epochs=2, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    return history.history, seen.weights, model.get_weights()
