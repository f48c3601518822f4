"""Generated images with learnable labels: one smooth random image per class, plus noise."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples.transformer import cross_entropy


def labelled_images(
    *,
    classes: int,
    image_size: int,
    batch_size: int,
    seed: int = 0,
    noise: float = 1.0,
    dtype: str = "float32",
) -> tf.data.Dataset:
    """Return an endless data set of batches; iterating again gives the same batches again.

    Each element is (images, labels): `dtype` [batch_size, image_size, image_size, 3] and int32 [batch_size].
    `noise`: its standard deviation, as a multiple of that of the images.
    """
    coarse = np.random.default_rng(seed).standard_normal((classes, 4, 4, 3))
    coarse = tf.constant(coarse)

    def draw(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        stream = tf.stack([tf.constant(seed, tf.int64), number])
        labels = tf.random.stateless_uniform([batch_size], stream, maxval=classes, dtype=tf.int32)
        smooth = tf.image.resize(tf.gather(coarse, labels), (image_size, image_size), method="bicubic")
        grain = tf.random.stateless_normal([batch_size, image_size, image_size, 3], stream, dtype=dtype)
        return tf.cast(smooth, dtype) + noise * grain, labels

    return tf.data.Dataset.counter().map(draw).prefetch(2)


def image_workload(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    *,
    classes: int,
    image_size: int,
    batch_size: int,
    seed: int,
    dtype: str,
) -> dapple.Workload:
    """Return a model that classifies images, images in and logits out, with its optimizer and `labelled_images`.

    The loss is the mean cross entropy, in nats.
    """

    def loss_fn(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return cross_entropy(labels, model(images, training=True))

    data = labelled_images(classes=classes, image_size=image_size, batch_size=batch_size, seed=seed, dtype=dtype)
    return dapple.Workload(loss_fn, optimizer, data)
