"""Whether a model and its optimizer can train in asynchronous windows."""

from __future__ import annotations

from dapple_tf.errors import GraphError, PlanError
from dapple_tf.plan import Plan
from dapple_tf.staged_model import StagedModel
from graph_passes.analysis.variable_use import find_variables
from graph_passes.passes.update_groups import check_updates


def check_window_model(model: StagedModel, plan: Plan) -> None:
    """Raise PlanError where the model or its optimizer cannot train in asynchronous windows under ``plan``.

    Stages update at different times, so no trained variable can be in two of them, and no optimizer can decide by all
    gradients. Replicas that take minibatches in turn cannot write state in the order of the minibatches.
    """
    if model.updates is None:
        raise PlanError("mode='async' without an optimizer: a window updates the weights after every minibatch")
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
            raise PlanError(f"mode='async': {name!r} is trained, and forward writes it too")
    assert plan.window is not None
    for stage, replicas in enumerate(plan.replicas if plan.window.in_turn else ()):
        written = [name for name in variables.used(stage) if name in variables.state - variables.once]
        if replicas > 1 and written:
            raise PlanError(
                f"mode='async': forward of stage {stage} writes {written[0]!r}, and its {replicas} replicas take "
                "minibatches in turn, so it cannot be written in the order of the minibatches: give this stage one "
                "device"
            )
