"""Ops that move, repeat or join entries: where the batch axis is afterwards, and which of them mix samples."""

from __future__ import annotations

import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.kinds import Form
from tests.dapple_tf.frontend.dependence.evaluation import Batch, Compute, assert_coupled, assert_kind_is_true, kind_of

# --- rows: the axis, and how many blocks (outer) and entries a sample (inner) it has

ROWS: dict[str, tuple[Compute, tuple[int, int, int]]] = {
    "transpose": (lambda b: tf.transpose(b.z), (1, 1, 1)),
    "flatten": (lambda b: tf.reshape(b.z, [-1]), (0, 1, 4)),
    "split each sample": (lambda b: tf.reshape(b.z, [-1, 2, 2]), (0, 1, 1)),
    "two rows a sample": (lambda b: tf.reshape(b.z, [-1, 2]), (0, 1, 2)),
    "flatten and back": (lambda b: tf.reshape(tf.reshape(b.z, [-1]), [-1, 4]), (0, 1, 1)),
    "flatten a transposed": (lambda b: tf.reshape(tf.transpose(b.z), [-1]), (0, 4, 1)),
    "reshape by the batch size": (lambda b: tf.reshape(b.z, [b.n, 2, 2]), (0, 1, 1)),
    "reshape by twice the batch size": (lambda b: tf.reshape(b.z, [2 * b.n, 2]), (0, 1, 2)),
    "an axis in front": (lambda b: b.z[None], (1, 1, 1)),
    "an axis behind": (lambda b: b.z[..., None], (0, 1, 1)),
    "squeeze": (lambda b: tf.squeeze(b.z[None], 0), (0, 1, 1)),
    "squeeze of all axes of length 1": (lambda b: tf.squeeze(b.z[None, :, None]), (0, 1, 1)),
    "columns": (lambda b: b.z[:, 1:3], (0, 1, 1)),
    "one column": (lambda b: b.z[:, 0], (0, 1, 1)),
    "columns backwards": (lambda b: b.z[:, ::-1], (0, 1, 1)),
    "columns of a transposed": (lambda b: tf.transpose(b.z)[1], (0, 1, 1)),
    "all rows": (lambda b: b.z[:], (0, 1, 1)),
    "tf.slice of columns": (lambda b: tf.slice(b.z, [0, 1], [-1, 2]), (0, 1, 1)),
    "concat of columns": (lambda b: tf.concat([b.z, b.x], 1), (0, 1, 1)),
    "concat along the batch": (lambda b: tf.concat([b.z, b.x], 0), (0, 2, 1)),
    "concat of ones and zeros": (lambda b: tf.concat([tf.ones([b.n, 2]), tf.zeros([b.n, 2])], 0), (0, 2, 1)),
    "concat of rows and ones": (
        lambda b: tf.concat([b.z, tf.ones_like(b.z), tf.ones([2 * b.n, 4], b.z.dtype)], 0),
        (0, 4, 1),
    ),
    "a half of a concat": (lambda b: tf.concat([b.z, b.x], 0)[: b.n], (0, 1, 1)),
    "the other half": (lambda b: tf.concat([b.z, b.x], 0)[b.n :], (0, 1, 1)),
    "tf.split of a concat": (lambda b: tf.split(tf.concat([b.z, b.x], 0), 2)[1], (0, 1, 1)),
    "stack in front": (lambda b: tf.stack([b.z, b.x]), (1, 1, 1)),
    "stack behind": (lambda b: tf.stack([b.z, b.x], -1), (0, 1, 1)),
    "unstack columns": (lambda b: tf.unstack(b.z, axis=1)[2], (0, 1, 1)),
    "split columns": (lambda b: tf.split(b.z, 2, 1)[1], (0, 1, 1)),
    "split columns unevenly": (lambda b: tf.split(b.z, [1, 3], 1)[1], (0, 1, 1)),
    "tile columns": (lambda b: tf.tile(b.z, [1, 3]), (0, 1, 1)),
    "tile the batch": (lambda b: tf.tile(b.z, [3, 1]), (0, 3, 1)),
    "repeat each sample": (lambda b: tf.repeat(b.z, 2, axis=0), (0, 1, 2)),
    "repeat columns": (lambda b: tf.repeat(b.z, 2, axis=1), (0, 1, 1)),
    "pad columns": (lambda b: tf.pad(b.z, [[0, 0], [1, 2]]), (0, 1, 1)),
    "mirror columns": (lambda b: tf.pad(b.z, [[0, 0], [1, 2]], "REFLECT"), (0, 1, 1)),
    "roll columns": (lambda b: tf.roll(b.z, 1, 1), (0, 1, 1)),
    "reverse columns": (lambda b: tf.reverse(b.z, [1]), (0, 1, 1)),
    "reverse by lengths": (lambda b: tf.reverse_sequence(b.z, b.y, seq_axis=1), (0, 1, 1)),
    "broadcast behind": (lambda b: tf.broadcast_to(b.z[..., None], [b.n, 4, 3]), (0, 1, 1)),
    "broadcast in front": (lambda b: tf.broadcast_to(b.z, [3, b.n, 4]), (1, 1, 1)),
    "zeros of the batch's size": (lambda b: tf.zeros([b.n, 2]) + tf.cast(b.z[:, :2], tf.float32), (0, 1, 1)),
    "space to batch": (lambda b: tf.space_to_batch(b.z[..., None], [4], [[0, 0]]), (0, 4, 1)),
    "space to batch and back": (
        lambda b: tf.batch_to_space(tf.space_to_batch(b.z[..., None], [4], [[0, 0]]), [4], [[0, 0]]),
        (0, 1, 1),
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_stay_rows_and_micro_batches_agree(case: str) -> None:
    compute, expected = ROWS[case]
    kind = assert_kind_is_true(compute)
    assert kind.rows, kind
    assert (kind.axis, kind.outer, kind.inner) == expected


# --- sums, means, shared values and sizes: what moves entries is linear

TOTALS: dict[str, tuple[Compute, Form]] = {
    "reshape of a sum": (lambda b: tf.reshape(tf.reduce_sum(b.z, 0), [2, 2]), Form.SUM),
    "concat of sums": (lambda b: tf.concat([tf.reduce_sum(b.z, 0), tf.reduce_sum(b.z**2, 0)], 0), Form.SUM),
    "stack of means": (lambda b: tf.stack([tf.reduce_mean(b.z), tf.reduce_mean(b.z**2)]), Form.MEAN),
    "stack of a mean and a variable": (lambda b: tf.stack([tf.reduce_mean(b.z), b.w[0]]), Form.MEAN),
    "slice of a mean": (lambda b: tf.reduce_mean(b.z, 0)[1:], Form.MEAN),
    "pad of a sum": (lambda b: tf.pad(tf.reduce_sum(b.z, 0), [[1, 1]]), Form.SUM),
    "tile of a mean": (lambda b: tf.tile(tf.reduce_mean(b.z, 0), [2]), Form.MEAN),
    "the shape of rows' other axes": (lambda b: tf.shape(b.z)[1] * 2, Form.SHARED),
    "the rank": (lambda b: tf.rank(b.z), Form.SHARED),
    "a range of columns": (lambda b: tf.range(tf.shape(b.z)[1]), Form.SHARED),
    "the sum of a range from the middle": (
        lambda b: tf.reduce_sum(tf.range(b.n // 2, b.n)),
        Form.SHARED,
    ),  # of the whole batch, once
    "the batch size": (lambda b: b.n, Form.SIZE),
    "a shape that shapes broadcast to": (
        lambda b: tf.broadcast_dynamic_shape(tf.shape(b.z), tf.constant([3, 1, 4])),
        Form.SIZE,
    ),
    "a shape that constants broadcast to": (
        lambda b: tf.broadcast_dynamic_shape(tf.shape(b.z)[1:], tf.constant([3, 1])),
        Form.SHARED,
    ),
    "the shape": (lambda b: tf.shape(b.z), Form.SIZE),
    "a slice of the shape": (lambda b: tf.shape(b.z)[:1] * 2, Form.SIZE),
}


@pytest.mark.parametrize("case", TOTALS)
def test_other_kinds_are_kept(case: str) -> None:
    compute, form = TOTALS[case]
    assert assert_kind_is_true(compute).form is form


def test_a_stack_of_a_sum_and_a_mean_is_mixed() -> None:
    assert kind_of(lambda b: tf.stack([tf.reduce_sum(b.z), tf.reduce_mean(b.z)])).mixed


def test_rows_of_ones_belong_to_any_samples() -> None:
    kind = kind_of(lambda b: tf.ones([b.n, 2]))
    assert (kind.form, kind.axis, kind.outer) == (Form.ROWS, 0, 0)


# --- what couples samples


def chosen(b: Batch) -> tf.Tensor:
    return tf.boolean_mask(b.z, b.mask)


OF_THE_WHOLE_BATCH: dict[str, Compute] = {
    "samples backwards": lambda b: tf.reverse(b.x, [0]),
    "neighbours": lambda b: tf.roll(b.x, 1, 0),
    "samples in order": lambda b: tf.sort(b.x, 0),
    "sums so far": lambda b: tf.cumsum(b.x, 0),
    "a softmax over the batch": lambda b: tf.nn.softmax(b.x, 0),
    "the most similar samples": lambda b: tf.argmax(b.x @ tf.transpose(b.x) - 9 * tf.eye(b.n, dtype=tf.float64), 1),
    "the number of each distinct label": lambda b: tf.gather(tf.unique_with_counts(b.y).count, tf.unique(b.y).idx),
    "samples that a nested function moves": lambda b: tf.function(lambda x: tf.reverse(x, [0]))(b.x),
    "every label's best": lambda b: tf.math.top_k(b.x[:, 0], b.n).indices,
    "constants by the batch size": lambda b: tf.math.top_k(tf.range(4000.0), b.n).values,
    "positions compared with a number": lambda b: tf.range(b.n) < 3,
    "rows before a position": lambda b: b.x * tf.cast(tf.range(b.n) < 700, tf.float64)[:, None],
    "one_hot of positions": lambda b: tf.one_hot(tf.range(b.n), 9),
    "one_hot of the batch size": lambda b: tf.one_hot(b.y, b.n),
    "eye of the batch size": lambda b: tf.eye(b.n, dtype=tf.float64) + b.x[:, :1],
    "rows moved by one": lambda b: tf.concat([b.x[1:], b.x[:1]], 0),
    "a draw for each pair of samples": lambda b: tf.random.stateless_normal([b.n, b.n], [1, 2]),
}


@pytest.mark.parametrize("case", OF_THE_WHOLE_BATCH)
def test_what_combines_samples_of_the_arguments_is_computed_once_and_micro_batches_take_their_rows(case: str) -> None:
    kind = assert_kind_is_true(OF_THE_WHOLE_BATCH[case])
    assert (kind.form, kind.axis, kind.outer, kind.inner) == (Form.ROWS, 0, 1, 1)


COUPLED: dict[str, tuple[Compute, str]] = {
    "the first samples": (lambda b: b.z[:2], "slices the batch"),
    "all but the first": (lambda b: b.z[1:], "slices the batch"),
    "the first sample": (lambda b: b.z[0], "slices the batch"),
    "every second sample": (lambda b: b.z[::2], "slices the batch"),
    "samples backwards": (lambda b: b.z[::-1], "slices the batch"),
    "half of the batch": (lambda b: b.z[: b.n // 2], "slices"),
    "tf.slice of samples": (lambda b: tf.slice(b.z, [1, 0], [2, 4]), "slices the batch"),
    "entries of a flat batch": (lambda b: tf.reshape(b.z, [-1])[1:], "slices the batch"),
    "reverse": (lambda b: tf.reverse(b.z, [0]), "moves samples along the batch axis"),
    "roll": (lambda b: tf.roll(b.z, 1, 0), "moves samples along the batch axis"),
    "reverse_sequence along the batch": (
        lambda b: tf.reverse_sequence(tf.transpose(b.z), tf.constant([2, 2, 2, 2]), seq_axis=1, batch_axis=0),
        "moves samples along the batch axis",
    ),
    "unstack of samples": (lambda b: tf.unstack(tf.ensure_shape(b.z, [9, 4]))[0], "unstacks the batch"),
    "split of samples": (lambda b: tf.split(b.z, [2, b.n - 2])[0], "splits the batch"),
    "pad of the batch": (lambda b: tf.pad(b.z, [[1, 0], [0, 0]]), "pads the batch axis"),
    "concat with foreign rows": (lambda b: tf.concat([b.z, b.w[None]], 0), "rows that are no samples"),
    "concat with constants but for as many as there are samples": (
        lambda b: tf.concat([b.x, tf.zeros([16, 4], tf.float64)[: -b.n]], 0),
        "cannot be inferred",
    ),
    "at least eight rows": (lambda b: tf.pad(b.x, [[0, tf.maximum(8 - b.n, 0)], [0, 0]]), "pads the batch axis"),
    "concat on different axes": (
        lambda b: tf.concat([b.z[None, :, 0], b.z[:, :1]], 0),
        "on different axes",
    ),
    "concat of rows in different orders": (
        lambda b: tf.concat([tf.tile(b.z, [2, 1]), tf.repeat(b.x, 2, axis=0)], 1),
        "different orders",
    ),
    "concat with as many constants as samples": (
        lambda b: tf.concat([tf.ensure_shape(b.z, [9, 4]), tf.ones([9, 1], tf.float64)], 1),
        "rows that are no samples",
    ),
    "stack with as many constants as samples": (
        lambda b: tf.stack([tf.ensure_shape(b.z, [9, 4]), tf.ones([9, 4], tf.float64)]),
        "with entries of a tensor that all micro-batches share",
    ),
    "reverse by as many constant lengths as samples": (
        lambda b: tf.reverse_sequence(tf.ensure_shape(b.z, [9, 4]), tf.constant([2] * 9), seq_axis=1),
        "moves samples along the batch axis",
    ),
    "stack of rows in different orders": (
        lambda b: tf.stack([tf.tile(b.z, [2, 1]), tf.repeat(b.x, 2, axis=0)]),
        "different orders",
    ),
    "tile as often as there are samples": (lambda b: tf.tile(b.z, [b.n, 1]), "repeats the batch a number of times"),
    "pairs by broadcast_to": (lambda b: tf.broadcast_to(b.z[:, :1], [b.n, b.n]), "pairs each sample with others"),
    "a reshape that shares samples": (lambda b: tf.reshape(b.z, [4, -1]), "reshapes the batch"),
    "a reshape of transposed rows": (lambda b: tf.reshape(tf.transpose(b.z), [-1, 4]), "reshapes the batch"),
    "a mean, once for each sample": (
        lambda b: tf.broadcast_to(tf.reduce_mean(b.z, 0), tf.shape(b.z)),
        "repeats or cuts a sum or mean",
    ),
    "two rows in turn": (lambda b: b.z[:, :1] - tf.tile(b.w[:2, None], [b.n, 1])[: b.n], "differently"),
    "a table's first rows": (lambda b: b.z - (tf.ones([2000, 1], tf.float64) * b.w)[: b.n], "cannot be inferred"),
    "a window that is longer than most batches": (lambda b: tf.reduce_sum(b.z[:1500], 1), "differently"),
    "columns by the batch size": (lambda b: b.z[:, : b.n % 3 + 1], "cannot be inferred|another axis"),
    "a matrix of the batch's size, filled": (lambda b: tf.fill([b.n * b.n], tf.reduce_sum(b.w)), "cannot be inferred"),
    "a total padded with ones": (
        lambda b: tf.pad(tf.reduce_sum(b.z, 0), [[1, 1]], constant_values=1),
        "pads a sum or mean",
    ),
    "filled with a sum": (lambda b: tf.fill([b.n], tf.reduce_sum(b.z)), "sum"),
    "concat of rows and their mean": (
        lambda b: tf.concat([b.z, tf.reduce_mean(b.z, 0, keepdims=True)], 0),
        "combines samples with a sum or mean",
    ),
    "a reshape of chosen rows": (lambda b: tf.reshape(chosen(b), [-1, 8]), "chose"),
    "chosen rows twice": (lambda b: tf.tile(chosen(b), [2, 1]), "repeats the batch along its own axis"),
    "chosen rows in two orders": (lambda b: tf.concat([chosen(b), chosen(b)], 0), "concatenates along the batch axis"),
    "the first chosen row": (lambda b: chosen(b)[0], "slices the batch"),
}


@pytest.mark.parametrize("case", COUPLED)
def test_what_couples_samples_says_how(case: str) -> None:
    assert_coupled(*COUPLED[case])
