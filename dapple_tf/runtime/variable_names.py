"""Names of variables that are the same under every plan, in every process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.names import unique_name
from dapple_tf.staged_model import StagedModel


def name_variables(models: Iterable[StagedModel], optimizer: Any) -> dict[str, tf.Variable]:
    """Return all variables of ``models`` (one loss, traced for several kinds of batch) and of the optimizer, by name.

    A variable of a Keras model has its Keras path as name, any other one the name it was created with. Names of the
    optimizer's variables start with ``optimizer/`` instead of the optimizer's own name, which Keras numbers, or
    that of the optimizer inside of it. Where several have the same name, the second is ``name_1``, and so on: first
    the model's variables, in the order in which the loss uses them, then the optimizer's, in the order in which it
    created them.
    """
    traced = list(models)
    model_variables = _distinct(variable for model in traced for variable in model.model_variables.values())
    created = [] if optimizer is None else [variable.value for variable in optimizer.variables]
    others = _distinct([*created, *(variable for model in traced for variable in model.variables.values())])
    of_model = {id(variable) for variable in model_variables}
    objects = internals.keras_variables(
        [*model_variables, *(variable for variable in others if id(variable) not in of_model)]
    )
    names: dict[str, tf.Variable] = {}
    for item in objects:
        is_keras = not isinstance(item, tf.Variable)
        variable = item.value if is_keras else item
        name = item.path if is_keras else internals.variable_name(variable)
        if id(variable) not in of_model:
            name = f"optimizer/{_without_prefix(name, optimizer)}"
        names[unique_name(name, names)] = variable
    return names


def _without_prefix(name: str, optimizer: Any) -> str:
    for found in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if found is not None and name.startswith(f"{found.name}/"):
            return name.removeprefix(f"{found.name}/")
    return name


def _distinct(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    return list({id(variable): variable for variable in variables}.values())
