"""Saving and restoring variables around something that changes them."""

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import variable_values
from dapple_tf.backend.saved_variables import unchanged_variables


def devices() -> list[str]:
    return [device.name for device in tf.config.list_logical_devices("CPU")[:2]]


def test_values_and_devices_come_back_at_the_end_of_the_block() -> None:
    first, second = devices()
    with tf.device(first):
        weights = tf.Variable([1.0, 2.0])
        step = tf.Variable(3, dtype=tf.int64)
    home = weights.device
    with unchanged_variables([weights, step]):
        variable_values.move_variables([(weights, second)])
        weights.assign_add([10.0, 10.0])
        step.assign_add(1)
        assert weights.device != home
    assert (weights.device, step.device) == (home, home)
    np.testing.assert_array_equal(weights.numpy(), [1.0, 2.0])
    assert int(step) == 3


def test_values_and_devices_come_back_after_a_failure() -> None:
    first, second = devices()
    with tf.device(first):
        weights = tf.Variable([1.0, 2.0])
    home = weights.device

    def move_assign_and_fail() -> None:
        with unchanged_variables([weights]):
            variable_values.move_variables([(weights, second)])
            weights.assign([0.0, 0.0])
            raise RuntimeError("the block failed")

    with pytest.raises(RuntimeError, match="the block failed"):
        move_assign_and_fail()
    assert weights.device == home
    np.testing.assert_array_equal(weights.numpy(), [1.0, 2.0])


def test_an_update_in_place_does_not_reach_the_saved_value() -> None:
    weights = tf.Variable(tf.zeros([1000]))
    with unchanged_variables([weights]):
        for _ in range(3):
            weights.assign_add(tf.ones([1000]))
    np.testing.assert_array_equal(weights.numpy(), np.zeros(1000))


def test_functions_traced_before_see_the_restored_value() -> None:
    first, second = devices()
    with tf.device(first):
        weights = tf.Variable(2.0)
    double = tf.function(lambda: 2 * weights)
    assert float(double()) == 4.0
    with unchanged_variables([weights]):
        variable_values.move_variables([(weights, second)])
        weights.assign(5.0)
        assert float(double()) == 10.0
    assert float(double()) == 4.0


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "bool", "string", "int64"])
def test_values_of_any_dtype_come_back(dtype: str) -> None:
    value = tf.constant(["a", ""]) if dtype == "string" else tf.cast(tf.constant([1.0, 0.0]), dtype)
    variable = tf.Variable(value)
    with unchanged_variables([variable]):
        variable.assign(value[::-1] if dtype != "float8_e4m3fn" else tf.cast(tf.constant([0.0, 1.0]), dtype))
        assert variable.numpy().tolist() == value.numpy().tolist()[::-1]
    assert variable.numpy().tolist() == value.numpy().tolist()
