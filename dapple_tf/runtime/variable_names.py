"""Names of variables that are the same under every plan, in every process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.compiler import StagedModel
from dapple_tf.frontend.capture import unique


def name_variables(models: Iterable[StagedModel], optimizer: Any) -> dict[str, tf.Variable]:
    """The variables of ``models`` (one function, traced for several kinds of batch) and the optimizer's, by name.

    A variable of a Keras model is called by its path, another one by the name its maker gave it; the optimizer's have
    ``optimizer/`` before theirs, in place of the optimizer's own name, which Keras numbers. Where several have the
    same name, the second is ``name_1``, and so on: the model's in the order in which the loss first uses
    them, then the optimizer's in the order in which it made them.
    """
    known = list(models)
    inner = _distinct(variable for model in known for variable in model.model_variables.values())
    made = [] if optimizer is None else [variable.value for variable in optimizer.variables]
    outer = _distinct([*made, *(variable for model in known for variable in model.variables.values())])
    first = {id(variable) for variable in inner}
    objects = internals.keras_variables([*inner, *(variable for variable in outer if id(variable) not in first)])
    names: dict[str, tf.Variable] = {}
    for item in objects:
        is_keras = not isinstance(item, tf.Variable)
        variable = item.value if is_keras else item
        name = item.path if is_keras else variable.name.split(":")[0]
        if id(variable) not in first:
            name = f"optimizer/{name.removeprefix(f'{optimizer.name}/')}"
        names[unique(name, names)] = variable
    return names


def _distinct(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    return list({id(variable): variable for variable in variables}.values())
