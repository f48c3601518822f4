"""Reductions, matrix products and layers' kernels: over the batch axis, beside it, and between samples."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.kinds import Form
from tests.dapple_tf.frontend.dependence.evaluation import Batch, Compute, assert_coupled, assert_kind_is_true, kind_of


def matrices(b: Batch) -> Any:
    """[N, 2, 2]."""
    return tf.reshape(b.z, [-1, 2, 2])


def square(b: Batch) -> Any:
    """A trained matrix [4, 4]."""
    return b.w[:, None] * b.w[None]


def images(b: Batch) -> Any:
    """[N, 2, 2, 1], float32: kernels of the CPU have no float64."""
    return tf.cast(tf.reshape(b.z, [-1, 2, 2, 1]), tf.float32)


def kernel(b: Batch) -> Any:
    return tf.cast(tf.reshape(b.w, [2, 2, 1, 1]), tf.float32)


TRUE: dict[str, tuple[Compute, Form]] = {
    **{
        f"{name} of the columns": (lambda b, f=f: f(b.z, 1), Form.ROWS)
        for name, f in {
            "sum": tf.reduce_sum,
            "mean": tf.reduce_mean,
            "max": tf.reduce_max,
            "min": tf.reduce_min,
            "prod": tf.reduce_prod,
            "norm": tf.math.reduce_euclidean_norm,
            "logsumexp": tf.reduce_logsumexp,
            "variance": tf.math.reduce_variance,
        }.items()
    },
    "sum over the batch": (lambda b: tf.reduce_sum(b.z, 0), Form.SUM),
    "sum over everything": (lambda b: tf.reduce_sum(b.z), Form.SUM),
    "sum of transposed rows": (lambda b: tf.reduce_sum(tf.transpose(b.z), 1), Form.SUM),
    "mean over the batch": (lambda b: tf.reduce_mean(b.z, 0), Form.MEAN),
    "mean over everything": (lambda b: tf.reduce_mean(b.z), Form.MEAN),
    "mean of flat rows": (lambda b: tf.reduce_mean(tf.reshape(b.z, [-1])), Form.MEAN),
    "sum of a mean": (lambda b: tf.reduce_sum(tf.reduce_mean(b.z, 0)), Form.MEAN),
    "mean of sums": (lambda b: tf.reduce_mean(tf.reduce_sum(b.z, 0)), Form.SUM),
    "mean of a concat along the batch": (lambda b: tf.reduce_mean(tf.concat([b.z, b.x], 0), 0), Form.MEAN),
    "max over the untrained batch": (lambda b: tf.reduce_max(b.x), Form.SHARED),
    "any over the mask": (lambda b: tf.reduce_any(b.mask), Form.SHARED),
    "l2 loss": (lambda b: tf.nn.l2_loss(b.z), Form.SUM),
    "l2 loss of a variable": (lambda b: tf.nn.l2_loss(b.w + 0.0), Form.SHARED),
    "rows times a matrix": (lambda b: b.z @ square(b), Form.ROWS),
    "a matrix times transposed rows": (lambda b: square(b) @ tf.transpose(b.z), Form.ROWS),
    "transpose_b with rows first": (lambda b: tf.matmul(b.z, square(b), transpose_b=True), Form.ROWS),
    "rows second, by transpose_b": (lambda b: tf.matmul(square(b), b.z, transpose_b=True), Form.ROWS),
    "the covariance": (lambda b: tf.matmul(b.z, b.x, transpose_a=True), Form.SUM),
    "batched matrices": (lambda b: matrices(b) @ matrices(b), Form.ROWS),
    "batched matrices times one": (lambda b: matrices(b) @ square(b)[:2, :2], Form.ROWS),
    "attention inside a sample": (lambda b: tf.matmul(matrices(b), matrices(b), transpose_b=True), Form.ROWS),
    "a matrix times a mean": (lambda b: square(b) @ tf.reduce_mean(b.z, 0)[:, None], Form.MEAN),
    "einsum by rows": (lambda b: tf.einsum("ij,jk->ik", b.z, square(b)), Form.ROWS),
    "einsum transposed": (lambda b: tf.einsum("ij,jk->ki", b.z, square(b)), Form.ROWS),
    "einsum over the batch": (lambda b: tf.einsum("ij,ik->jk", b.z, b.x), Form.SUM),
    "einsum of two samples' rows": (lambda b: tf.einsum("ij,ij->i", b.z, b.x), Form.ROWS),
    "einsum with an ellipsis": (lambda b: tf.einsum("...ij,jk->...ik", matrices(b), square(b)[:2, :2]), Form.ROWS),
    "einsum of one operand": (lambda b: tf.einsum("ij->j", b.z), Form.SUM),
    "einsum of three operands": (lambda b: tf.einsum("ij,jk,ik->i", b.z, square(b), b.x), Form.ROWS),
    "argmax of columns": (lambda b: tf.argmax(b.z, 1), Form.ROWS),
    "cumsum of columns": (lambda b: tf.cumsum(b.z, 1), Form.ROWS),
    "cumsum of a sum": (lambda b: tf.cumsum(tf.reduce_sum(b.z, 0)), Form.SUM),
    "cumprod of columns": (lambda b: tf.math.cumprod(b.z, 1), Form.ROWS),
    "softmax": (lambda b: tf.nn.softmax(b.z), Form.ROWS),
    "log_softmax": (lambda b: tf.nn.log_softmax(b.z), Form.ROWS),
    "top_k": (lambda b: tf.math.top_k(b.z, 2).values, Form.ROWS),
    "the indices of top_k": (lambda b: tf.math.top_k(b.z, 2).indices, Form.ROWS),
    "sort of columns": (lambda b: tf.sort(b.z, 1), Form.ROWS),
    "in_top_k": (
        lambda b: tf.nn.in_top_k(b.y, tf.cast(b.z, tf.float32), 2),
        Form.ROWS,
    ),
    "sparse cross-entropy": (
        lambda b: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=b.y, logits=b.z),
        Form.ROWS,
    ),
    "cross-entropy": (lambda b: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(b.x), b.z), Form.ROWS),
    "bias_add": (lambda b: tf.nn.bias_add(b.z, b.w + 0.0), Form.ROWS),
    "bias_add of time-major rows": (
        lambda b: tf.nn.bias_add(tf.transpose(matrices(b), [1, 0, 2]), b.w[:2]),
        Form.ROWS,
    ),
    "bias_add, channels first": (
        lambda b: tf.nn.bias_add(tf.transpose(images(b), [0, 3, 1, 2]), tf.cast(b.w[:1], tf.float32), "NCHW"),
        Form.ROWS,
    ),
    "places in each sample's row": (lambda b: tf.searchsorted(tf.sort(b.x, 1), b.z), Form.ROWS),
    "places in one row": (
        lambda b: tf.searchsorted(tf.constant([-1.0, 0, 1], tf.float64), b.z[:, 0], "right"),
        Form.ROWS,
    ),
    "each sample's diagonal, set": (lambda b: tf.linalg.set_diag(matrices(b), b.x[:, :2]), Form.ROWS),
    "convolution": (lambda b: tf.nn.conv2d(images(b), kernel(b), 1, "SAME"), Form.ROWS),
    "max pooling": (lambda b: tf.nn.max_pool2d(images(b), 2, 1, "SAME"), Form.ROWS),
    "average pooling": (lambda b: tf.nn.avg_pool2d(images(b), 2, 1, "SAME"), Form.ROWS),
    "resize": (lambda b: tf.image.resize(images(b), [3, 3]), Form.ROWS),
    "space to depth": (lambda b: tf.nn.space_to_depth(images(b), 2), Form.ROWS),
    "batch norm by moving statistics": (
        lambda b: tf.compat.v1.nn.fused_batch_norm(
            images(b), [1.0], [0.0], mean=[0.5], variance=[2.0], is_training=False
        )[0],
        Form.ROWS,
    ),
    "inverse of each sample's matrix": (lambda b: tf.linalg.inv(matrices(b) + tf.eye(2, dtype=tf.float64)), Form.ROWS),
    "diagonal of each sample's matrix": (lambda b: tf.linalg.diag_part(matrices(b)), Form.ROWS),
    "diagonal matrices": (lambda b: tf.linalg.diag(b.z), Form.ROWS),
    "band of each sample's matrix": (lambda b: tf.linalg.band_part(matrices(b), 0, -1), Form.ROWS),
    "determinants": (lambda b: tf.linalg.det(matrices(b)), Form.ROWS),
    "fft": (lambda b: tf.math.abs(tf.signal.fft(tf.cast(b.z, tf.complex128))), Form.ROWS),
}


@pytest.mark.parametrize("case", TRUE)
def test_the_kind_is_as_expected_and_micro_batches_agree_with_it(case: str) -> None:
    compute, form = TRUE[case]
    assert assert_kind_is_true(compute).form is form


COUPLED: dict[str, tuple[Compute, str]] = {
    "max over the batch": (lambda b: tf.reduce_max(b.z), "takes the max over the batch"),
    "min over the batch": (lambda b: tf.reduce_min(b.z, 0), "takes the min over the batch"),
    "prod over the batch": (lambda b: tf.reduce_prod(b.z, 0), "takes the prod over the batch"),
    "norm over the batch": (lambda b: tf.math.reduce_euclidean_norm(b.z), "takes the euclideannorm over the batch"),
    "the mean of integers, which is rounded": (lambda b: tf.reduce_mean(tf.cast(b.z, tf.int32)), "takes the mean over"),
    "top_k by the batch size": (lambda b: tf.math.top_k(b.z, b.n % 3 + 1).values, "size of the micro-batch"),
    "a matrix and a broadcast one": (
        lambda b: tf.linalg.triangular_solve(matrices(b), matrices(b)[:, None] + tf.zeros([1, 2, 1, 1], tf.float64)),
        "operands of different ranks",
    ),
    "the l2 loss of positions": (
        lambda b: tf.raw_ops.L2Loss(t=tf.cast(tf.range(b.n) + tf.cast(b.z[:, 0], tf.int32), tf.float64)),
        "positions of samples",
    ),
    "max of a sum": (lambda b: tf.reduce_max(tf.reduce_sum(b.z, 0)), "applies Max to a sum or mean"),
    "the variance over the batch": (lambda b: tf.math.reduce_variance(b.z, 0), "sum or mean over the batch"),
    "logsumexp over the batch": (lambda b: tf.reduce_logsumexp(b.z, 0), "over the batch"),
    "l2 loss of a sum": (lambda b: tf.nn.l2_loss(tf.reduce_sum(b.z, 0)), "squares a sum or mean"),
    "z z^T": (lambda b: tf.matmul(b.z, b.z, transpose_b=True), "multiplies samples with each other"),
    "z x^T": (lambda b: b.z @ tf.transpose(b.x), "multiplies samples with each other"),
    "rows times a covariance": (
        lambda b: b.z @ tf.matmul(b.z, b.z, transpose_a=True),
        "multiplies samples with a sum or mean",
    ),
    "products in different orders": (
        lambda b: tf.matmul(tf.tile(b.z, [2, 1]), tf.repeat(b.x, 2, axis=0), transpose_a=True),
        "different orders",
    ),
    "einsum of pairs": (lambda b: tf.einsum("ik,jk->ij", b.z, b.z), "multiplies samples with each other"),
    "einsum of two sums": (lambda b: tf.einsum("ik,jk->k", b.z, b.z), "multiplies samples with each other"),
    "einsum of the batch with none": (
        lambda b: tf.einsum("ij,ik->jk", tf.ensure_shape(b.z, [9, 4]), tf.ones([9, 2], tf.float64)),
        "with entries of a tensor that all micro-batches share",
    ),
    "einsum of samples and as many of a constant": (
        lambda b: tf.einsum("ij,ij->i", tf.ensure_shape(b.z, [9, 4]), tf.ones([9, 4], tf.float64)),
        "with entries of a tensor that all micro-batches share",
    ),
    "matmul of the batch with none": (
        lambda b: tf.matmul(tf.ensure_shape(b.z, [9, 4]), tf.ones([9, 2], tf.float64), transpose_a=True),
        "with entries of a tensor that all micro-batches share",
    ),
    "a matrix of each sample times one of a constant": (
        lambda b: tf.ensure_shape(b.z, [9, 4])[:, None] @ tf.ones([9, 4, 1], tf.float64),
        "with entries of a tensor that all micro-batches share",
    ),
    "labels that are constants": (
        lambda b: tf.nn.softmax_cross_entropy_with_logits(tf.ones([9, 4], tf.float64), tf.ensure_shape(b.z, [9, 4])),
        "with entries of a tensor that all micro-batches share",
    ),
    "labels that are a number for each sample": (
        lambda b: (
            tf.raw_ops.SoftmaxCrossEntropyWithLogits(
                features=tf.ones([1, 1], tf.float64), labels=tf.nn.softmax(b.z, axis=1)[:, 0]
            ).loss
        ),
        "takes a number for each sample as the numbers of classes",
    ),
    "systems of equations with constant sides": (
        lambda b: tf.linalg.triangular_solve(tf.ensure_shape(b.z, [9, 4])[:, :1, None], tf.ones([9, 1, 2], tf.float64)),
        "with entries of a tensor that all micro-batches share",
    ),
    "whether constants are among the best": (
        lambda b: tf.math.in_top_k(tf.ones([9], tf.int32), tf.cast(tf.ensure_shape(b.z, [9, 4]), tf.float32), 2),
        "with entries of a tensor that all micro-batches share",
    ),
    "argmax over the batch": (lambda b: tf.argmax(b.z, 0), "applies ArgMax along the batch axis"),
    "cumsum over the batch": (lambda b: tf.cumsum(b.z, 0), "applies Cumsum along the batch axis"),
    "argmax of a sum": (lambda b: tf.argmax(tf.reduce_sum(b.z, 0)), "applies ArgMax to a sum or mean"),
    "softmax over the batch": (lambda b: tf.nn.softmax(b.z, axis=0), "applies Softmax along the batch axis"),
    "softmax of a mean": (lambda b: tf.nn.softmax(tf.reduce_mean(b.z, 0)), "applies Softmax to a sum or mean"),
    "top_k over the batch": (lambda b: tf.math.top_k(b.z[:, 0], 2).values, "applies TopKV2 along the batch axis"),
    "sort along the batch": (lambda b: tf.sort(b.z[:, 0]), "size of the micro-batch"),
    "a quantile": (lambda b: tf.sort(tf.reduce_sum(b.z, 1), direction="DESCENDING")[3], "size of the micro-batch"),
    "images across samples": (
        lambda b: tf.nn.avg_pool2d(tf.transpose(images(b), [1, 0, 2, 3]), 2, 1, "SAME"),
        "mixes the entries of all axes but the first",
    ),
    "a convolution with rows as its kernel": (
        lambda b: tf.nn.conv2d(tf.ones([1, 9, 9, 1]), tf.cast(b.z[..., None, None], tf.float32), 1, "SAME"),
        "uses samples as weights or parameters of Conv2D",
    ),
    "batch norm in training mode": (
        lambda b: tf.compat.v1.nn.fused_batch_norm(images(b), [1.0], [0.0], is_training=True)[0],
        "normalises by the mean and variance of the batch",
    ),
    "places among other samples": (
        lambda b: tf.searchsorted(tf.transpose(b.z), tf.transpose(b.x)),
        "searches the sorted values of other samples",
    ),
    "a diagonal that all matrices share": (
        lambda b: tf.linalg.set_diag(tf.reshape(tf.ensure_shape(b.z, [9, 4]), [9, 2, 2]), tf.ones([9, 2], tf.float64)),
        "with entries of a tensor that all micro-batches share",
    ),
    "a bias for each sample": (
        lambda b: tf.nn.bias_add(tf.transpose(tf.ensure_shape(b.z, [9, 4])), tf.ones([9], tf.float64)),
        "adds a bias for each sample",
    ),
    "crops by index": (
        lambda b: tf.image.crop_and_resize(images(b), [[0.0, 0.0, 1.0, 1.0]] * 9, b.y, [2, 2]),
        "picks images of the batch by index",
    ),
    "the inverse of a matrix of samples": (
        lambda b: tf.linalg.inv(tf.ensure_shape(tf.concat([b.z, b.z, b.z[:, :1]], 1), [9, 9])),
        "a matrix of samples",
    ),
    "a diagonal of samples": (lambda b: tf.linalg.diag(b.z[:, 0]), "a matrix of samples"),
    "bias_add of a sum": (lambda b: tf.nn.bias_add(b.z, tf.reduce_sum(b.z, 0)), "to a sum or mean over the batch"),
    "reduced axes that samples choose": (
        lambda b: tf.reduce_sum(b.z[:, :, None], b.y[:1] * 0),
        "slices the batch|axes that depend on samples|axes that cannot be inferred",
    ),
}


@pytest.mark.parametrize("case", COUPLED)
def test_what_couples_samples_says_how(case: str) -> None:
    assert_coupled(*COUPLED[case])


def test_a_mean_over_chosen_rows_is_a_sum_after_it_is_weighted() -> None:
    kind = kind_of(lambda b: tf.reduce_mean(tf.boolean_mask(b.z, b.mask)))
    assert (kind.form, kind.mixed) == (Form.SUM, True)


def test_a_sum_over_chosen_rows_is_a_sum() -> None:
    kind = assert_kind_is_true(lambda b: tf.reduce_sum(tf.boolean_mask(b.z, b.mask)))
    assert (kind.form, kind.mixed) == (Form.SUM, False)
