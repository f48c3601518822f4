"""Comparisons of two steps: what counts as equal, and what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.verification.comparison import Comparison, compare, compare_tensor, same_rows
from dapple_tf.verification.reference import OneDevice, Outcome, values_of
from tests.dapple_tf.verification.models import (
    dense_layers,
    distinct_ids,
    embeddings,
    numbers,
    one_device,
    repeated_ids,
)

# --- one tensor

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "wanted", "error"),
    [
        ([1.0, 2.5], [1.0, 2.0], 0.25),  # of the largest value
        ([0.0, 0.5], [0.0, 0.0], 0.5),  # of nothing: absolute
        ([3, 4], [3, 4], 0.0),
        ([3, 5], [3, 4], 1.0),  # integers are equal or not
        ([True], [False], 1.0),
        ([], [], 0.0),
        ([1.0 + 2j], [1.0 + 1j], 1 / 2**0.5),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.5, INF, -INF], [1.0, INF, -INF], 0.5),  # the other entries count
        ([NAN, NAN], [NAN, NAN], 0.0),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([NAN, 1.0], [1.0, NAN], INF),
        ([INF, 1.0], [NAN, 1.0], 0.0),  # which of them depends on the order of a sum
        ([[1.0]], [1.0], INF),  # another shape
        (None, [1.0], INF),
        ([1.0], None, INF),
    ],
)
def test_the_error_of_a_tensor(found: Any, wanted: Any, error: float) -> None:
    arrays = (None if values is None else np.array(values) for values in (found, wanted))
    difference = compare_tensor("loss", "it", *arrays)
    assert difference.error == pytest.approx(error)
    assert difference.ok == (error == 0)


def test_entries_that_are_not_finite_on_either_side_are_counted() -> None:
    array = np.array([1.0, NAN, INF])
    assert compare_tensor("loss", "it", array, array).nonfinite == 2
    one_sided = compare_tensor("gradient", "w", array, np.ones(3))
    more = "NaN or infinite in 2 entries finite on one device, finite in 0 that are not finite there"
    assert str(one_sided) == f"gradient 'w', {more}"


def test_why_an_error_is_infinite() -> None:
    assert str(compare_tensor("gradient", "w", None, np.ones(2))) == "gradient 'w', the pipeline has none"
    assert str(compare_tensor("gradient", "w", np.ones(2), None)) == "gradient 'w', one device has none"
    assert str(compare_tensor("aux", "0", np.ones(2), np.ones(3))) == "aux '0', shape [2] in place of [3]"


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-12), ("float32", 1e-5), ("float16", 1e-2), (ml_dtypes.bfloat16, 1e-1), ("int32", 0.0)],
)
def test_tolerances_are_those_of_the_type_or_of_the_least_precise_one_in_the_model(
    dtype: Any, tolerance: float
) -> None:
    array = np.ones(3, dtype)
    assert compare_tensor("loss", "it", array, array).tolerance == tolerance
    assert compare_tensor("loss", "it", array, array).ok
    assert compare_tensor("loss", "it", array, array, coarsest=0.1).tolerance == 0.1


def test_a_gradient_below_the_rounding_error_of_the_largest_one_is_measured_by_that() -> None:
    tiny, wanted = np.array([3e-16]), np.array([1e-16])
    assert not compare_tensor("gradient", "w", tiny, wanted).ok
    assert compare_tensor("gradient", "w", tiny, wanted, largest=1.0).ok
    assert not compare_tensor("gradient", "w", tiny + 1e-14, wanted, largest=1.0).ok


# --- steps: the second one is computed by hand, with one mistake


def compare_steps(one: OneDevice, found: Outcome, wanted: Outcome) -> Comparison:
    def apply(gradients: Mapping[str, Any]) -> Mapping[str, Any]:
        with unchanged_variables(one.variables.values()):
            one.apply([gradients[name] for name in one.trained])
            return values_of(one.variables)

    return compare(found, wanted, apply, frozenset())


def plain(one: OneDevice, batch: Any) -> Outcome:
    with unchanged_variables(one.variables.values()):
        return one.train(batch)


def with_gradients(one: OneDevice, outcome: Outcome, gradients: Mapping[str, Any]) -> Outcome:
    """The outcome of a step whose optimizer takes these gradients."""
    with unchanged_variables(one.variables.values()):
        one.apply(list(gradients.values()))
        return dataclasses.replace(outcome, gradients=gradients, variables=values_of(one.variables))


def densified(outcome: Outcome) -> dict[str, Any]:
    return {name: tf.convert_to_tensor(gradient) for name, gradient in outcome.gradients.items()}


def test_a_step_equals_itself() -> None:
    one = one_device(*dense_layers(), keras.optimizers.Adam(0.1))
    outcome = plain(one, numbers())
    comparison = compare_steps(one, outcome, outcome)
    assert comparison.ok
    assert not comparison.excused
    assert set(comparison.errors.values()) == {0.0}
    assert "update" not in {difference.kind for difference in comparison.differences}


def test_a_loss_that_is_half_as_large_differs() -> None:
    one = one_device(*dense_layers(), keras.optimizers.SGD(0.1))
    outcome = plain(one, numbers())
    comparison = compare_steps(one, dataclasses.replace(outcome, loss=outcome.loss / 2), outcome)
    assert str(comparison.first_bad) == "loss 'loss', error 5.0e-01 (allowed 1e-12)"


@pytest.mark.parametrize("name", ["net/first/kernel", "net/last/bias"])
def test_a_gradient_that_is_off_by_a_millionth_differs(name: str) -> None:
    one = one_device(*dense_layers(), keras.optimizers.SGD(0.1))
    outcome = plain(one, numbers())
    changed = {**outcome.gradients, name: outcome.gradients[name] * (1 + 1e-6)}
    comparison = compare_steps(one, with_gradients(one, outcome, changed), outcome)
    assert str(comparison.first_bad).startswith(f"gradient '{name}'")
    assert comparison.largest("gradient") == pytest.approx(1e-6)


def test_a_missing_gradient_differs() -> None:
    one = one_device(*dense_layers(), keras.optimizers.SGD(0.1))
    outcome = plain(one, numbers())
    name = "net/first/bias"
    others = {key: gradient for key, gradient in outcome.gradients.items() if key != name}
    comparison = compare_steps(one, dataclasses.replace(outcome, gradients=others), outcome)
    assert str(comparison.first_bad) == f"gradient {name!r}, the pipeline has none"


def test_an_aux_output_that_was_added_up_over_micro_batches_differs() -> None:
    one = one_device(*dense_layers(), keras.optimizers.SGD(0.1))
    outcome = dataclasses.replace(plain(one, numbers()), aux=(np.array(3),))
    comparison = compare_steps(one, dataclasses.replace(outcome, aux=(np.array(12),)), outcome)
    assert str(comparison.first_bad).startswith("aux '0', error 1.0e+00")


def test_an_optimizer_that_steps_twice_differs() -> None:
    """The gradients are equal, so only the variables show it."""
    one = one_device(*dense_layers(), keras.optimizers.Adam(0.1))
    outcome = plain(one, numbers())
    with unchanged_variables(one.variables.values()):
        for _ in range(2):
            one.apply(list(outcome.gradients.values()))
        twice = dataclasses.replace(outcome, variables=values_of(one.variables))
    comparison = compare_steps(one, twice, outcome)
    assert comparison.first_bad.kind == "variable"


def test_a_rounding_error_that_adam_enlarges_does_not_count() -> None:
    """A gradient of 1e-16 is zero apart from rounding, but Adam's first step has the size of its rate all the same."""
    one = one_device(*dense_layers(), keras.optimizers.Adam(0.1, epsilon=1e-20))
    outcome, name = plain(one, numbers()), "net/first/bias"
    rounded = [{**outcome.gradients, name: tf.fill([8], tf.constant(size, tf.float64))} for size in (1e-17, -1e-17)]
    one_sign, other_sign = (with_gradients(one, outcome, gradients) for gradients in rounded)
    comparison = compare_steps(one, other_sign, one_sign)
    assert comparison.ok
    assert comparison.excused
    assert comparison.largest("variable") > 0.1


