"""ViT (Dosovitskiy et al., 2020): a transformer on the patches of an image."""

from __future__ import annotations

import random
from dataclasses import dataclass

import keras
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.images import image_workload
from dapple_tf.examples.scales import choose_size
from dapple_tf.examples.transformer import BlockOptions, add_blocks, check_heads, normal

INITIAL_STDDEV = 0.02
EPSILON = 1e-6


@dataclass(frozen=True)
class Size:
    """Sizes of a ViT; a feed-forward layer has 4 x width units, and a patch is patch x patch pixels."""

    layers: int
    width: int
    heads: int
    patch: int
    image_size: int = 224
    classes: int = 1000


SCALES = {
    "base": Size(layers=12, width=768, heads=12, patch=16),
    "large": Size(layers=24, width=1024, heads=16, patch=16),
    "huge": Size(layers=32, width=1280, heads=16, patch=14),
    "tiny": Size(layers=2, width=32, heads=2, patch=4, image_size=16, classes=5),
}


def vit(
    *,
    scale: str = "base",
    layers: int | None = None,
    image_size: int | None = None,
    dropout: float = 0.1,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> dapple.Workload:
    """Return a ViT with generated images and its optimizer.

    `scale`: "base" (B/16), "large" (L/16), "huge" (H/14) or "tiny"; `layers` and `image_size` change it.

    The loss takes images, `dtype` [batch, image_size, image_size, 3], and labels, int32 [batch], and returns
    a scalar of `dtype`: the mean cross entropy in nats.

    Raises ValueError for an unknown scale, or if patches do not tile the image.
    """
    size = choose_size(SCALES, scale, layers=layers, image_size=image_size)
    model = build_vit(size, dropout=dropout, dtype=dtype, seed=seed)
    return image_workload(
        model,
        keras.optimizers.AdamW(learning_rate, weight_decay=0.1),
        classes=size.classes,
        image_size=size.image_size,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
    )


def build_vit(size: Size, *, dropout: float, dtype: str, seed: int) -> keras.Model:
    """Build the model: `dtype` [batch, image_size, image_size, 3] in, logits [batch, classes] out.

    Layers are named embed, block_0, block_1, ..., norm and predictions.
    """
    check_heads(size.width, size.heads)
    if size.image_size % size.patch:
        raise ValueError(
            f"images of {size.image_size}x{size.image_size} cannot be cut into patches of {size.patch}x{size.patch}: "
            f"use a multiple of {size.patch}"
        )
    seeds = random.Random(seed)
    options = BlockOptions(
        width=size.width,
        heads=size.heads,
        dropout=dropout,
        causal=False,
        stddev=INITIAL_STDDEV,
        residual_stddev=INITIAL_STDDEV,
        epsilon=EPSILON,
    )
    images = keras.Input([size.image_size, size.image_size, 3], dtype=dtype, name="images")
    x = PatchEmbed(size, dropout, seeds, name="embed", dtype=dtype)(images)
    x = add_blocks(x, size.layers, options, seeds, dtype=dtype)
    logits = keras.layers.Dense(
        size.classes, kernel_initializer=normal(seeds, INITIAL_STDDEV), name="predictions", dtype=dtype
    )(x[:, 0])
    return keras.Model(images, logits, name="vit")


class PatchEmbed(keras.layers.Layer):
    """A class token, then the projected patches, and positions: images to [batch, 1 + patches, width]."""

    def __init__(self, size: Size, dropout: float, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.width = size.width
        self.project = keras.layers.Conv2D(
            size.width,
            size.patch,
            size.patch,
            kernel_initializer=normal(seeds, INITIAL_STDDEV),
            name="project",
            dtype=dtype,
        )
        self.initializer = normal(seeds, INITIAL_STDDEV)
        self.dropout = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)
        self.patches = (size.image_size // size.patch) ** 2

    def build(self, _: object) -> None:
        self.class_token = self.add_weight(shape=[1, 1, self.width], initializer="zeros", name="class_token")
        self.positions = self.add_weight(
            shape=[1, 1 + self.patches, self.width], initializer=self.initializer, name="positions"
        )

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        patches = ops.reshape(self.project(images), (-1, self.patches, self.width))
        token = ops.repeat(self.class_token, ops.shape(images)[0], axis=0)
        return self.dropout(ops.concatenate([token, patches], axis=1) + self.positions, training=training)
