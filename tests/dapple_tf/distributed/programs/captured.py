"""The variables that the function of a rank's last step uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


def captured_names(step: Any, variables: Mapping[str, tf.Variable]) -> list[str]:
    """Return the names of the ``variables`` that the function reads or writes."""
    handles = {id(handle) for handle in step._compiled_last().program.function.captured_inputs}
    return sorted(name for name, variable in variables.items() if id(variable.handle) in handles)
