"""The functions of a batch that a compiled Keras model trains, evaluates and predicts with, for a pipeline to run.

They compute the forward pass and the loss. Metrics are not updated here, micro-batch by micro-batch, but once a step on
the whole batch (see ``metrics``): what they need is returned as aux outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.capture import TRAINED
from dapple_tf.frontend.optimizer_update import build_optimizer
from dapple_tf.keras.batches import BatchNames

Function = Callable[[dict[str, Any]], Any]


def training_function(model: keras.Model, names: BatchNames) -> Any:
    """Return the tf.function of a batch to train with: the loss, and as aux outputs what metrics need.

    The first trace builds what ``fit`` would build: the model, its losses, and the optimizer for all trainable
    variables.
    """

    def train(batch: dict[str, Any]) -> Any:
        loss, aux = _compute(model, names.nest(batch), training=True)
        build_optimizer(model.optimizer, model.trainable_weights)
        return loss, aux

    function = _named(train, model)
    setattr(function, TRAINED, lambda: model.trainable_weights)
    return function


def evaluation_function(model: keras.Model, names: BatchNames) -> Any:
    """Return the tf.function of a batch to evaluate with: the loss, and as aux outputs what metrics need."""

    def evaluate(batch: dict[str, Any]) -> Any:
        return _compute(model, names.nest(batch), training=False)

    return _named(evaluate, model)


def prediction_function(model: keras.Model, names: BatchNames) -> Any:
    """Return the tf.function of a batch to predict with: a zero for the loss, and the model's outputs."""

    def predict(batch: dict[str, Any]) -> Any:
        x, _, _ = names.nest(batch)
        return tf.zeros([]), {"outputs": internals.call_model(model, x, training=False)}

    return _named(predict, model)


def _compute(model: keras.Model, batch: tuple[Any, Any, Any], *, training: bool) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the aux outputs.

    ``outputs``: the model's, where there are metrics to compute from them; ``masks``: their Keras masks, by position.
    ``losses``: the loss of each output, where there are several, which Keras reports by metrics of its own.
    """
    x, y, sample_weight = batch
    outputs = internals.call_model(model, x, training=training)
    with internals.output_losses(model) as losses:
        loss = internals.compute_loss(model, x, y, outputs, sample_weight, training=training)
    aux: dict[str, Any] = {"losses": list(losses)}
    if internals.has_metrics(model):
        masks = enumerate(internals.keras_mask(tensor) for tensor in keras.tree.flatten(outputs))
        aux |= {"outputs": outputs, "masks": {str(i): mask for i, mask in masks if mask is not None}}
    return loss, aux


def _named(function: Function, model: keras.Model) -> Any:
    """Return the tf.function, which has the model's name in messages; Keras does not convert its steps either.

    XLA compiles it where XLA compiles the model. As in Keras's own steps, lengths that vary are left unknown.
    """
    function.__name__ = model.name
    return tf.function(function, autograph=False, jit_compile=bool(model.jit_compile), reduce_retracing=True)
