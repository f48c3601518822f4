"""Stage functions that take values of variables in place of the variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.backend.stage_function import build_compiled_function, build_function, only_read, pass_values
from dapple_tf.graph_passes.ir.graph import Function
from tests.dapple_tf.backend.test_stage_function import whole_loss

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def scaled() -> tuple[Function, tf.Variable, tf.Variable]:
    """Return a function of a variable that it writes and one that it reads twice, and both."""
    with tf.device("CPU:0"):
        w = tf.Variable(2.0, name="w")
    with tf.device("CPU:1"):
        rate = tf.Variable(0.5, name="rate")

    def loss(x: Any) -> Any:
        first = tf.reduce_mean(x) * rate
        w.assign_add(rate)
        return first + w

    function, _ = whole_loss(loss, X)
    return function, w, rate


def test_a_variable_that_is_only_read_can_be_passed_as_a_value() -> None:
    function, w, _ = scaled()
    assert only_read(function, "rate")
    assert not only_read(function, "w")
    passed = pass_values(function, ["rate"])
    types = {port.name: port.type.dtype.name for port in passed.inputs}
    assert types == {"input/0": "float32", "w": "resource", "rate": "float32"}
    built = build_function(passed, {}, {}, whole=True)
    names = [port.name for port in passed.inputs]
    arguments = {"input/0": tf.constant(X), "w": w.handle, "rate": tf.constant(1.0)}
    assert built(*(arguments[name] for name in names))[0].numpy() == 2.5 + 3.0
    assert pass_values(function, []) == function


def test_a_compiled_function_reads_variables_of_another_device_before() -> None:
    function, w, rate = scaled()
    built = build_compiled_function(function, {}, {}, ["rate"])
    arguments = {"input/0": tf.constant(X), "w": w.handle, "rate": rate.handle}
    given = [arguments[port.name] for port in function.inputs]
    with tf.device("CPU:0"):
        assert built(*given)[0].numpy() == 1.25 + 2.5
        rate.assign(1.0)
        assert built(*given)[0].numpy() == 2.5 + 3.5
    assert w.numpy() == 3.5