# --- sparse gradients


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
    ],
)
def test_an_embedding_whose_gradient_was_made_dense_differs(optimizer: Any) -> None:
    """The dense gradients are equal, and Keras squares and clips the rows of repeated ids apart."""
    one = one_device(*embeddings(), optimizer())
    outcome = plain(one, repeated_ids())
    comparison = compare_steps(one, with_gradients(one, outcome, densified(outcome)), outcome)
    assert comparison.largest("gradient") < 1e-15
    assert str(comparison.first_bad).startswith("variable 'net/table/embeddings', error ")
    assert not comparison.excused


@pytest.mark.parametrize(("batch", "optimizer"), [(repeated_ids(), "SGD"), (distinct_ids(), "Adam")])
def test_a_dense_gradient_is_equal_where_the_rows_do_not_matter(batch: Any, optimizer: str) -> None:
    one = one_device(*embeddings(), getattr(keras.optimizers, optimizer)(0.1))
    outcome = plain(one, batch)
    assert compare_steps(one, with_gradients(one, outcome, densified(outcome)), outcome).ok


def test_the_rounding_errors_of_sparse_gradients_do_not_count() -> None:
    one = one_device(*embeddings(), keras.optimizers.Adam(0.1, epsilon=1e-20))
    outcome = plain(one, distinct_ids())
    name, gradient = next(iter(outcome.gradients.items()))
    tiny = [
        tf.IndexedSlices(gradient.values * size, gradient.indices, gradient.dense_shape) for size in (1e-17, -1e-17)
    ]
    one_sign, other_sign = (with_gradients(one, outcome, {**outcome.gradients, name: slices}) for slices in tiny)
    assert compare_steps(one, other_sign, one_sign).excused
    dense = dataclasses.replace(other_sign, gradients=densified(other_sign))
    assert compare_steps(one, dense, one_sign).excused


