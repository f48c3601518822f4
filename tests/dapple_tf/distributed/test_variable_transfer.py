"""Values of variables in the bytes of a message."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dapple_tf.distributed.variable_transfer import split_values

SPECS = [tf.TensorSpec([2, 3], tf.float32), tf.TensorSpec([], tf.bool), tf.TensorSpec([2], tf.bfloat16)]
VALUES = [np.arange(6, dtype="float32").reshape(2, 3), np.array(True), np.array([1, 2], tf.bfloat16.as_numpy_dtype)]


def test_values_that_share_a_message_do_not_keep_it_in_memory() -> None:
    message = np.concatenate([value.reshape(-1).view(np.uint8) for value in VALUES])
    found = split_values(message, SPECS)
    for value, wanted in zip(found, VALUES, strict=True):
        assert value.dtype == wanted.dtype
        np.testing.assert_array_equal(value, wanted)
        assert not np.shares_memory(value, message)


def test_a_value_that_has_its_message_alone_is_not_copied() -> None:
    message = VALUES[0].reshape(-1).view(np.uint8)
    (value,) = split_values(message, SPECS[:1])
    np.testing.assert_array_equal(value, VALUES[0])
    assert np.shares_memory(value, message)
