"""Notice what a user sets on an optimizer between steps, such as its learning rate: it must be set on every rank.

Every rank holds these variables, whatever its stages are, so that callbacks can read and set them; a step uses the
value of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.distributed.membership import Job
from dapple_tf.staged_model import StagedModel
from graph_passes.analysis.layers import written_variables


def find_settings(model: StagedModel) -> dict[str, tf.Variable]:
    """Return the numbers that the optimizer reads and does not write, by the name of their node."""
    functions = () if model.updates is None else model.updates.functions
    written = {name for function in functions for name in written_variables(function.graph)}
    return {
        name: variable
        for name, variable in model.variables.items()
        if variable.shape.rank == 0 and name not in model.model_variables and name not in written
    }


@dataclass
class OptimizerSettings:
    """The settings of the optimizer of a step, by name, with the values that all ranks know."""

    _variables: dict[str, tf.Variable] = field(default_factory=dict)
    _known: dict[str, Any] = field(default_factory=dict)

    def add(self, job: Job, model: StagedModel) -> None:
        """Add those of ``model``, before its variables are placed; every rank must call this.

        Raises JobError on every rank if the ranks have different values, naming them.
        """
        settings = {internals.variable_name(v).rpartition("/")[2]: v for v in find_settings(model).values()}
        added = {name: variable for name, variable in settings.items() if name not in self._variables}
        values = {name: variable.numpy() for name, variable in added.items()}
        job.compare({f"{name} of the optimizer (set it on every rank)": value for name, value in values.items()})
        self._variables |= added
        self._known |= values

    def changes(self) -> dict[str, Any]:
        """Return what has been set on this rank since the last call, by name."""
        values = {name: variable.numpy() for name, variable in self._variables.items()}
        found = {name: value for name, value in values.items() if value != self._known[name]}
        self._known |= found
        return found
