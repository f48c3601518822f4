"""Generated images with learnable labels: one smooth random image per class, plus noise."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


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
