"""Ops that pick entries by index, choose rows by data, sum rows by label, and write rows to positions."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.kinds import Form
from tests.dapple_tf.frontend.dependence.evaluation import Batch, Compute, assert_coupled, assert_kind_is_true, kind_of


def own(b: Batch) -> Any:
    """The position of each sample."""
    return tf.range(b.n)


def by_label(b: Batch) -> Any:
    """The sum of z over the samples of each label, [4, 4]."""
    return tf.math.unsorted_segment_sum(b.z, b.y, 4)


def pairs(b: Batch) -> Any:
    """[N, 2] of each sample's position and its label."""
    return tf.stack([own(b), b.y], 1)


TRUE: dict[str, tuple[Compute, Form]] = {
    "a table by labels": (lambda b: tf.gather(b.w + 0.0, b.y), Form.ROWS),
    "a table's columns by labels": (lambda b: tf.gather(tf.ones([2, 4], tf.float64) * b.w, b.y, axis=1), Form.ROWS),
    "constant columns": (lambda b: tf.gather(b.z, [2, 0], axis=1), Form.ROWS),
    "one column": (lambda b: tf.gather(b.z, 2, axis=1), Form.ROWS),
    "constant rows of a transposed": (lambda b: tf.gather(tf.transpose(b.z), [2, 0]), Form.ROWS),
    "each sample's column": (lambda b: tf.gather(b.z, b.y, axis=1, batch_dims=1), Form.ROWS),
    "each sample's columns": (lambda b: tf.gather(b.z, tf.stack([b.y, b.y], 1), batch_dims=1), Form.ROWS),
    "each sample's columns by equal rows": (
        lambda b: tf.gather(b.z, tf.broadcast_to([[2, 0]], [b.n, 2]), batch_dims=1),
        Form.ROWS,
    ),
    "columns along an axis": (lambda b: keras.ops.take_along_axis(b.z, tf.constant([[2, 0]]), 1), Form.ROWS),
    "each sample by its own position": (lambda b: tf.gather(b.z, own(b)), Form.ROWS),
    "each sample's column by gather_nd": (lambda b: tf.gather_nd(b.z, pairs(b)), Form.ROWS),
    "a table by gather_nd": (lambda b: tf.gather_nd(b.w + 0.0, b.y[:, None]), Form.ROWS),
    "gather_nd with batch_dims of columns": (lambda b: tf.gather_nd(tf.transpose(b.z), [[1], [2]]), Form.ROWS),
    "gather from a mean by constants": (lambda b: tf.gather(tf.reduce_mean(b.z, 0), [0, 2]), Form.MEAN),
    "gather from a sum by constants": (lambda b: tf.gather(tf.reduce_sum(b.z, 0), 1), Form.SUM),
    "gather from untrained class sums by labels": (
        lambda b: tf.gather(tf.math.unsorted_segment_sum(b.x, b.y, 4), b.y),
        Form.ROWS,
    ),
    "class weights": (lambda b: tf.gather(1 / (1 + tf.math.bincount(b.y, dtype=tf.float64)), b.y), Form.ROWS),
    "one_hot": (lambda b: tf.one_hot(b.y, 4), Form.ROWS),
    "one_hot in front": (lambda b: tf.one_hot(b.y, 4, axis=0), Form.ROWS),
    "one_hot of a constant": (lambda b: tf.one_hot([1, 2], 4), Form.SHARED),
    "where": (lambda b: tf.where(b.mask), Form.ROWS),
    "where of all rows": (lambda b: tf.where(tf.ones_like(b.mask)), Form.ROWS),
    "where of all entries": (lambda b: tf.where(tf.ones_like(b.x, tf.bool)), Form.ROWS),
    "boolean_mask": (lambda b: tf.boolean_mask(b.z, b.mask), Form.ROWS),
    "boolean_masks of one mask": (
        lambda b: tf.boolean_mask(b.z, b.mask) * tf.boolean_mask(b.x, tf.identity(b.mask)),
        Form.ROWS,
    ),
    "segment sum": (by_label, Form.SUM),
    "a segment sum of the input": (lambda b: tf.math.unsorted_segment_sum(b.x, b.y, 4), Form.SHARED),
    "a table by labels scattered to own positions": (
        lambda b: tf.tensor_scatter_nd_update(b.z, own(b)[:, None], b.x),
        Form.ROWS,
    ),
    "a count of each sample's values": (
        lambda b: tf.math.bincount(tf.stack([b.y, b.y], 1), minlength=4, maxlength=4, axis=-1),
        Form.ROWS,
    ),
    "a count of each sample's values, weighted": (
        lambda b: tf.raw_ops.DenseBincount(input=tf.stack([b.y, b.y], 1), size=4, weights=b.z[:, :2]),
        Form.ROWS,
    ),
    "crops of each sample's image": (
        lambda b: tf.image.crop_and_resize(
            tf.cast(tf.reshape(b.z, [-1, 2, 2, 1]), tf.float32),
            tf.broadcast_to([[0.0, 0.0, 1.0, 1.0]], [b.n, 4]),
            own(b),
            [3, 3],
        ),
        Form.ROWS,
    ),
    "bincount": (lambda b: tf.math.bincount(b.y, minlength=4, maxlength=4), Form.SHARED),
}


