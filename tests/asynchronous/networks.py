"""Models that asynchronous training is tested with, each with the trainable variables of its stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.asynchronous.reference import ByHand, Dense, Differentiated, Model, squared_error
from tests.equality.small_models import chain

WIDTH, ROWS, POSITIONS = 4, 7, 3


@dataclass(frozen=True)
class Network:
    """A loss of a batch, and the stages that it is cut into.

    ``stages``: the trainable variables of each stage; ``starts``: the layers that start stages 1, 2 ...; ``state``: the
    other variables; ``by_hand``: the same model with derivatives by hand, where there is one; ``batch``: random rows.
    """

    loss_fn: Callable[..., Any]
    stages: Sequence[Sequence[Any]]
    starts: Sequence[str]
    batch: Callable[..., Any]
    state: Sequence[Any] = ()
    by_hand: ByHand | None = None

    @property
    def variables(self) -> list[Any]:
        return [*itertools.chain(*self.stages), *self.state]

    def model(self, weights: str) -> Model:
        """Return the model as the reference takes it: by hand where backward uses other weights than forward."""
        if weights == "latest":
            assert self.by_hand is not None
            return self.by_hand
        return Differentiated(self.loss_fn, self.stages)


def dense(layers: Sequence[int], widths: Sequence[int] | None = None) -> Network:
    """Return matrices with tanh in layers layer0, layer1 ...; ``layers``: their number in each stage.

    ``widths``: those of x and of the output of every layer.
    """
    count = sum(layers)
    widths = widths or [WIDTH] * (count + 1)
    random = np.random.default_rng(count)
    matrices = [
        tf.Variable(random.normal(size=shape) * 0.6, name=f"w{i}") for i, shape in enumerate(itertools.pairwise(widths))
    ]

    ends = list(itertools.accumulate(layers))
    stages = [matrices[end - size : end] for end, size in zip(ends, layers, strict=True)]
    return Network(
        chain(matrices),
        stages,
        [f"layer{end}" for end in ends[:-1]],
        lambda size, seed=1: (normal(size, widths[0], seed), normal(size, widths[-1], seed + 100)),
        by_hand=ByHand([[Dense(matrix) for matrix in stage] for stage in stages], squared_error),
    )


def keras_stack() -> Network:
    """Return a Keras model of four Dense layers with biases, in three stages."""
    layers = [_dense_layer(f"dense_{i}") for i in range(4)]
    return _keras_network([[layers[0]], layers[1:3], [layers[3]]], keras.Input((WIDTH,), dtype="float64"))


def batch_norms() -> Network:
    """Return a Keras model with a batch norm in each of its two stages."""
    norms = [keras.layers.BatchNormalization(momentum=0.8, dtype="float64", name=f"norm_{i}") for i in range(2)]
    layers = [_dense_layer(f"dense_{i}") for i in range(3)]
    stages = [[layers[0], norms[0]], [layers[1], norms[1], layers[2]]]
    return _keras_network(stages, keras.Input((WIDTH,), dtype="float64"))


def dropouts() -> Network:
    """Return a Keras model with a Dropout, which has its own seed state, in each of its two stages."""
    drops = [keras.layers.Dropout(0.4, seed=i, dtype="float64", name=f"drop_{i}") for i in range(2)]
    layers = [_dense_layer(f"dense_{i}") for i in range(3)]
    stages = [[layers[0], drops[0]], [layers[1], drops[1], layers[2]]]
    return _keras_network(stages, keras.Input((WIDTH,), dtype="float64"))


def without_weights() -> Network:
    """Return a Keras model in three stages, of which the second has no variable."""
    middle = keras.layers.Activation("sigmoid", dtype="float64", name="middle")
    return _keras_network(
        [[_dense_layer("dense_0")], [middle], [_dense_layer("dense_1")]], keras.Input((WIDTH,), dtype="float64")
    )


def skips() -> Network:
    """Return matrices in three stages, where x and what stage 0 computes also enter stage 2."""
    matrices = [tf.Variable(normal(WIDTH, WIDTH, i) * 0.6, name=f"w{i}") for i in range(3)]

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            first = tf.tanh(x @ matrices[0])
        with tf.name_scope("layer1"):
            second = tf.tanh(first @ matrices[1])
        with tf.name_scope("layer2"):
            third = tf.tanh((first + second) @ matrices[2]) * x
        return tf.reduce_mean(tf.reduce_sum(tf.square(third - y), 1))

    return Network(
        loss_fn,
        [[matrix] for matrix in matrices],
        ["layer1", "layer2"],
        rows,
    )


def moving_average(stage: int) -> Network:
    """Return a matrix in each of two stages, where forward averages that of ``stage`` over the minibatches."""
    matrices = [tf.Variable(normal(WIDTH, WIDTH, i) * 0.6, name=f"w{i}") for i in range(2)]
    average = tf.Variable(tf.zeros_like(matrices[stage]), trainable=False, name="average")

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                if i == stage:
                    average.assign(average * 0.7 + matrix * 0.3)
                x = tf.tanh(x @ matrix)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    return Network(
        loss_fn,
        [[matrix] for matrix in matrices],
        ["layer1"],
        rows,
        [average],
    )


def embedding() -> Network:
    """Return a Keras model of ids: an embedding and a mean, then two Dense layers, in two stages."""
    table = keras.layers.Embedding(
        ROWS, WIDTH, keras.initializers.RandomUniform(seed=1), dtype="float64", name="embedding"
    )
    average = keras.layers.GlobalAveragePooling1D(dtype="float64", name="mean")
    stages = [[table, average], [_dense_layer("dense_0"), _dense_layer("dense_1")]]
    network = _keras_network(stages, keras.Input((POSITIONS,), dtype="int64"))

    def batch(size: int, seed: int = 1) -> Any:
        ids = np.random.default_rng(seed).integers(0, 4, size=(size, POSITIONS))  # of seven: some rows get no gradient
        return tf.constant(ids), normal(size, WIDTH, seed)

    return Network(network.loss_fn, network.stages, network.starts, batch, network.state)


def normal(size: int, width: int, seed: int) -> Any:
    return tf.constant(np.random.default_rng(seed).normal(size=(size, width)))


def rows(size: int, seed: int = 1) -> Any:
    """Return ``size`` random rows of x and of y."""
    return normal(size, WIDTH, seed), normal(size, WIDTH, seed + 100)


def _dense_layer(name: str) -> keras.layers.Layer:
    return keras.layers.Dense(
        WIDTH,
        "tanh",
        kernel_initializer=keras.initializers.GlorotUniform(len(name) + ord(name[-1])),
        name=name,
        dtype="float64",
    )


def _keras_network(stages: Sequence[Sequence[keras.layers.Layer]], entry: Any) -> Network:
    layers = list(itertools.chain(*stages))
    model = keras.Sequential([entry, *layers], name="model")

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.square(model(x, training=True) - y), 1))

    return Network(
        loss_fn,
        [[v for layer in stage for v in layer.trainable_variables] for stage in stages],
        [stage[0].name for stage in stages[1:]],
        rows,
        model.non_trainable_variables,
    )
