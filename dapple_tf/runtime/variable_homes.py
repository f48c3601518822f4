"""The devices of variables before they moved to the stages of a step; variables can move back there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf import internals, variable_values
from dapple_tf.frontend.names import unique_name
from dapple_tf.runtime.exclusive import exclusive
from dapple_tf.staged_model import StagedModel


@dataclass
class VariableHomes:
    """The variables that the programs of one step, and of its forward pipelines, may have moved.

    ``_homes``: each variable with its first device. ``_stages``: the device of the stage of each variable that has
    moved back. ``shares``: the replica that updates each variable of a stage whose update is sharded. All by the
    identity of the variable.
    """

    _homes: dict[int, tuple[tf.Variable, str]] = field(default_factory=dict)
    _stages: dict[int, str] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)

    def share(self, model: StagedModel) -> None:
        """Note which replicas update the variables of ``model``: further models of these variables must agree."""
        self.shares |= {id(model.variables[name]): replica for name, replica in model.pass_facts.shares}

    def remember(self, variables: Iterable[tf.Variable]) -> None:
        """Note the devices of variables, before a program is built that may move them."""
        for variable in variables:
            self._homes.setdefault(id(variable), (variable, variable.device))

    def release(self) -> None:
        """Move all variables back to their first devices; wait for steps of other threads that use them."""
        with exclusive(variable for variable, _ in self._homes.values()):
            away = [(variable, home) for variable, home in self._homes.values() if variable.device != home]
            self._stages |= {id(variable): variable.device for variable, _ in away}
            variable_values.move_variables(away)

    def return_to_stages(self, variables: Iterable[tf.Variable]) -> None:
        """Move the ``variables`` that were released to their stages again; no other thread may use them."""
        if not self._stages:
            return
        released = {id(variable): variable for variable in variables if id(variable) in self._stages}
        variable_values.move_variables([(variable, self._stages.pop(key)) for key, variable in released.items()])


# --- Names of variables that are the same under every plan, in every process


def name_variables(models: Iterable[StagedModel], optimizer: Any) -> dict[str, tf.Variable]:
    """Return all variables of ``models`` (one loss, traced for several kinds of batch) and of the optimizer, by name.

    The name of a Keras model's variable is its Keras path; any other variable has the name with which it was created.
    Keras numbers the names of optimizers. So names of the optimizer's variables start with ``optimizer/``, instead of
    the name of the optimizer or of the optimizer inside it. If several variables have the same name, the second one is
    ``name_1``, and so on: first the model's variables, in the order in which the loss uses them, then the optimizer's,
    in the order in which it created them.
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
        if found is not None:
            name = name.removeprefix(f"{found.name}/")
    return name


def _distinct(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    return list({id(variable): variable for variable in variables}.values())
