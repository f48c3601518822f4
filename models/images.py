"""Generated pictures whose labels can be learnt: one smooth random picture per class, made noisy."""

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
    """Generate batches without end; iterating again gives the same batches again.

    Each element is (images, labels): `dtype` [batch_size, image_size, image_size, 3] and int32 [batch_size].
    `noise` is its standard deviation in units of that of the pictures.
    """
    coarse = np.random.default_rng(seed).standard_normal((classes, 4, 4, 3))
    pictures = tf.cast(tf.image.resize(coarse, (image_size, image_size), method="bicubic"), dtype)

    def draw(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        stream = tf.stack([tf.constant(seed, tf.int64), number])
        labels = tf.random.stateless_uniform([batch_size], stream, maxval=classes, dtype=tf.int32)
        grain = tf.random.stateless_normal([batch_size, image_size, image_size, 3], stream, dtype=pictures.dtype)
        return tf.gather(pictures, labels) + noise * grain, labels

    return tf.data.Dataset.counter().map(draw).prefetch(2)
