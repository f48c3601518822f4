"""Small Keras models in float64, their batches, and a training loop as any tutorial has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.verification.reference import OneDevice

Model = tuple[keras.Model, Callable[..., Any]]


def dense_layers(*between: keras.Layer, training: bool = True) -> Model:
    """A model of two dense layers, with layers ``between``, and its mean squared error."""
    keras.utils.set_random_seed(3)
    layers = [dense(8, "first", "tanh"), *between, dense(4, "last")]
    model = keras.Sequential([keras.Input((4,), dtype="float64"), *layers], name="net")
    return model, lambda x, y: tf.reduce_mean(tf.square(model(x, training=training) - y))


def embeddings() -> Model:
    """A model of an embedding, of 20 rows, and its mean squared error."""
    keras.utils.set_random_seed(3)
    table = keras.layers.Embedding(20, 4, name="table", dtype="float64")
    pool = keras.layers.GlobalAveragePooling1D(dtype="float64")
    model = keras.Sequential([keras.Input((6,), dtype="int64"), table, pool, dense(4, "last")], name="net")
    return model, lambda ids, y: tf.reduce_mean(tf.square(model(ids) - y))


def dense(units: int, name: str, activation: str | None = None) -> keras.Layer:
    return keras.layers.Dense(units, activation, name=name, dtype="float64")


def numbers(samples: int = 8) -> tuple[Any, Any]:
    """A batch of four numbers a sample, and four targets."""
    random = np.random.default_rng(1)
    return tf.constant(random.normal(size=(samples, 4))), tf.constant(random.normal(size=(samples, 4)))


def repeated_ids(samples: int = 8) -> tuple[Any, Any]:
    """A batch of six ids below 5 a sample, so that all repeat, and four targets."""
    ids = np.random.default_rng(1).integers(0, 5, size=(samples, 6))
    return tf.constant(ids), numbers(samples)[1]


def distinct_ids(samples: int = 3) -> tuple[Any, Any]:
    """A batch of six ids a sample; none repeats."""
    return tf.reshape(tf.range(6 * samples, dtype=tf.int64), (samples, 6)), numbers(samples)[1]


def train_one_step(model: keras.Model, loss_fn: Callable[..., Any], optimizer: Any, batch: Sequence[Any]) -> Any:
    """Train without any tf.function; return the loss and the gradients of the trainable variables."""
    with tf.GradientTape() as tape:
        loss = loss_fn(*batch)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss, gradients


def one_device(model: keras.Model, loss_fn: Callable[..., Any], optimizer: Any) -> OneDevice:
    """The model on this process's first device; variables are called by their paths."""
    optimizer.build(model.trainable_variables)
    trained = {variable.path: variable for variable in model.trainable_variables}
    variables = {variable.path: variable.value for variable in (*model.variables, *optimizer.variables)}
    return OneDevice(loss_fn, optimizer, trained, variables, tf.config.list_logical_devices()[0].name)


def values(*owners: Any) -> list[Any]:
    """The values of all variables of models and optimizers."""
    return [variable.numpy() for owner in owners for variable in owner.variables]
