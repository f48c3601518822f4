"""Tensors that travel flat, in dtypes that Horovod supports, arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.distributed.wire_types import (
    carrier_of,
    element_shape,
    flatten,
    from_summable,
    to_summable,
    unflatten,
)
from dapple_tf.graph_passes.ir.graph import TensorType, tensor

SENT = {"uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool"}
SUMMED = {"int32", "int64", "float16", "float32", "float64"}
DTYPES = [*sorted(SENT), "bfloat16", "uint32", "uint64", "complex64", "complex128"]


def values_of(dtype: str, *shape: int) -> tf.Tensor:
    numbers = np.random.default_rng(3).normal(size=shape) * 100
    return tf.cast(tf.cast(numbers + 1j * numbers, dtype) if "complex" in dtype else tf.constant(numbers), dtype)


def type_of(dtype: str, *dims: int | None) -> TensorType:
    return tensor(tf.as_dtype(dtype).name, *dims)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_dtype_arrive_bit_by_bit(dtype: str) -> None:
    value = values_of(dtype, 3, 2)
    carrier = carrier_of(value.dtype.name)
    assert carrier in SENT
    flat = flatten(value, carrier)
    assert flat.shape == (6, *element_shape(value.dtype.name))
    (back,) = unflatten(flat, [type_of(dtype, 3, 2)], [None])
    assert back.dtype == value.dtype
    assert back.numpy().tobytes() == value.numpy().tobytes()


def test_several_tensors_of_which_one_has_an_unknown_length_are_separated() -> None:
    first, second, third = values_of("float32", 2, 3), values_of("float32", 5, 2), values_of("float32")
    flat = tf.concat([flatten(value, "float32") for value in (first, second, third)], 0)
    types = [type_of("float32", 2, 3), type_of("float32", None, 2), type_of("float32")]
    for found, value in zip(unflatten(flat, types, [None] * 3), (first, second, third), strict=True):
        np.testing.assert_array_equal(found, value)


def test_received_shapes_separate_tensors_of_unknown_lengths() -> None:
    first, second = values_of("int64", 2, 3), values_of("int64", 3, 1)
    flat = tf.concat([flatten(value, "int64") for value in (first, second)], 0)
    types = [type_of("int64", None, None), type_of("int64", None, None)]
    for found, value in zip(unflatten(flat, types, [[2, 3], [3, 1]]), (first, second), strict=True):
        np.testing.assert_array_equal(found, value)


def test_nothing_is_made_of_nothing() -> None:
    assert unflatten(tf.zeros([0]), [], []) == []


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "uint64"])
def test_sums_have_the_dtype_of_their_terms(dtype: str) -> None:
    value = tf.cast(values_of("int32", 4), dtype)
    summable = to_summable(value)
    assert summable.dtype.name in SUMMED
    doubled = from_summable(summable + summable, value)
    assert doubled.dtype == value.dtype
    if dtype != "bool":
        np.testing.assert_array_equal(doubled, value + value)
