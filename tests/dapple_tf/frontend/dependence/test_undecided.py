"""Ops and loops without a rule: what an experiment finds, and what it must not find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf import variable_values
from dapple_tf.frontend.dependence.experiment import Limits, Operand, decide
from dapple_tf.frontend.dependence.kinds import Form
from dapple_tf.frontend.dependence.undecided import Experiments
from tests.dapple_tf.frontend.dependence.evaluation import (
    Batch,
    Compute,
    analyse,
    assert_kind_is_true,
    kind_of,
    make_loss,
)


def cube(b: Batch) -> Any:
    return tf.reshape(b.z[:, :, None] * tf.ones([1, 1, 4], tf.float64), [-1, 4, 4])


def centered_by_stop_gradient(b: Batch) -> Any:
    """The identity, whose gradient has the mean over the batch: only the gradient tells that samples are combined."""
    mean = tf.reduce_mean(tf.map_fn(tf.identity, b.z))
    return tf.map_fn(lambda row: row + (mean - tf.stop_gradient(mean)), b.z)


def in_own_loop(compute: Callable[[Batch, Any], Any]) -> Compute:
    """Return a loop over the samples with a counter of its own, which ``compute`` gets."""

    def loop(b: Batch) -> Any:
        rows = tf.TensorArray(tf.float64, size=b.n, element_shape=[4])

        def body(i: Any, rows: Any) -> tuple[Any, Any]:
            return i + 1, rows.write(i, compute(b, i))

        return tf.ensure_shape(tf.while_loop(lambda i, rows: i < b.n, body, (0, rows))[1].stack(), [None, 4])

    return loop


def grow_after(count: Any, most: float) -> Any:
    return 1.0 + tf.nn.relu(tf.cast(count, tf.float64) - most)


def lengths_as_texts(numbers: Any) -> Any:
    return tf.cast(tf.strings.length(tf.strings.as_string(numbers)), tf.float64)


ROWS: dict[str, Compute] = {
    "map_fn": lambda b: tf.map_fn(tf.tanh, b.z),
    "map_fn to a number": lambda b: tf.map_fn(tf.reduce_sum, b.z),
    "map_fn of two tensors": lambda b: tf.map_fn(lambda t: t[0] * t[1], (b.z, b.x), fn_output_signature=tf.float64),
    "vectorized_map": lambda b: tf.vectorized_map(lambda row: row * tf.reduce_max(row), b.z),
    "vectorized_map of a product": lambda b: tf.vectorized_map(
        lambda row: tf.linalg.matvec(tf.eye(4, dtype=tf.float64), row), b.z
    ),
    "cross product": lambda b: tf.linalg.cross(b.z[:, :3], b.x[:, :3]),
    "matrix square root": lambda b: tf.linalg.sqrtm(cube(b) + 9 * tf.eye(4, dtype=tf.float64)),
    "matrix exponential": lambda b: tf.linalg.expm(cube(b) / 9),
    "diagonal of a rank less": lambda b: tf.linalg.set_diag(cube(b), b.x),
    "searchsorted": lambda b: b.z * tf.cast(tf.searchsorted(tf.sort(b.x), b.z), tf.float64),
    "a box of each image": lambda b: tf.image.crop_and_resize(
        tf.cast(cube(b), tf.float32)[..., None], tf.tile([[0.0, 0.0, 0.5, 1.0]], [b.n, 1]), tf.range(b.n), [3, 3]
    ),
    "one entry of each row": lambda b: tf.gather_nd(b.z, b.y[:, None], batch_dims=1),
    "buckets": lambda b: b.z * tf.cast(tf.raw_ops.Bucketize(input=b.x, boundaries=[-0.5, 0.0, 0.5]), tf.float64),
    "rows by a counter": in_own_loop(lambda b, i: tf.tanh(b.z[i])),
    "rows by a counter, with a mask and numbers of pictures": in_own_loop(
        lambda b, i: tf.where(b.x[i] > 0, b.z[i] / 255.0, -1e9)
    ),
    "counts in each row": lambda b: tf.math.bincount(tf.cast(b.z, tf.int32) % 4, minlength=4, maxlength=4, axis=-1),
    "rows by positions times 2": lambda b: tf.gather(b.z, tf.range(b.n) * 2 // 2),
}
SUMS: dict[str, Compute] = {
    "scatter into a table": lambda b: tf.scatter_nd(b.y[:, None], b.z, [4, 4]),
    "the last of a scan that adds": lambda b: tf.foldl(lambda a, row: a + row, b.z),
}
MEANS: dict[str, Compute] = {
    "a loop that divides by the number of samples": lambda b: tf.while_loop(
        lambda i, total: i < b.n,
        lambda i, total: (i + 1, total + tf.tanh(b.z[i]) / tf.cast(b.n, tf.float64)),
        (0, tf.zeros([4], tf.float64)),
    )[1],
}
COUPLED: dict[str, Compute] = {
    "scan": lambda b: tf.scan(lambda a, row: a + row, b.z),
    "unique values, which must be as many as the samples": lambda b: tf.reduce_sum(b.z, 1) * tf.unique(b.x[:, 0]).y,
    "unique": lambda b: tf.unique(tf.reduce_sum(b.z, 1)).idx,
    "a loop until all have converged": lambda b: tf.while_loop(
        lambda t: tf.reduce_max(tf.abs(t)) > 0.1, lambda t: (t / 2,), [b.z]
    )[0],
    "a loop without an end": lambda b: tf.while_loop(lambda t: tf.reduce_max(t) > -1, lambda t: (tf.abs(t),), [b.z])[0],
    "a picture that holds five samples": lambda b: tf.reduce_sum(
        tf.raw_ops.ImageProjectiveTransformV3(
            images=tf.transpose(b.z)[..., None, None],
            transforms=[[1.0, 0, 0, 0, 1.0, 0, 0, 0]],
            output_shape=[5, 1],
            fill_value=0.0,
            interpolation="NEAREST",
        )
    ),
    "a loop that compares the largest entry of the batch": lambda b: tf.map_fn(
        lambda row: tf.cond(tf.reduce_max(tf.abs(b.z)) > 500.0, lambda: row * 0.5, lambda: row), b.z
    ),
    "a table by position that ends with a smaller entry": lambda b: tf.map_fn(
        lambda i: b.z[i] * tf.constant([1.0] * 15 + [0.5], tf.float64)[i],
        tf.range(tf.shape(b.z)[0]),
        fn_output_signature=tf.float64,
    ),
    "a sum that ends at a large number": lambda b: tf.foldl(
        lambda total, row: tf.minimum(total + tf.reduce_sum(tf.abs(row)), 900.0), b.z, tf.constant(0.0, tf.float64)
    ),
    "a loop that compares the number of samples": lambda b: tf.while_loop(
        lambda i, _: i < 1,
        lambda i, h: (i + 1, tf.where(tf.cast(tf.shape(h)[0], tf.float64) > 20.0, 2.0 * h, h)),
        (0, b.z),
    )[1],
    "a nested function that computes with the number of samples": lambda b: tf.function(
        lambda h: h + tf.nn.relu(tf.cast(tf.shape(h)[0], tf.float64) - 20.0)
    )(b.z),
    "only the gradient": centered_by_stop_gradient,
    "more samples than any experiment has": lambda b: tf.map_fn(tf.identity, b.z)[:1500],
    "an op that ends the process where a part has no entries": lambda b: tf.math.real(
        tf.signal.rfft(tf.map_fn(tf.identity, b.z)[1:])
    ),
    "a ragged tensor whose lengths do not come from its values": lambda b: tf.RaggedTensor.from_row_splits(
        tf.boolean_mask(b.z, b.z > 0), tf.concat([[0], tf.cumsum(b.y)], 0), validate=False
    ).to_tensor(),
    "an op that ends the process where operands differ in their numbers of rows": lambda b: tf.searchsorted(
        tf.map_fn(tf.sort, b.z), tf.boolean_mask(b.z, b.z[:, 0] > 0)
    ),
    "the next sample": lambda b: tf.roll(b.z, 1, 0),
    "lengths of positions as texts": lambda b: b.w[0] * lengths_as_texts(tf.range(2 * b.n)),
    "lengths of positions as texts, in a loop": lambda b: tf.map_fn(
        lambda i: b.z[i] * lengths_as_texts(i), tf.range(b.n), fn_output_signature=tf.float64
    ),
    "lengths of positions as characters": lambda b: (
        b.w[0]
        * tf.cast(tf.strings.length(tf.strings.unicode_encode(tf.range(2 * b.n)[:, None] + 1, "UTF-8")), tf.float64)
    ),
    "positions compared with a float": lambda b: b.w[0] * tf.maximum(tf.cast(tf.range(2 * b.n), tf.float64), 900.0),
    "positions compared with a float, in a loop": lambda b: tf.map_fn(
        lambda i: tf.cond(tf.cast(i, tf.float64) < 900.0, lambda: b.z[i], lambda: 2 * b.z[i]),
        tf.range(b.n),
        fn_output_signature=tf.float64,
    ),
    "a counter compared with a float": in_own_loop(lambda b, i: b.z[i] * grow_after(i, 1000.0)),
    "a counter as text": in_own_loop(lambda b, i: b.z[i] * lengths_as_texts(i)),
    "a counter divided twice": in_own_loop(lambda b, i: tf.where(i // 1000 < 1000, b.z[i], 2.0 * b.z[i])),
    "a counter squared": in_own_loop(lambda b, i: tf.where(i * i < 1_000_000, b.z[i], 2.0 * b.z[i])),
    "a counter shifted": in_own_loop(lambda b, i: b.z[tf.bitwise.right_shift(i, 10)]),
    "a counter compared with labels": in_own_loop(lambda b, i: tf.where(i < 1000 * (b.y[i] + 1), b.z[i], 2.0 * b.z[i])),
    "a counter that names an entry of what samples share": in_own_loop(
        lambda b, i: b.z[i] * grow_after(tf.gather(tf.range(5000), i), 1000.0)
    ),
    "a position divided, then compared": lambda b: tf.map_fn(
        lambda i: b.z[i] * grow_after(i // 100, 10.0), tf.range(b.n), fn_output_signature=tf.float64
    ),
    "a bucket of a position": lambda b: tf.map_fn(
        lambda i: b.z[i] * grow_after(tf.raw_ops.Bucketize(input=i, boundaries=[1000.0]), 0.0),
        tf.range(b.n),
        fn_output_signature=tf.float64,
    ),
    "a scan that counts": lambda b: tf.scan(
        lambda found, row: (tf.tanh(row) * grow_after(found[1], 1000.0), found[1] + 1.0),
        b.z,
        (tf.zeros([4], tf.float64), tf.zeros([], tf.float64)),
    )[0],
    "a number of samples compared with a float": lambda b: tf.map_fn(
        lambda row: row * grow_after(tf.shape(b.z)[0], 1000.0), b.z
    ),
    "rows by positions as bytes": lambda b: tf.gather(b.z, tf.cast(tf.cast(tf.range(b.n), tf.uint8), tf.int32)),
    "rows by positions as bytes, in a loop": lambda b: tf.map_fn(
        lambda i: b.z[tf.cast(tf.cast(i, tf.uint8), tf.int32)], tf.range(b.n), fn_output_signature=tf.float64
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_found_by_experiment(case: str) -> None:
    kind = assert_kind_is_true(ROWS[case])
    assert (kind.form, kind.axis, kind.inner, kind.trained) == (Form.ROWS, 0, 1, True), kind


@pytest.mark.parametrize("case", MEANS)
def test_means_are_found_by_experiment(case: str) -> None:
    kind = assert_kind_is_true(MEANS[case])
    assert kind.form is Form.MEAN, kind


@pytest.mark.parametrize("case", SUMS)
def test_sums_are_found_by_experiment(case: str) -> None:
    assert assert_kind_is_true(SUMS[case]).form is Form.SUM


@pytest.mark.parametrize("case", COUPLED)
def test_an_experiment_finds_no_rows_where_samples_are_combined(case: str) -> None:
    assert kind_of(COUPLED[case]).coupled


def test_a_sum_that_ends_at_the_value_of_a_variable_is_not_taken_for_a_sum() -> None:
    most, start = tf.Variable(900.0, dtype=tf.float64, trainable=False), tf.constant(0.0, tf.float64)
    assert kind_of(lambda b: tf.foldl(lambda s, row: tf.minimum(s + tf.norm(row), most), b.z, start)).coupled


def test_a_variable_that_another_rank_holds_is_replaced_by_drawn_values() -> None:
    scale = tf.Variable(3.0, dtype=tf.float64, trainable=False)
    variable_values.release_variables([scale], "another rank holds it")
    assert kind_of(lambda b: tf.map_fn(lambda row: row * scale, b.z)).rows


def test_equal_ops_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    own = Experiments._try
    monkeypatch.setattr(Experiments, "_try", lambda self, *args: tried.append(args) or own(self, *args))

    def compute(b: Batch) -> Any:
        z = b.z[:, :3]
        for _ in range(4):
            z = tf.tanh(tf.linalg.cross(z, b.x[:, :3]))
        return z

    assert kind_of(compute).rows
    assert len(tried) == 1


def test_nothing_is_tried_where_all_ops_have_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Experiments, *args: Any) -> Any:
        raise AssertionError(f"{args} was tried")

    monkeypatch.setattr(Experiments, "_try", fail)
    analyse(make_loss(lambda b: tf.reduce_mean(tf.nn.softmax(b.z @ tf.eye(4, dtype=tf.float64)))))


def test_a_statistic_that_is_computed_once_is_the_whole_batchs_in_an_experiment() -> None:
    """The largest label of the whole batch bounds the counts of each micro-batch."""

    def compute(b: Batch) -> Any:
        rows = tf.stack([b.y, b.y + 1], 1)
        return b.z[:, :1] * tf.cast(tf.math.bincount(rows, minlength=5, axis=-1, dtype=tf.float64), tf.float64)

    kind = assert_kind_is_true(compute)
    assert (kind.form, kind.axis) == (Form.ROWS, 0), kind


@pytest.mark.parametrize("nested", [False, True])
def test_python_code_is_never_run_by_an_experiment(nested: bool) -> None:
    ran = []

    def python(value: Any) -> Any:
        ran.append(value)
        return value

    def compute(b: Batch) -> Any:
        def call(h: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(python, [h], tf.float64, stateful=False), h.shape)

        return (tf.function(call) if nested else call)(b.z)

    assert kind_of(compute).coupled
    assert not ran


def test_a_loop_over_positions_of_large_pictures_scales_them_by_a_float() -> None:
    """An experiment of 255 such pictures would be too large, and positions are not compared with that number."""

    def compute(b: Batch) -> Any:
        pictures = tf.tile(b.z[:, :, None, None], [1, 1, 128, 128])
        return tf.map_fn(lambda i: pictures[i] / 255.0, tf.range(b.n), fn_output_signature=tf.float64)

    assert kind_of(compute).rows


def test_rows_of_many_entries_are_tried_with_fewer_draws_and_the_largest_not_at_all() -> None:
    sizes = []

    def function(values: Any) -> Any:
        sizes.append(values[0].size)
        return [values[0] + 1]

    def tried(width: int) -> Any:
        sizes.clear()
        (kind,) = decide(function, lambda values: [], [Operand("float32", (None, width), axis=0)], 1, Limits())
        return kind and kind.form, len(sizes)

    few, many, most = tried(2), tried(2**19), tried(2**25)
    assert few[0] is many[0] is Form.ROWS
    assert many[1] < few[1]
    assert most == (None, 0)
