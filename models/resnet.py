"""ResNet (He et al.): residual blocks of convolutions with batch normalization."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import keras
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples.images import image_workload
from dapple_tf.examples.scales import choose_size

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Residual blocks in each of the four groups, by the number of layers with weights."""

LARGE_IMAGE = 96
"""From this size on, the stem reduces height and width to a quarter; smaller images keep their size."""


@dataclass(frozen=True)
class Size:
    """Sizes of a ResNet: see `build_resnet`."""

    depth: int = 18
    width: int = 64
    classes: int = 10
    image_size: int = 32


SCALES = {
    "50": Size(depth=50, classes=1000, image_size=224),
    "small": Size(),
    "tiny": Size(width=4, classes=3, image_size=16),
}


def resnet(
    *,
    scale: str = "small",
    depth: int | None = None,
    width: int | None = None,
    classes: int | None = None,
    image_size: int | None = None,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 0.01,
    seed: int = 0,
) -> dapple.Workload:
    """Return a ResNet with generated images and its optimizer.

    `scale`: "50" (that of the paper), "small" or "tiny"; the four options that follow change it.

    The loss takes images, `dtype` [batch, image_size, image_size, 3], and labels, int32 [batch], and returns
    a scalar of `dtype`: the mean cross entropy in nats. Batch normalization is in training mode: it
    normalizes by the moments of the batch, and every call updates the moving averages.

    Raises ValueError for an unknown scale, or if `depth` is not 18, 34, 50 or 101.
    """
    size = choose_size(SCALES, scale, depth=depth, width=width, classes=classes, image_size=image_size)
    model = build_resnet(**dataclasses.asdict(size), dtype=dtype, seed=seed)
    return image_workload(
        model,
        keras.optimizers.SGD(learning_rate, momentum=0.9),
        classes=size.classes,
        image_size=size.image_size,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
    )


def build_resnet(*, depth: int, width: int, classes: int, image_size: int, dtype: str, seed: int) -> keras.Model:
    """Build the model: `dtype` [batch, image_size, image_size, 3] in, logits [batch, classes] out.

    Layers are named stem, group1_block1, group1_block2, ..., pool and predictions. From depth 50 on, blocks
    are bottlenecks.
    """
    if depth not in BLOCKS:
        raise ValueError(f"there is no ResNet of depth {depth}: choose one of {', '.join(map(str, BLOCKS))}")
    seeds = random.Random(seed)
    make_block = bottleneck if depth >= 50 else basic_block

    images = keras.Input([image_size, image_size, 3], dtype=dtype, name="images")
    x = Stem(width, image_size >= LARGE_IMAGE, seeds, name="stem", dtype=dtype)(images)
    for group, blocks in enumerate(BLOCKS[depth], start=1):
        for i in range(1, blocks + 1):
            stride = 2 if group > 1 and i == 1 else 1
            name = f"group{group}_block{i}"
            x = make_block(x.shape[-1], width * 2 ** (group - 1), stride, seeds, name=name, dtype=dtype)(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool", dtype=dtype)(x)
    glorot = keras.initializers.GlorotUniform(seed=seeds.getrandbits(31))
    logits = keras.layers.Dense(classes, kernel_initializer=glorot, name="predictions", dtype=dtype)(x)
    return keras.Model(images, logits, name=f"resnet{depth}")


class ConvNorm(keras.layers.Layer):
    """A convolution and its batch norm: [batch, h, w, c] to [batch, h / stride, w / stride, channels]."""

    def __init__(
        self,
        channels: int,
        kernel: int | tuple[int, int],
        stride: int | tuple[int, int],
        seeds: random.Random,
        *,
        name: str,
        dtype: str,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        he_normal = keras.initializers.HeNormal(seed=seeds.getrandbits(31))
        self.convolution = keras.layers.Conv2D(
            channels,
            kernel,
            stride,
            padding="same",
            use_bias=False,
            kernel_initializer=he_normal,
            name="conv",
            dtype=dtype,
        )
        self.normalization = keras.layers.BatchNormalization(momentum=0.9, name="norm", dtype=dtype)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.normalization(self.convolution(x), training=training)


class Stem(keras.layers.Layer):
    """First convolution: [batch, h, w, 3] to [batch, h, w, width], or with `large` to [batch, h/4, w/4, width]."""

    def __init__(self, width: int, large: bool, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv = ConvNorm(width, kernel, stride, seeds, name="conv", dtype=dtype)
        self.pool = keras.layers.MaxPooling2D(3, 2, padding="same", name="pool", dtype=dtype) if large else None

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = keras.activations.relu(self.conv(x, training=training))
        return self.pool(x) if self.pool else x


class Residual(keras.layers.Layer):
    """A chain of convolutions with a residual connection, which is projected if the shape changes."""

    def __init__(self, chain: list[ConvNorm], projection: ConvNorm | None, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.chain, self.projection = chain, projection

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        shortcut = self.projection(x, training=training) if self.projection else x
        *inner, last = self.chain
        for layer in inner:
            x = keras.activations.relu(layer(x, training=training))
        return keras.activations.relu(last(x, training=training) + shortcut)


def basic_block(inputs: int, width: int, stride: int, seeds: random.Random, *, name: str, dtype: str) -> Residual:
    """Return a block of two 3x3 convolutions, from `inputs` channels to `width`."""
    chain = [
        ConvNorm(width, 3, stride, seeds, name="conv1", dtype=dtype),
        ConvNorm(width, 3, 1, seeds, name="conv2", dtype=dtype),
    ]
    return Residual(chain, _projection(inputs, width, stride, seeds, dtype), name=name, dtype=dtype)


def bottleneck(inputs: int, width: int, stride: int, seeds: random.Random, *, name: str, dtype: str) -> Residual:
    """Return a block of a 3x3 convolution between two of 1x1, from `inputs` channels to 4 x `width`."""
    chain = [
        ConvNorm(width, 1, 1, seeds, name="conv1", dtype=dtype),
        ConvNorm(width, 3, stride, seeds, name="conv2", dtype=dtype),
        ConvNorm(4 * width, 1, 1, seeds, name="conv3", dtype=dtype),
    ]
    return Residual(chain, _projection(inputs, 4 * width, stride, seeds, dtype), name=name, dtype=dtype)


def _projection(inputs: int, outputs: int, stride: int, seeds: random.Random, dtype: str) -> ConvNorm | None:
    if inputs == outputs and stride == 1:
        return None
    return ConvNorm(outputs, 1, stride, seeds, name="projection", dtype=dtype)