@pytest.mark.parametrize("case", TRUE)
def test_the_kind_is_as_expected_and_micro_batches_agree_with_it(case: str) -> None:
    compute, form = TRUE[case]
    assert assert_kind_is_true(compute).form is form


COUPLED: dict[str, tuple[Compute, str]] = {
    "columns of a transposed by a flat table of equal rows": (
        lambda b: (
            tf.reshape(tf.transpose(b.z), [-1])
            * tf.reshape(tf.broadcast_to(tf.constant([[1.0, 2, 3, 4]], tf.float64), [b.n, 4]), [-1])
        ),
        "different order",
    ),
    "another sample's row": (lambda b: tf.gather(b.z, (own(b) + 1) % b.n), "position|picks samples"),
    "rows by label": (lambda b: tf.gather(b.z, b.y), "picks samples of the batch by index"),
    "rows by constants": (lambda b: tf.gather(b.z, [0, 1]), "picks samples of the batch by index"),
    "rows by positions of an order in a variable": (
        lambda b: tf.gather(b.z, tf.cast(b.u, tf.int32)),
        "picks samples of the batch by index",
    ),
    "columns of all samples by every label": (lambda b: tf.gather(b.z, b.y, axis=1), "pairs each sample with others"),
    "rows by gather_nd": (lambda b: tf.gather_nd(b.z, b.y[:, None]), "picks samples of the batch by index"),
    "a position in a table by gather_nd": (lambda b: tf.gather_nd(b.w + 0.0, own(b)[:, None]), "positions of samples"),
    "a position in a variable": (lambda b: tf.gather(b.w, own(b)), "positions of samples"),
    "a sum over the batch by labels": (lambda b: tf.gather(by_label(b), b.y), "entries of a sum or mean"),
    "a sum over the batch by labels, gather_nd": (
        lambda b: tf.gather_nd(by_label(b), b.y[:, None]),
        "entries of a sum or mean",
    ),
    "other rows of the same batch by batch_dims": (
        lambda b: tf.gather(tf.tile(b.z, [2, 1]), tf.repeat(b.y, 2)[:, None], batch_dims=1),
        "picks entries of other samples",
    ),
    "an entry named by a sum": (
        lambda b: tf.gather(b.w, tf.reduce_sum(tf.cast(b.z > 0, tf.int32)) % 1),
        "sum or mean",
    ),
    "a column named by the batch size": (lambda b: tf.gather(b.z, b.n % 4, axis=1), "size of the micro-batch"),
    "one_hot of a sum": (lambda b: tf.one_hot(tf.reduce_sum(tf.cast(b.z > 0, tf.int32)), 20), "a sum over the batch"),
    "rows that another mask chose": (
        lambda b: tf.boolean_mask(b.z, b.mask) * tf.boolean_mask(b.x, tf.roll(b.mask, 1, 0)),
        "chosen by different data|coupled|batch",
    ),
    "positions of chosen rows": (lambda b: tf.cast(tf.where(b.mask), tf.float64) * b.w[0], "positions of samples"),
    "true entries of a transposed mask": (
        lambda b: tf.where(tf.transpose(b.z > 0)),
        "a tensor whose first axis is not the batch",
    ),
    "segment sum by positions": (
        lambda b: tf.math.unsorted_segment_sum(b.z, own(b), 9),
        "sums samples by label",
    ),
    "as many segments as samples": (lambda b: tf.math.unsorted_segment_sum(b.z, b.y, b.n), "sums samples by label"),
    "segment maximum": (lambda b: tf.math.unsorted_segment_max(b.z, b.y, 4), "combines samples by label"),
    "scatter to labels": (
        lambda b: tf.tensor_scatter_nd_update(b.z, b.y[:, None], b.x),
        "writes samples to positions of others",
    ),
    "a table of which labels choose": (
        lambda b: tf.tensor_scatter_nd_update(b.z[:4], b.y[:4, None], b.z[:4]),
        "differently",
    ),
    "unique values": (lambda b: tf.unique(tf.reduce_sum(b.z, 1)).y, "not known to treat samples one by one"),
}


@pytest.mark.parametrize("case", COUPLED)
def test_what_couples_samples_says_how(case: str) -> None:
    assert_coupled(*COUPLED[case])


def test_a_variable_looked_up_by_labels_gives_rows() -> None:
    """``ResourceGather``, which reads the variable itself."""
    kind = kind_of(lambda b: tf.gather(b.w, b.y))
    assert (kind.form, kind.axis, kind.trained) == (Form.ROWS, 0, True)


def test_chosen_rows_name_what_chose_them() -> None:
    kind = kind_of(lambda b: tf.boolean_mask(b.z, b.mask))
    assert "input/2" in kind.origin
    assert not kind.slope
    assert kind_of(lambda b: tf.where(b.mask)).slope == (1,)
