"""Conditions, loops, nested functions and the lists that loops fill."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.control_flow import join
from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, coupled, rows, shared
from tests.dapple_tf.frontend.dependence.evaluation import Batch, Compute, assert_coupled, assert_kind_is_true


def positive(b: Batch) -> Any:
    """A condition on a statistic of the untrained batch."""
    return tf.reduce_sum(b.x) > 0


def repeat(start: Any, body: Any, times: Any = 3) -> Any:
    """``body`` applied to ``start`` in a loop in the graph."""
    return tf.while_loop(lambda i, v: i < times, lambda i, v: (i + 1, body(v)), (tf.constant(0), start))[1]


def by_steps(b: Batch, body: Any) -> Any:
    """[4, N] of what a TensorArray collects from the columns of z."""
    columns = tf.TensorArray(tf.float64, 4).unstack(tf.transpose(b.z))
    found = tf.TensorArray(tf.float64, 4)
    found = tf.while_loop(
        lambda i, f: i < 4, lambda i, f: (i + 1, f.write(i, body(columns.read(i)))), (tf.constant(0), found)
    )[1]
    return found.stack()


TRUE: dict[str, tuple[Compute, Form]] = {
    "rows by a statistic": (lambda b: tf.cond(positive(b), lambda: b.z, lambda: 2 * b.z), Form.ROWS),
    "a condition on the batch's size": (
        lambda b: tf.cond(b.n > 4, lambda: tf.reduce_sum(b.z), lambda: -tf.reduce_sum(b.z)),
        Form.SUM,
    ),
    "a choice by the batch's size": (lambda b: tf.where(b.n > 4, b.z, -b.z), Form.ROWS),
    "rows or zeros": (lambda b: tf.cond(positive(b), lambda: b.z, lambda: tf.zeros_like(b.z)), Form.ROWS),
    "means by a statistic": (
        lambda b: tf.cond(positive(b), lambda: tf.reduce_mean(b.z), lambda: -tf.reduce_mean(b.z)),
        Form.MEAN,
    ),
    "a mean or a constant": (
        lambda b: tf.cond(positive(b), lambda: tf.reduce_mean(b.z), lambda: tf.constant(1.0, tf.float64)),
        Form.MEAN,
    ),
    "sums by a variable": (
        lambda b: tf.cond(b.u[0] > 0, lambda: tf.reduce_sum(b.z), lambda: -2 * tf.reduce_sum(b.z)),
        Form.SUM,
    ),
    "switch_case": (
        lambda b: tf.switch_case(tf.cast(positive(b), tf.int32), [lambda: b.z, lambda: b.z + 1]),
        Form.ROWS,
    ),
    "a loop over rows": (lambda b: repeat(b.z, lambda v: tf.tanh(v) + 0.1), Form.ROWS),
    "a loop over a variable": (lambda b: repeat(b.w + 0.0, tf.tanh), Form.SHARED),
    "a loop as long as a statistic": (
        lambda b: repeat(b.z, tf.tanh, tf.reduce_max(b.y)),
        Form.ROWS,
    ),
    "a TensorArray of steps": (lambda b: by_steps(b, tf.tanh), Form.ROWS),
    "a nested function": (lambda b: tf.function(lambda v: tf.tanh(v) * 2)(b.z), Form.ROWS),
    "a sum in a nested function": (lambda b: tf.function(tf.reduce_sum)(b.z), Form.SUM),
    "map_fn over columns": (lambda b: tf.map_fn(tf.tanh, tf.transpose(b.z)), Form.ROWS),
    "sizes from a nested function": (
        lambda b: tf.reshape(b.z, tf.stack([*tf.function(lambda v: (tf.shape(v)[0], 2, 2))(b.z)])),
        Form.ROWS,
    ),
    "a size given to a nested function": (
        lambda b: tf.function(lambda v, n: tf.reshape(v, [n, 2, 2]))(b.z, b.n),
        Form.ROWS,
    ),
    "sizes in a branch": (
        lambda b: tf.cond(positive(b), lambda: tf.reshape(b.z, [b.n, 2, 2]), lambda: tf.ones([b.n, 2, 2], tf.float64)),
        Form.ROWS,
    ),
    "the branch of a length": (
        lambda b: tf.cond(tf.shape(b.x)[1] > 3, lambda: b.z, lambda: tf.transpose(b.z)),
        Form.ROWS,
    ),
    "a loop that keeps a size": (
        lambda b: tf.while_loop(
            lambda i, v, n: i < 3, lambda i, v, n: (i + 1, tf.reshape(v, [n, 4]) + 1, n), (tf.constant(0), b.z, b.n)
        )[1],
        Form.ROWS,
    ),
    "a draw behind a loop": (
        lambda b: (
            b.z * tf.random.stateless_uniform(tf.shape(tf.transpose(by_steps(b, tf.abs))), [1, 2], dtype=tf.float64)
        ),
        Form.ROWS,
    ),
    "scan over columns": (lambda b: tf.scan(lambda a, v: a + tf.tanh(v), tf.transpose(b.z)), Form.ROWS),
}


@pytest.mark.parametrize("case", TRUE)
def test_the_kind_is_as_expected_and_micro_batches_agree_with_it(case: str) -> None:
    compute, form = TRUE[case]
    assert assert_kind_is_true(compute).form is form


def decides_and_indexes(b: Batch) -> tf.Tensor:
    large = b.n > 4
    return tf.cond(large, lambda: b.z, lambda: -b.z) * b.u[tf.cast(large, tf.int32)]


COUPLED: dict[str, tuple[Compute, str]] = {
    "a loop that changes a size": (
        lambda b: tf.reshape(b.z, [tf.while_loop(lambda n: n < 1000, lambda n: (n * 2,), (b.n,))[0] // 4, -1]),
        "shape that cannot be inferred|loops until samples|decides",
    ),
    "a condition on rows": (
        lambda b: tf.cond(tf.reduce_max(b.z) > 0, lambda: b.z, lambda: -b.z),
        "decides by samples|takes the max over the batch",
    ),
    "a condition on a size that is an index too": (decides_and_indexes, "used as a shape or an index too"),
    "a condition on a trained mean": (
        lambda b: tf.cond(tf.reduce_mean(b.z) > 0, lambda: b.z, lambda: -b.z),
        "decides by samples|not linear",
    ),
    "rows or a shared value": (
        lambda b: tf.cond(positive(b), lambda: tf.reduce_sum(b.z), lambda: tf.reduce_sum(b.w)),
        "one case and something else in another",
    ),
    "a loop until rows": (
        lambda b: tf.while_loop(lambda v: tf.reduce_sum(v) < 100, lambda v: (v + 1,), (b.z,))[0],
        "loops until samples|not linear|sum or mean",
    ),
    "a loop that mixes rows": (lambda b: repeat(b.z, lambda v: tf.roll(v, 1, 0)), "moves samples"),
    "a loop that reduces rows": (
        lambda b: repeat(tf.reduce_sum(b.w), lambda v: v + tf.reduce_sum(b.z)),
        "something else in another|adds sums and means",
    ),
    "scan over samples": (
        lambda b: tf.scan(lambda a, row: a + row, b.z),
        "makes a list of samples|loops until samples",
    ),
    "a statistic of the batch in a nested function": (
        lambda b: tf.function(lambda v, x: v / tf.reduce_sum(x))(b.z, b.x),
        "reduces the batch inside a nested function",
    ),
    "the batch size as a number in a nested function": (
        lambda b: tf.function(lambda v: v / tf.cast(tf.shape(v)[0], tf.float64))(b.z),
        "inside a nested function",
    ),
    "a mixed sum in a nested function": (
        lambda b: tf.function(lambda v: tf.reduce_sum(v) + tf.reduce_mean(v))(b.z),
        "adds sums and means inside a nested function",
    ),
    "a draw of rows in a nested function": (
        lambda b: tf.function(lambda v: v + tf.random.stateless_normal(tf.shape(v), [1, 2], dtype=tf.float64))(b.z),
        "inside a nested function",
    ),
}


@pytest.mark.parametrize("case", COUPLED)
def test_what_couples_samples_says_how(case: str) -> None:
    assert_coupled(*COUPLED[case])


SUM, MEAN, MIXED = Kind(Form.SUM), Kind(Form.MEAN), Kind(Form.SUM, mixed=True)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (rows(), rows(), rows()),
        (rows(outer=0), rows(inner=2), rows(inner=2)),
        (rows(), rows(trained=True), rows(trained=True)),
        (shared(once=True), shared(trained=True), shared(once=True, trained=True)),
        (MEAN, shared(), MEAN),
        (SUM, MIXED, MIXED),
        (SIZE, shared(), SIZE),
        (Kind(Form.LIST), Kind(Form.LIST, element=rows()), Kind(Form.LIST, element=rows())),
    ],
)
def test_what_two_branches_give_together(first: Kind, second: Kind, expected: Kind) -> None:
    assert join(first, second, "if") == expected
    assert join(second, first, "if") == expected


@pytest.mark.parametrize(
    ("first", "second"), [(rows(), rows(1)), (rows(), shared()), (SUM, MEAN), (SUM, shared()), (rows(), rows(inner=2))]
)
def test_branches_that_do_not_fit_are_coupled(first: Kind, second: Kind) -> None:
    assert join(first, second, "if").coupled
    assert join(first, coupled("op", "mixes"), "if").why == "mixes"
