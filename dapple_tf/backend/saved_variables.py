"""Run something that changes variables, and undo the changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from dapple_tf import variable_values


@contextlib.contextmanager
def unchanged_variables(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Give ``variables`` their values and devices back at the end of the block, also where the block fails.

    The values are kept as NumPy arrays, outside of device memory. Every variable must hold a value in this process: on
    a rank of a job, pass only the variables that the rank's stage owns.
    """
    variables = list(variables)
    variable_values.make_values(variables)
    saved = [(variable, variable.numpy(), variable.device) for variable in variables]
    try:
        yield
    finally:
        variable_values.move_variables(
            [(variable, device) for variable, _, device in saved if variable.device != device]
        )
        for variable, value, _ in saved:
            variable.assign(_copy(value))


def _copy(value: Any) -> Any:
    """Return a tensor in memory of TensorFlow's own.

    That of an array, where a step replaces the value, is freed only when Python calls TensorFlow again, after the step.
    """
    try:
        return tf.raw_ops.DeepCopy(x=value)
    except tf.errors.InvalidArgumentError:  # numbers of 8 bits have no such kernel
        return value
