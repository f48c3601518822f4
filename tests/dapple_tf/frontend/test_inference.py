"""Shapes that are inferred are those of the values, also behind loops, conditions, nested functions and lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.shapes import infer_shapes

X = np.random.default_rng(0).normal(size=(6, 5, 4)).astype("float32")
W = tf.Variable(tf.ones([4]), name="w")
layers = keras.layers


def by_steps(x: Any, *, dynamic: bool = False) -> Any:
    """A loop over time that writes each state to a TensorArray."""
    length = tf.shape(x)[1]
    states = tf.TensorArray(tf.float32, 0 if dynamic else length, dynamic_size=dynamic)
    found = tf.while_loop(
        lambda i, state, states: i < length,
        lambda i, state, states: (i + 1, tf.tanh(state + x[:, i]), states.write(i, state)),
        (0, tf.zeros_like(x[:, 0]), states),
    )
    return tf.transpose(found[2].stack(), [1, 0, 2])


def concatenated(x: Any) -> Any:
    """A loop variable that grows: its length after the loop is not known."""
    start, any_length = (0, x), (tf.TensorShape([]), tf.TensorShape([None, None, 4]))
    return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.concat([v, x], 1)), start, any_length)[1]


def sizes_by_a_function(x: Any) -> Any:
    samples, length = tf.function(lambda v: (tf.shape(v)[0], tf.shape(v)[1]))(x)
    return tf.reshape(x, [samples * length, 4])


def branch_by_length(x: Any) -> Any:
    return tf.cond(tf.shape(x)[1] > 3, lambda: tf.reshape(x, [tf.shape(x)[0], -1]), lambda: x[:, 0])


def branch_by_number(x: Any) -> Any:
    branches = [lambda: x[:, 0], lambda: x[:, :2, 0], lambda: tf.reshape(x, [-1, 4])]
    return tf.switch_case(tf.shape(x)[1] // 2, branches)


def branch_by_values(x: Any) -> Any:
    """Branches of which one has fewer columns."""
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x[:, 0], lambda: x[:, 0, :1])


def stacked(x: Any) -> Any:
    return tf.map_fn(lambda v: tf.reduce_sum(v, 1), tf.transpose(x, [1, 0, 2]))


def set_by_hand(x: Any) -> Any:
    """Python code knows a shape that TensorFlow does not infer."""
    found = tf.numpy_function(lambda v: v[:, 0], [x], tf.float32)
    found.set_shape([None, 4])
    return found


def gathered(x: Any) -> Any:
    steps = tf.TensorArray(tf.float32, 5).unstack(tf.transpose(x, [1, 0, 2]))
    return steps.gather([0, 2])


def nested(x: Any) -> Any:
    """A loop in a branch in a function."""
    return tf.function(lambda v: tf.cond(tf.reduce_sum(v) > 0, lambda: by_steps(v), lambda: v))(x)


KNOWN: dict[str, Callable[[Any], Any]] = {
    "steps": by_steps,
    "sizes by a function": sizes_by_a_function,
    "a branch by the length": branch_by_length,
    "a branch by a number": branch_by_number,
    "stacked": stacked,
    "gathered": gathered,
    "nested": nested,
    "lstm": layers.LSTM(3, return_sequences=True),
    "backwards": layers.GRU(3, return_sequences=True, go_backwards=True),
    "both ways": layers.Bidirectional(layers.SimpleRNN(3)),
    "a state": lambda x: STATEFUL(x)[2],
    "masked": lambda x: MASKED(x, mask=x[..., 0] > 0),
}
STATEFUL, MASKED = layers.LSTM(3, return_state=True), layers.LSTM(3)


def trace(compute: Callable[[Any], Any]) -> Captured:
    return capture(lambda x: (tf.reduce_mean(x * W), compute(x)), (X,), trains=False)


def result_shape(captured: Captured, samples: int) -> Any:
    output = captured.graph.outputs[1]
    return infer_shapes(captured, samples)[output.node][output.index].dims


@pytest.mark.parametrize("case", KNOWN)
def test_the_shape_behind_a_call_is_that_of_the_value(case: str) -> None:
    captured = trace(KNOWN[case])
    for samples in (1, 6, 40):
        value = KNOWN[case](tf.constant(np.resize(X, (samples, 5, 4))))
        assert result_shape(captured, samples) == tuple(value.shape)


def test_lengths_that_change_in_a_loop_or_differ_in_branches_are_unknown() -> None:
    assert result_shape(trace(concatenated), 6) == (6, None, 4)
    assert result_shape(trace(branch_by_values), 6) == (6, None)


def test_a_shape_that_python_code_set_is_known() -> None:
    assert result_shape(trace(set_by_hand), 6) == (None, 4)


def test_the_values_in_a_body_have_their_shapes() -> None:
    captured = trace(by_steps)
    shapes = infer_shapes(captured, 7)
    ((_, body),) = ((name, body) for name, body in shapes.bodies.items() if "body" in name[1])
    assert [dims.dims for name, (dims,) in body.shapes.items() if name.endswith("/Tanh")] == [(7, 4)]
    assert len(shapes.bodies) == 2  # the loop's body and its condition


def test_a_body_that_refuses_the_shapes_leaves_the_results_unknown() -> None:
    def pairs(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reshape(x, [-1, 2, 5, 4]), lambda: tf.zeros([3, 2, 5, 4]))

    captured = trace(pairs)
    assert result_shape(captured, 6) == (3, 2, 5, 4)
    assert result_shape(captured, 4) == (None, 2, 5, 4)
    assert result_shape(captured, 3) == (None, 2, 5, 4)  # three samples have no pairs
