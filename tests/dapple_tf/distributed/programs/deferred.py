"""On two ranks: a model made in ``dapple.scope()``, of which each rank makes only the values of its stage."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf import variable_values

WIDTH = 48
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")


def make_model() -> keras.Model:
    """Return four dense layers, the first of which is used again at the end (tied)."""
    inputs = keras.Input((WIDTH,))
    layers = [keras.layers.Dense(WIDTH, "tanh", name=f"layer{i}") for i in range(4)]
    y = inputs
    for layer in (*layers, layers[0]):
        y = layer(y)
    return keras.Model(inputs, y)


def run() -> dict[str, Any]:
    """Return the results of a job whose ranks have one seed, of one where rank 1 reads a weight, and with two seeds.

    And of one that saves and loads files of Keras's.
    """
    return {
        "files": use_files(),
        "made by owners": train(seed=5),
        "read early": train(seed=5, reads=True),
        "two seeds": train(seed=dapple.rank()),
    }


def train(*, seed: int, reads: bool = False) -> dict[str, Any]:
    """Return losses, final weights, and what had memory after the build; ``reads``: rank 1 reads a weight before."""
    keras.utils.set_random_seed(seed)
    with dapple.scope():
        model = make_model()
    if reads and dapple.rank() == 1:
        model.layers[2].kernel.numpy()
    optimizer = keras.optimizers.Adam(0.01)
    step = dapple.pipeline(
        lambda x: tf.reduce_mean((model(x) - x) ** 2),
        optimizer=optimizer,
        stages=["layer2"],
        micro_batches=2,
        example_batch=(X,),
    )
    held = [w.path for w in (*model.weights, *optimizer.variables) if w.shape.rank == 2 and has_memory(w.value)]
    losses = [float(step(X)) for _ in range(3)]
    step.gather()
    return {"held": held, "losses": losses, "weights": [w.numpy().tolist() for w in model.weights]}


def use_files() -> dict[str, Any]:
    """Return what had memory before files were saved and loaded and after each, and losses that follow each load."""
    keras.utils.set_random_seed(5)
    with dapple.scope():
        model = make_model()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    dapple.keras.pipeline(model, stages=["layer2"], micro_batches=2, example_batch=(X, X))

    def train(model: keras.Model = model) -> list[float]:
        losses = []
        for _ in range(3):
            model.reset_metrics()  # before Keras 3.10 the loss is a mean over all calls
            losses.append(float(model.train_on_batch(X, X)))
        return losses

    def held() -> list[str]:
        return [
            w.path for w in (*model.weights, *model.optimizer.variables) if w.shape.rank == 2 and has_memory(w.value)
        ]

    with tempfile.TemporaryDirectory() as folder:  # only rank 0 writes and reads
        files = [f"{folder}/m.weights.h5", f"{folder}/m.keras"]
        train()
        memory = [held()]
        for file, save in zip(files, (model.save_weights, model.save), strict=True):
            save(file)
            memory.append(held())
        losses = [train()]
        for file in files:
            model.load_weights(file)
            memory.append(held())
            losses.append(train())
        error = ""
        try:
            model.load_weights(f"{folder}/missing.weights.h5")
        except OSError as raised:
            error = str(raised)
        memory.append(held())
        if dapple.rank() == 0:
            losses.append(train(keras.models.load_model(files[1])))
        train()  # the ranks are still in step
    return {"memory": memory, "losses": losses, "error": error}


def has_memory(variable: tf.Variable) -> bool:
    """Return whether the variable holds a value here."""
    return bool(tf.raw_ops.VarIsInitializedOp(resource=variable_values.raw_handle(variable)))
