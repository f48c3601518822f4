"""Entry-by-entry ops on rows, sums, means and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.kinds import Form
from tests.dapple_tf.frontend.dependence.evaluation import Batch, Compute, assert_coupled, assert_kind_is_true, kind_of

HALF = tf.constant(0.5, tf.float64)


def total(b: Batch) -> Any:
    return tf.reduce_sum(b.z)


def mean(b: Batch) -> Any:
    return tf.reduce_mean(b.z)


def whole_numbers(b: Batch) -> Any:
    """An integer sum over the batch that depends on the trained variable."""
    return tf.reduce_sum(tf.cast(b.z, tf.int32))


def size(b: Batch) -> Any:
    """The number of samples as a float."""
    return tf.cast(b.n, tf.float64)


TRUE: dict[str, tuple[Compute, Form]] = {
    "unary": (lambda b: tf.exp(b.z), Form.ROWS),
    "rows and rows": (lambda b: b.z * b.x, Form.ROWS),
    "rows and a variable": (lambda b: b.z + b.w, Form.ROWS),
    "rows and a column of rows": (lambda b: b.z * b.x[:, :1], Form.ROWS),
    "old-style select by a vector": (lambda b: tf.raw_ops.Select(condition=b.mask, x=b.z, y=b.x), Form.ROWS),
    "old-style select of matrices by a vector": (
        lambda b: tf.raw_ops.Select(
            condition=b.mask, x=b.z[:, :, None] * b.x[:, None], y=b.x[:, :, None] * b.x[:, None]
        ),
        Form.ROWS,
    ),
    "buckets": (lambda b: tf.raw_ops.Bucketize(input=b.z, boundaries=[-1.0, 0.0, 1.0]), Form.ROWS),
    "strings": (
        lambda b: tf.strings.to_hash_bucket_fast(
            tf.strings.regex_replace(tf.strings.join([tf.as_string(b.y), "a"]), "1", "b"), 100
        ),
        Form.ROWS,
    ),
    "select by rows": (lambda b: tf.where(b.mask[:, None], b.z, 0.0), Form.ROWS),
    "rows over the sum of a mask": (lambda b: b.z / tf.reduce_sum(tf.cast(b.mask, tf.float64)), Form.ROWS),
    "rows less the mean of the input": (lambda b: b.z - tf.reduce_mean(b.x, 0), Form.ROWS),
    "rows over the batch size": (lambda b: b.z / tf.cast(b.n, tf.float64), Form.ROWS),
    "rows over a quarter of the batch, rounded": (lambda b: b.z / tf.cast(b.n // 4 + 1, tf.float64), Form.ROWS),
    "rows over at most 8": (lambda b: b.z / tf.cast(tf.minimum(b.n, 8), tf.float64), Form.ROWS),
    "rows times an integer size": (lambda b: b.y * b.n, Form.ROWS),
    "a function of a variable": (lambda b: tf.exp(b.w) + 1, Form.SHARED),
    "a sum of the input": (lambda b: tf.reduce_sum(b.x), Form.SHARED),
    "the square of a sum of the input": (lambda b: tf.reduce_sum(b.x) ** 2, Form.SHARED),
    "sum times a constant": (lambda b: total(b) * HALF, Form.SUM),
    "sum over a constant": (lambda b: total(b) / 12.0, Form.SUM),
    "sum over a count": (lambda b: total(b) / tf.reduce_sum(tf.cast(b.mask, tf.float64)), Form.SUM),
    "sum plus sum": (lambda b: total(b) + tf.reduce_sum(b.z**2), Form.SUM),
    "sum less sum": (lambda b: total(b) - tf.reduce_sum(b.z**2), Form.SUM),
    "sum times a variable": (lambda b: total(b) * b.w, Form.SUM),
    "minus a sum": (lambda b: -total(b), Form.SUM),
    "sum over the batch size": (lambda b: total(b) / tf.cast(b.n, tf.float64), Form.MEAN),
    "sum over four times the batch size": (lambda b: total(b) / tf.cast(4 * b.n, tf.float64), Form.MEAN),
    "sum times one over the batch size": (lambda b: total(b) * (1 / tf.cast(b.n, tf.float64)), Form.SUM),
    "sum over the batch size and one": (lambda b: total(b) / (tf.cast(b.n, tf.float64) + 1), Form.SUM),
    "sum over the size of a tensor": (lambda b: total(b) / tf.cast(tf.size(b.z), tf.float64), Form.MEAN),
    "mean plus mean": (lambda b: mean(b) + tf.reduce_mean(b.z**2), Form.MEAN),
    "mean plus a regulariser": (lambda b: mean(b) + tf.reduce_sum(b.w**2), Form.MEAN),
    "mean times a constant": (lambda b: mean(b) * HALF, Form.MEAN),
    "mean chosen by a statistic": (lambda b: tf.where(tf.reduce_sum(b.x) > 0, mean(b), 2 * mean(b)), Form.MEAN),
    "mean times the batch size": (lambda b: mean(b) * tf.cast(b.n, tf.float64), Form.MEAN),
    "stop_gradient of a sum": (lambda b: tf.stop_gradient(total(b)), Form.SUM),
    "sum in float32": (lambda b: tf.cast(tf.cast(tf.reduce_sum(b.y), tf.float64) * HALF, tf.float32), Form.SHARED),
    "sum of integers in int64": (lambda b: tf.cast(whole_numbers(b), tf.int64), Form.SUM),
    "clip by constants": (lambda b: tf.clip_by_value(b.z, -1.0, 1.0), Form.ROWS),
    "positions": (lambda b: tf.range(b.n), Form.ROWS),
    "positions plus 3": (lambda b: tf.range(b.n) + 3, Form.ROWS),
    "positions times 2": (lambda b: tf.range(b.n) * 2, Form.ROWS),
    "positions less positions": (lambda b: tf.range(b.n) - tf.range(b.n) + b.y, Form.ROWS),
    "positions compared with positions": (lambda b: tf.range(b.n) == tf.range(b.n) + 0, Form.ROWS),
    "zeros like rows": (lambda b: tf.zeros_like(b.z), Form.ROWS),
    "old-style select by a scalar": (
        lambda b: tf.raw_ops.Select(condition=tf.reduce_sum(b.x) > 0, x=tf.transpose(b.z), y=tf.transpose(b.x)),
        Form.ROWS,
    ),
    "rows over the length of the batch and one sample": (
        lambda b: b.z / tf.cast(tf.shape(tf.concat([b.x, b.x[:1]], 0))[0], tf.float64),
        Form.ROWS,
    ),
    "rows over the number of neighbours": (
        lambda b: b.z / tf.cast(tf.shape(b.x[1:])[0], tf.float64),
        Form.ROWS,
    ),
    "rows over the number of pairs": (
        lambda b: b.z / tf.cast(tf.size(tf.reshape(b.x[:, None] * b.x[None], [-1])), tf.float64),
        Form.ROWS,
    ),
    "rows times the first of some constants": (
        lambda b: b.z * tf.cast(tf.reduce_sum(tf.constant([1, 2, 3, 4])[: b.n]), tf.float64),
        Form.ROWS,
    ),
    "rows times whether there are more samples than one": (
        lambda b: b.z * tf.cast(tf.cast(b.n - 1, tf.bool), tf.float64),
        Form.ROWS,
    ),
}

COUPLED: dict[str, tuple[Compute, str]] = {
    "the square of a sum": (lambda b: total(b) ** 2, "not linear"),
    "log of a mean": (lambda b: tf.math.log(mean(b) ** 2), "not linear"),
    "a sum times a sum": (lambda b: total(b) * total(b), "multiplies two sums or means|not linear"),
    "one over a sum": (lambda b: 1 / total(b), "not linear"),
    "a sum over a sum": (lambda b: total(b) / tf.reduce_sum(b.z**2), "not linear"),
    "rows times a sum": (lambda b: b.z * total(b), "scales samples by a sum or mean"),
    "rows less their mean": (lambda b: b.z - tf.reduce_mean(b.z, 0), "combines samples with a sum or mean"),
    "a rounded sum": (lambda b: tf.cast(total(b), tf.int32), "rounds a sum or mean"),
    "an integer sum over an integer": (lambda b: tf.raw_ops.Div(x=whole_numbers(b), y=2), "rounds a sum or mean"),
    "integers and constants": (lambda b: whole_numbers(b) + 3, "integers that depend on samples and integers"),
    "a sum as a truth value": (lambda b: tf.cast(whole_numbers(b), tf.bool), "rounds a sum or mean"),
    "a size that is a shape and a number": (
        lambda b: (lambda n: tf.reshape(b.z, [tf.cast(n, tf.int32), -1]) * n)(size(b)),
        "used as a shape or an index too",
    ),
    "quantized by the range of the batch": (
        lambda b: tf.quantization.quantize_and_dequantize_v2(b.z, 0.0, 0.0, range_given=False),
        "quantizes by the smallest and the largest",
    ),
    "sums and sizes together": (lambda b: tf.stack([whole_numbers(b), b.n]), "by the micro-batch's size"),
    "maximum of a sum": (lambda b: tf.maximum(total(b), 0.0), "not linear"),
    "every pair of samples": (lambda b: b.z[:, None, :] - b.z[None], "pairs each sample with others"),
    "a tensor and its transpose": (lambda b: b.z[:, :1] + tf.transpose(b.z[:, :1]), "pairs each sample with others"),
    "rows in different orders": (
        lambda b: tf.tile(b.z, [2, 1]) * tf.repeat(b.x, 2, axis=0),
        "different orders|repeat|Repeat|inferred|samples",
    ),
    "positions as numbers": (lambda b: tf.cast(tf.range(b.n), tf.float64) * b.z[:, 0], "positions of samples"),
    "rows that are equal to a tensor of another shape": (
        lambda b: tf.cast(b.z == tf.ones([3], tf.float64), tf.float64),
        "shapes do not fit",
    ),
    "as many constants as samples": (
        lambda b: tf.ensure_shape(b.z, [9, 4]) * tf.ones([9, 1], tf.float64),
        "with entries of a tensor that all micro-batches share",
    ),
    "old-style select of constants by a vector": (
        lambda b: tf.raw_ops.Select(
            condition=tf.ensure_shape(b.mask, [9]), x=tf.ensure_shape(b.z, [9, 4]), y=tf.ones([9, 4], tf.float64)
        ),
        "chooses between rows",
    ),
    "chosen by a sum": (lambda b: tf.where(total(b) > 0, b.z, -b.z), "not linear"),
}


@pytest.mark.parametrize("case", TRUE)
def test_the_kind_is_as_expected_and_micro_batches_agree_with_it(case: str) -> None:
    compute, form = TRUE[case]
    assert assert_kind_is_true(compute).form is form


@pytest.mark.parametrize("case", COUPLED)
def test_what_couples_samples_says_how(case: str) -> None:
    assert_coupled(*COUPLED[case])


def test_a_sum_with_a_regulariser_is_a_sum_only_after_its_terms_are_weighted() -> None:
    kind = kind_of(lambda b: tf.reduce_sum(b.z) + tf.reduce_sum(b.w**2))
    assert (kind.form, kind.mixed) == (Form.SUM, True)


def test_a_sum_plus_a_mean_is_mixed() -> None:
    assert kind_of(lambda b: tf.reduce_sum(b.z) + tf.reduce_mean(b.z)).mixed


def test_a_function_of_a_mixed_sum_stays_mixed() -> None:
    assert kind_of(lambda b: (tf.reduce_sum(b.z) + tf.reduce_mean(b.z)) / 3.0).mixed


@pytest.mark.parametrize(
    ("compute", "slope"),
    [
        (lambda b: tf.range(b.n), (1,)),
        (lambda b: tf.range(b.n) * 3, (3,)),
        (lambda b: 5 - tf.range(b.n), (-1,)),
        (lambda b: tf.range(2 * b.n), (2,)),
        (lambda b: tf.range(b.n) - tf.range(b.n), ()),
    ],
)
def test_the_slope_of_positions(compute: Compute, slope: tuple[int, ...]) -> None:
    assert kind_of(compute).slope == slope
