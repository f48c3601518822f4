"""AmoebaNet-D (Real et al., 2018): cells that were found by evolution, each with skips over two cells."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf
from keras import ops

import dapple_tf as dapple
from dapple_tf.examples.images import image_workload
from dapple_tf.examples.resnet import ConvNorm
from dapple_tf.examples.scales import choose_size

STEM_CHANNELS = 32


@dataclass(frozen=True)
class Genotype:
    """The operations of a cell and their inputs.

    State 0 is the result of the cell before, state 1 that of the cell before that one. Each of `sums` adds two
    operations on earlier states, and makes the next state. The result is the states of `joined`, side by side.
    """

    sums: Sequence[tuple[tuple[int, str], tuple[int, str]]]
    joined: Sequence[int]


NORMAL = Genotype(
    sums=(
        ((1, "conv1x1"), (1, "max3x3")),
        ((1, "none"), (0, "conv1x7_7x1")),
        ((0, "conv1x1"), (0, "conv1x7_7x1")),
        ((2, "max3x3"), (2, "none")),
        ((1, "average3x3"), (5, "conv1x1")),
    ),
    joined=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    sums=(
        ((0, "max2x2"), (0, "max3x3")),
        ((2, "none"), (1, "conv3x3")),
        ((2, "conv1x7_7x1"), (2, "max3x3")),
        ((3, "none"), (1, "max2x2")),
        ((2, "average3x3"), (3, "conv1x1")),
    ),
    joined=(4, 5, 6),
)


@dataclass(frozen=True)
class Size:
    """Sizes of an AmoebaNet: `cells` normal cells in `groups` of equally many.

    A reduction cell before each group but the first one halves height and width. States have `filters` channels in the
    first group, and twice as many in each later one.
    """

    cells: int
    filters: int
    groups: int = 3
    image_size: int = 224
    classes: int = 1001


SCALES = {
    "36": Size(cells=36, filters=512),  # DAPPLE's
    "tiny": Size(cells=2, filters=32, groups=1, image_size=32, classes=5),
}


def amoebanet(
    *,
    scale: str = "36",
    cells: int | None = None,
    filters: int | None = None,
    image_size: int | None = None,
    dropout: float = 0.5,
    dtype: str = "float32",
    batch_size: int = 32,
    learning_rate: float = 0.001,
    seed: int = 0,
) -> dapple.Workload:
    """Return an AmoebaNet with generated images and its optimizer.

    `scale`: "36" (DAPPLE's AmoebaNet-36) or "tiny"; `cells`, `filters` and `image_size` change it.

    The loss takes images, `dtype` [batch, image_size, image_size, 3], and labels, int32 [batch], and returns
    a scalar of `dtype`: the mean cross entropy in nats. Batch normalization is in training mode: it
    normalizes by the moments of the batch, and every call updates the moving averages.

    Raises ValueError for an unknown scale, cells that the groups cannot share, or filters that 16 does not divide.
    """
    size = choose_size(SCALES, scale, cells=cells, filters=filters, image_size=image_size)
    model = build_amoebanet(size, dropout=dropout, dtype=dtype, seed=seed)
    return image_workload(
        model,
        keras.optimizers.RMSprop(learning_rate, rho=0.9, momentum=0.9, epsilon=1.0),
        classes=size.classes,
        image_size=size.image_size,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
    )


def build_amoebanet(size: Size, *, dropout: float, dtype: str, seed: int) -> keras.Model:
    """Build the model: `dtype` [batch, image_size, image_size, 3] in, logits [batch, classes] out.

    Layers are named stem, stem_cell_0, stem_cell_1, cell_0, cell_1, ..., reduction_cell_0, reduction_cell_1, pool,
    dropout and predictions. Stem cells are reduction cells with a quarter and a half of the filters.
    """
    if size.cells % size.groups:
        raise ValueError(
            f"{size.groups} groups cannot share {size.cells} cells equally: use a multiple of {size.groups}"
        )
    if size.filters % 16:
        raise ValueError(f"{size.filters} filters cannot be divided by 16, as the stem needs: use a multiple of 16")
    seeds = random.Random(seed)
    images = keras.Input([size.image_size, size.image_size, 3], dtype=dtype, name="images")
    x = ConvNorm(STEM_CHANNELS, 3, 2, seeds, name="stem", dtype=dtype)(images)
    results = [x, x]

    def add_cell(name: str, genotype: Genotype, filters: int) -> None:
        cell = Cell(genotype, filters, results[-1].shape, results[-2].shape, seeds, name=name, dtype=dtype)
        results.append(cell(results[-1], results[-2]))

    for i in range(2):
        add_cell(f"stem_cell_{i}", REDUCTION, size.filters // 4 * 2**i)
    for group in range(size.groups):
        if group:
            add_cell(f"reduction_cell_{group - 1}", REDUCTION, size.filters * 2**group)
        for i in range(size.cells // size.groups):
            add_cell(f"cell_{group * size.cells // size.groups + i}", NORMAL, size.filters * 2**group)
    x = keras.layers.GlobalAveragePooling2D(name="pool", dtype=dtype)(results[-1])
    x = keras.layers.Dropout(dropout, seed=seeds.getrandbits(31), name="dropout", dtype=dtype)(x)
    glorot = keras.initializers.GlorotUniform(seed=seeds.getrandbits(31))
    logits = keras.layers.Dense(size.classes, kernel_initializer=glorot, name="predictions", dtype=dtype)(x)
    return keras.Model(images, logits, name="amoebanet")


class Cell(keras.layers.Layer):
    """A cell: the results of the two cells before it to [batch, height, width, joined states x filters].

    `last` and `before` are the shapes of these results. A reduction cell halves height and width.
    """

    def __init__(
        self,
        genotype: Genotype,
        filters: int,
        last: Sequence[int],
        before: Sequence[int],
        seeds: random.Random,
        *,
        name: str,
        dtype: str,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.genotype = genotype
        self.last = Convolutions([(1, 1)], filters, 1, seeds, name="last", dtype=dtype)
        same_size = tuple(before[1:3]) == tuple(last[1:3])
        self.before = (
            Convolutions([(1, 1)], filters, 1, seeds, name="before", dtype=dtype)
            if same_size
            else Halve(filters, seeds, name="before", dtype=dtype)
        )
        self.operations = [
            make_operation(
                kind,
                filters,
                2 if genotype is REDUCTION and state < 2 else 1,
                seeds,
                name=f"state{number}_{part}_{kind}",
                dtype=dtype,
            )
            for number, pair in enumerate(genotype.sums, start=2)
            for part, (state, kind) in zip("ab", pair, strict=True)
        ]

    def call(self, last: tf.Tensor, before: tf.Tensor, training: bool = False) -> tf.Tensor:
        states = [self.last(last, training=training), self.before(before, training=training)]
        operations = iter(self.operations)
        for pair in self.genotype.sums:
            a, b = (next(operations)(states[state], training=training) for state, _ in pair)
            states.append(a + b)
        return ops.concatenate([states[i] for i in self.genotype.joined], axis=-1)


def make_operation(
    kind: str, filters: int, stride: int, seeds: random.Random, *, name: str, dtype: str
) -> keras.layers.Layer:
    """Return the layer of an operation: `none`, a pooling, or convolutions.

    Convolutions with kernels other than 1x1 have a quarter of the filters, between two of 1x1.
    """
    if kind == "none":
        return keras.layers.Identity(name=name, dtype=dtype)
    pools = {"max": keras.layers.MaxPooling2D, "average": keras.layers.AveragePooling2D}
    for prefix, pool in pools.items():
        if kind.startswith(prefix):
            return pool(int(kind[-1]), stride, padding="same", name=name, dtype=dtype)
    kernels = [(int(rows), int(columns)) for rows, columns in re.findall(r"(\d)x(\d)", kind)]
    return Convolutions(kernels, filters, stride, seeds, name=name, dtype=dtype)


class Convolutions(keras.layers.Layer):
    """ReLU, convolution and batch norm for each kernel, and where it is no 1x1, for a 1x1 before and behind."""

    def __init__(
        self,
        kernels: Sequence[tuple[int, int]],
        filters: int,
        stride: int,
        seeds: random.Random,
        *,
        name: str,
        dtype: str,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        inner = filters if kernels == [(1, 1)] else filters // 4
        shapes = [
            (inner, (rows, columns), (stride if rows > 1 else 1, stride if columns > 1 else 1))
            for rows, columns in kernels
        ]
        if inner != filters:
            shapes = [(inner, (1, 1), (1, 1)), *shapes, (filters, (1, 1), (1, 1))]
        self.chain = [
            ConvNorm(channels, kernel, strides, seeds, name=f"conv{i}", dtype=dtype)
            for i, (channels, kernel, strides) in enumerate(shapes)
        ]

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        for layer in self.chain:
            x = layer(ops.relu(x), training=training)
        return x


class Halve(keras.layers.Layer):
    """Half of the height and width: 1x1 convolutions of the even pixels, and of those one further down and right."""

    def __init__(self, filters: int, seeds: random.Random, *, name: str, dtype: str) -> None:
        super().__init__(name=name, dtype=dtype)
        self.even, self.odd = (
            keras.layers.Conv2D(
                filters // 2,
                1,
                use_bias=False,
                kernel_initializer=keras.initializers.HeNormal(seed=seeds.getrandbits(31)),
                name=part,
                dtype=dtype,
            )
            for part in ("even", "odd")
        )
        self.norm = keras.layers.BatchNormalization(momentum=0.9, name="norm", dtype=dtype)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = ops.relu(x)
        shifted = ops.pad(x, [[0, 0], [0, 1], [0, 1], [0, 0]])[:, 1:, 1:]
        halves = [self.even(x[:, ::2, ::2]), self.odd(shifted[:, ::2, ::2])]
        return self.norm(ops.concatenate(halves, axis=-1), training=training)
