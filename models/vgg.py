"""VGG (Simonyan and Zisserman): stacks of 3x3 convolutions, each at half the resolution of the one before."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import keras

import dapple_tf as dapple
from dapple_tf.examples.images import image_workload
from dapple_tf.examples.scales import choose_size

CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions in each of the five stacks, by the number of layers with weights."""


@dataclass(frozen=True)
class Size:
    """Sizes of a VGG: see `build_vgg`."""

    depth: int = 11
    width: int = 64
    hidden: int = 512
    classes: int = 10
    image_size: int = 32
    dropout: float = 0.0


SCALES = {
    "19": Size(depth=19, hidden=4096, classes=1000, image_size=224, dropout=0.5),
    "16": Size(depth=16, hidden=4096, classes=1000, image_size=224, dropout=0.5),
    "small": Size(),
    "tiny": Size(width=4, hidden=16, classes=3),
}


def vgg(
    *,
    scale: str = "small",
    depth: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    classes: int | None = None,
    image_size: int | None = None,
    dropout: float | None = None,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 1e-4,
    seed: int = 0,
) -> dapple.Workload:
    """Return a VGG with generated images and its optimizer.

    `scale`: "19" or "16" (those of the paper), "small" or "tiny"; the six options that follow change it.

    The loss takes images, `dtype` [batch, image_size, image_size, 3], and labels, int32 [batch], and returns
    a scalar of `dtype`: the mean cross entropy in nats.

    Raises ValueError for an unknown scale, if `depth` is not 11, 13, 16 or 19, or if the images are smaller than
    32 x 32.
    """
    size = choose_size(
        SCALES,
        scale,
        depth=depth,
        width=width,
        hidden=hidden,
        classes=classes,
        image_size=image_size,
        dropout=dropout,
    )
    model = build_vgg(**dataclasses.asdict(size), dtype=dtype, seed=seed)
    return image_workload(
        model,
        keras.optimizers.Adam(learning_rate),
        classes=size.classes,
        image_size=size.image_size,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
    )


def build_vgg(
    *,
    depth: int,
    width: int,
    hidden: int,
    classes: int,
    image_size: int,
    dropout: float,
    dtype: str,
    seed: int,
) -> keras.Model:
    """Build the model: `dtype` [batch, image_size, image_size, 3] in, logits [batch, classes] out.

    The first stack has `width` channels, each later one twice as many up to 8 x width. Layers are named
    block1_conv1, block1_pool, ..., flatten, fc1, fc2 and predictions.
    """
    if depth not in CONVOLUTIONS:
        raise ValueError(f"there is no VGG of depth {depth}: choose one of {', '.join(map(str, CONVOLUTIONS))}")
    if image_size < 32:
        raise ValueError(f"images of {image_size}x{image_size} cannot be halved five times: use 32 or more")
    seeds = random.Random(seed)

    def he_normal() -> keras.Initializer:
        return keras.initializers.HeNormal(seed=seeds.getrandbits(31))

    images = keras.Input([image_size, image_size, 3], dtype=dtype, name="images")
    x = images
    for block, convolutions in enumerate(CONVOLUTIONS[depth], start=1):
        for i in range(1, convolutions + 1):
            x = keras.layers.Conv2D(
                width * min(2 ** (block - 1), 8),
                3,
                padding="same",
                activation="relu",
                kernel_initializer=he_normal(),
                name=f"block{block}_conv{i}",
                dtype=dtype,
            )(x)
        x = keras.layers.MaxPooling2D(2, name=f"block{block}_pool", dtype=dtype)(x)
    x = keras.layers.Flatten(name="flatten", dtype=dtype)(x)
    for i in (1, 2):
        x = keras.layers.Dense(hidden, "relu", kernel_initializer=he_normal(), name=f"fc{i}", dtype=dtype)(x)
        if dropout:
            x = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name=f"fc{i}_dropout", dtype=dtype)(x)
    glorot = keras.initializers.GlorotUniform(seed=seeds.getrandbits(31))
    logits = keras.layers.Dense(classes, kernel_initializer=glorot, name="predictions", dtype=dtype)(x)
    return keras.Model(images, logits, name=f"vgg{depth}")
