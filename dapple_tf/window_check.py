"""Whether a model and its optimizer can train in asynchronous windows."""

from __future__ import annotations

from typing import Any

import keras

from dapple_tf.errors import GraphError, PlanError
from dapple_tf.graph_passes.analysis.variable_use import Variables, find_variables
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.windows.update_groups import check_updates
from dapple_tf.plans import Plan
from dapple_tf.staged_model import StagedModel


def check_window_model(model: StagedModel, plan: Plan) -> None:
    """Raise PlanError where the model or its optimizer cannot train in asynchronous windows under ``plan``.

    Stages update at different times, so no two stages can share a trained variable, and no optimizer can use the
    gradients of all stages at once. Replicas that take minibatches in turn cannot write state in the order of the
    minibatches.
    """
    if model.updates is None:
        raise PlanError("mode='async' without an optimizer: a window updates the weights after every minibatch")
    if model.counter in model.model_variables:
        raise PlanError(
            f"mode='async': the loss reads the optimizer's step counter, {model.counter!r}, of which each stage has "
            "its own in a window: count minibatches in a variable of your own, which the loss advances by assign_add"
        )
    try:
        check_updates(model.updates, model.counter)
    except GraphError as error:
        raise PlanError(f"mode='async': the optimizer {error}; use another one, such as SGD or Adam") from error
    variables = find_variables(model.graph)
    for name, users in variables.users:
        if name in model.trained and len(users) > 1:
            raise PlanError(
                f"mode='async': {name!r} is trained and used by stages {list(users)}, which update at different times, "
                "so there is no one version of it: cut the model so that one stage has all uses, or train with "
                "mode='sync'"
            )
        if name in model.trained and name in variables.state:
            raise PlanError(
                f"mode='async': {name!r} is trained, and forward writes it too (as a spectral norm does), so a version "
                "of the weights would not have what forward wrote: write another variable, or train with mode='sync'"
            )
    for stage, replicas in enumerate(plan.replicas if plan.runs_whole_minibatches else ()):
        written = [name for name in variables.used(stage) if name in variables.state - variables.once]
        if replicas > 1 and written:
            raise PlanError(
                f"mode='async': forward of stage {stage} writes {written[0]!r}, and its {replicas} replicas take "
                "minibatches in turn, so it cannot be written in the order of the minibatches: give this stage one "
                "device"
            )
    _check_late_reads(model, plan, variables)


def _check_late_reads(model: StagedModel, plan: Plan, variables: Variables) -> None:
    """Raise PlanError where a call would read a variable after a later minibatch has written it.

    The function that runs once per minibatch writes such variables, and passes their values to the forward and backward
    calls. A call that reads the variable directly (for example in a loop) reads it later. A backward reads it after the
    forwards of later minibatches; where replicas take minibatches in turn, a forward reads it after the writes of its
    whole group of minibatches.
    """
    for stage, (warm_up, replicas) in enumerate(zip(plan.versions.window.warm_up, plan.replicas, strict=True)):
        in_turn = plan.runs_whole_minibatches and replicas > 1
        for op, late in ((OpName.FORWARD, in_turn), (OpName.BACKWARD, in_turn or warm_up > 1)):
            function = model.graph.function_by_name.get(at(stage, what=op))
            read = [port.name for _, port in function.input_ports("variable")] if function and late else []
            written = [name for name in read if name in (variables.once if op == OpName.FORWARD else variables.state)]
            if written:
                raise PlanError(
                    f"mode='async': {op} of stage {stage} reads {written[0]!r} in a loop, a nested function or a "
                    "custom gradient, and the loss writes it for every minibatch, so a later minibatch has written "
                    "it by then: read it outside of them and pass the value in, or train with mode='sync'"
                )


# --- Refuse optimizers that cannot train in asynchronous windows, before anything is traced


def check_optimizer(optimizer: Any) -> None:
    """Raise PlanError for an optimizer that updates by the gradients of all stages at once, or scales the loss."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return  # the trace refuses it
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
