"""Where variables were before they moved to the stages of a step, and where they are while they are back there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.runtime.exclusive import exclusive


@dataclass
class VariableHomes:
    """The variables that the programs of one step, and its forward pipelines, have moved or may have moved.

    ``_homes``: each with the device on which it was first seen; ``_stages``: for those that are back there, the device
    of their stage. Both by the identity of the variable.
    """

    _homes: dict[int, tuple[tf.Variable, str]] = field(default_factory=dict)
    _stages: dict[int, str] = field(default_factory=dict)

    def remember(self, variables: Iterable[tf.Variable]) -> None:
        """Note where variables are that a program about to be built may move."""
        for variable in variables:
            self._homes.setdefault(id(variable), (variable, variable.device))

    def release(self) -> None:
        """Move all variables back to where they were; waits for steps of other threads that use them."""
        with exclusive(variable for variable, _ in self._homes.values()):
            away = [(variable, home) for variable, home in self._homes.values() if variable.device != home]
            self._stages |= {id(variable): variable.device for variable, _ in away}
            internals.move_variables(away)

    def return_to_stages(self, variables: Iterable[tf.Variable]) -> None:
        """Move those of ``variables`` that were released to their stages; the caller has them for itself."""
        if not self._stages:
            return
        released = {id(variable): variable for variable in variables if id(variable) in self._stages}
        internals.move_variables([(variable, self._stages.pop(key)) for key, variable in released.items()])