def test_a_dense_gradient_is_written_as_the_rows_of_another() -> None:
    wanted = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 0, 3]), tf.constant([5, 1]))
    dense = np.array([[2.5], [0.0], [0.0], [5.5], [0.0]], np.float32)
    rows = same_rows(dense, wanted)
    np.testing.assert_array_equal(rows.indices, [3, 0, 3])
    np.testing.assert_array_equal(rows.values, [[1.5], [2.5], [4.0]])
    np.testing.assert_array_equal(tf.convert_to_tensor(rows), dense)
    assert same_rows(rows, wanted) is rows
    np.testing.assert_array_equal(same_rows(dense, dense), dense)


# --- NaN


def test_what_is_nan_on_one_device_too_does_not_differ() -> None:
    one = one_device(*dense_layers(), keras.optimizers.Adam(0.1))
    x, y = numbers()
    broken = plain(one, (x + tf.one_hot(2, 4, dtype=tf.float64) * NAN, y))
    comparison = compare_steps(one, broken, broken)
    assert comparison.ok
    assert [d.name for d in comparison.nonfinite][:2] == ["loss", "net/first/kernel"]


def test_what_is_nan_on_one_side_only_differs() -> None:
    one = one_device(*dense_layers(), keras.optimizers.Adam(0.1))
    x, y = numbers()
    whole, broken = plain(one, (x, y)), plain(one, (x + NAN, y))
    for found, wanted in ((whole, broken), (broken, whole)):
        comparison = compare_steps(one, found, wanted)
        assert not comparison.ok
        assert str(comparison.first_bad).startswith("loss 'loss', NaN or infinite in ")
        assert comparison.largest("loss") == INF
