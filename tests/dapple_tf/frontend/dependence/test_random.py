"""Stateless draws: which of them give rows of the whole batch's draw, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.kinds import Form
from dapple_tf.frontend.dependence.random import is_stateless_draw
from tests.dapple_tf.frontend.dependence.evaluation import (
    Compute,
    analyse,
    assert_coupled,
    assert_kind_is_true,
    kind_of,
    make_loss,
)

SEED = (1, 2)


def draw(*shape: Any) -> Any:
    return tf.random.stateless_normal(shape, SEED, dtype=tf.float64)


ROWS: dict[str, tuple[Compute, tuple[int, int, int]]] = {
    "like rows": (lambda b: tf.random.stateless_uniform(tf.shape(b.z), SEED, dtype=tf.float64), (0, 1, 1)),
    "the batch size and a constant": (lambda b: draw(b.n, 3), (0, 1, 1)),
    "one number a sample": (lambda b: draw(b.n), (0, 1, 1)),
    "time-major": (lambda b: draw(5, b.n, 3), (1, 1, 1)),
    "like flat rows": (
        lambda b: tf.random.stateless_normal(tf.shape(tf.reshape(b.z, [-1])), SEED, dtype=tf.float64),
        (0, 1, 4),
    ),
    "like a concat along the batch": (
        lambda b: tf.random.stateless_normal(tf.shape(tf.concat([b.z, b.x], 0)), SEED, dtype=tf.float64),
        (0, 2, 1),
    ),
    "integers": (lambda b: tf.random.stateless_uniform([b.n], SEED, 0, 7, tf.int32), (0, 1, 1)),
    "truncated": (lambda b: tf.random.stateless_truncated_normal([b.n, 8], SEED, dtype=tf.float64), (0, 1, 1)),
    "like two rows that broadcast": (
        lambda b: draw(*tf.unstack(tf.broadcast_dynamic_shape(tf.shape(b.z), tf.constant([5, 1, 4])), 3)),
        (1, 1, 1),
    ),
    "like a concat along the batch that broadcasts": (
        lambda b: tf.random.stateless_normal(
            tf.broadcast_dynamic_shape(tf.shape(tf.concat([b.z, b.x], 0)), tf.constant([1, 4])), SEED, dtype=tf.float64
        ),
        (0, 2, 1),
    ),
    "gamma of one shape for all": (
        lambda b: tf.random.stateless_gamma([b.n, 4], SEED, tf.constant([1.0, 2, 3, 4], tf.float64), dtype=tf.float64),
        (0, 1, 1),
    ),
    "two rows a sample": (lambda b: draw(2 * b.n, 3), (0, 1, 2)),
    "two rows a sample, as tf.repeat makes them": (
        lambda b: draw(2 * b.n, 4) + tf.repeat(b.z, 2, axis=0),
        (0, 1, 2),
    ),
    "two rows a sample, as a concat makes them": (lambda b: draw(2 * b.n, 4) + tf.concat([b.z, b.x], 0), (0, 2, 1)),
    "half of two rows a sample": (lambda b: draw(2 * b.n, 4)[b.n :] * b.z, (0, 1, 1)),
    "two draws in different orders": (
        lambda b: tf.concat(
            [draw(2 * b.n, 4) + tf.repeat(b.z, 2, axis=0), tf.repeat(draw(3 * b.n, 4)[: b.n], 2, axis=0)], 1
        ),
        (0, 1, 2),
    ),
    "dropout": (lambda b: tf.nn.experimental.stateless_dropout(b.z, 0.5, SEED), (0, 1, 1)),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_draw_with_the_batchs_size_gives_rows_of_the_whole_draw(case: str) -> None:
    compute, expected = ROWS[case]
    kind = assert_kind_is_true(compute)
    assert (kind.form, kind.axis, kind.outer, kind.inner) == (Form.ROWS, *expected)


def test_a_draw_without_the_batch_is_shared() -> None:
    assert assert_kind_is_true(lambda b: draw(3, 4)).form is Form.SHARED


def test_a_draw_by_a_seed_of_the_whole_batch_is_made_once_known() -> None:
    kind = kind_of(lambda b: tf.random.stateless_normal([3], tf.stack([tf.reduce_sum(b.y), 1])))
    assert (kind.form, kind.once) == (Form.SHARED, True)


COUPLED: dict[str, tuple[Compute, str]] = {
    "a seed of samples": (
        lambda b: tf.random.stateless_normal([b.n], tf.argmax(b.z, 1)[:2]),
        "slices the batch|seed or with parameters that depend on samples",
    ),
    "a shuffle": (
        lambda b: tf.random.experimental.stateless_shuffle(b.z, SEED),
        "by an op that micro-batches cannot repeat|samples",
    ),
    "a hidden shuffle": (lambda b: tf.random.shuffle(b.z), "parameters that depend on samples"),
    "hidden draws with parameters of samples": (
        lambda b: tf.random.poisson([], tf.math.abs(b.z)),
        "parameters that depend on samples",
    ),
}


@pytest.mark.parametrize("case", COUPLED)
def test_draws_that_cannot_be_repeated_say_why(case: str) -> None:
    assert_coupled(*COUPLED[case])


def test_a_draw_that_is_used_in_two_orders_is_refused() -> None:
    def compute(b: Any) -> Any:
        drawn = draw(2 * b.n, 4)
        return drawn + tf.repeat(b.z, 2, axis=0) + (drawn + tf.concat([b.z, b.x], 0))

    assert "in different orders" in kind_of(compute).why


def test_a_hidden_draw_has_the_order_of_what_it_is_added_to() -> None:
    kind = kind_of(lambda b: tf.random.normal([2 * b.n, 4], dtype=tf.float64) + tf.concat([b.z, b.x], 0))
    assert (kind.form, kind.axis, kind.outer, kind.inner) == (Form.ROWS, 0, 2, 1)


def test_a_hidden_draw_is_rows_and_is_named_as_a_documented_reason() -> None:
    captured, dependence = analyse(make_loss(lambda b: tf.random.normal([b.n, 4], dtype=tf.float64), as_aux=True))
    assert dependence.kinds[captured.graph.outputs[1]].rows
    (reason,) = dependence.exactness.reasons
    assert reason.documented
    assert "hidden state (RandomStandardNormal)" in reason.why
    assert "SeedGenerator" in reason.remedy
    assert not dependence.draws


def test_the_draws_of_a_decision_have_their_layout() -> None:
    _, dependence = analyse(make_loss(lambda b: tf.reduce_mean(b.z[None] * draw(5, b.n, 4))))
    (found,) = dependence.draws
    assert (found.axis, found.outer, found.inner) == (1, 1, 1)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("StatelessRandomNormalV2", True),
        ("StatelessTruncatedNormal", True),
        ("StatelessRandomBinomial", True),
        ("StatelessRandomGetKeyCounter", False),
        ("StatelessRandomGetAlg", False),
        ("StatelessIf", False),
        ("StatelessWhile", False),
        ("RandomStandardNormal", False),
    ],
)
def test_which_ops_draw_by_a_seed(op: str, expected: bool) -> None:
    assert is_stateless_draw(op) is expected
