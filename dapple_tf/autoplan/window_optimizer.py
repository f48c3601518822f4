"""Optimizers that cannot train in asynchronous windows, told before anything is traced."""

from __future__ import annotations

from typing import Any

import keras

from dapple_tf.errors import PlanError


def check_optimizer(optimizer: Any) -> None:
    """Raise PlanError for an optimizer that updates by the gradients of all stages at once, or scales the loss."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return  # told when it is traced
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
        raise PlanError(
            f"{name} scales the loss, with mode='async': whether a step is skipped depends on the gradients of all "
            "stages, which are of different minibatches at any time; use an optimizer without loss scaling"
        )
    if optimizer.global_clipnorm:
        raise PlanError(
            f"{name} has global_clipnorm={optimizer.global_clipnorm}, with mode='async': stages update at different "
            "times, so there is no global norm; use clipnorm or clipvalue, which clip each variable by itself"
        )
