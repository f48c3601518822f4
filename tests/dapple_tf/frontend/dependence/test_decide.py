"""What is decided about a loss: its merge, what runs once, sizes, writes, aux outputs, and reasons for inexactness."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.decide import find_uncut_dependence
from dapple_tf.frontend.dependence.result import BatchDependence
from tests.dapple_tf.frontend.dependence.evaluation import Batch, Compute, N, analyse, decide, make_loss


def reasons(found: BatchDependence) -> str:
    return "\n".join(map(str, found.exactness.undocumented))


# --- the loss


@pytest.mark.parametrize(
    ("compute", "loss", "mixed", "grows"),
    [
        (lambda b: tf.reduce_mean(b.z), "mean", False, False),
        (lambda b: tf.reduce_mean(b.z) + tf.nn.l2_loss(b.w), "mean", False, False),
        (lambda b: tf.reduce_sum(b.z), "sum", False, True),
        (lambda b: tf.reduce_sum(b.z) / 12.0, "sum", False, False),
        (lambda b: tf.reduce_sum(b.z) / tf.cast(b.n, tf.float64), "mean", False, False),
        (lambda b: tf.reduce_sum(b.z) / tf.reduce_sum(tf.cast(b.mask, tf.float64)), "sum", False, False),
        (lambda b: tf.reduce_sum(b.z) + tf.nn.l2_loss(b.w), "sum", True, True),
        (lambda b: tf.reduce_sum(b.z) / 12.0 + tf.reduce_mean(b.z), "sum", True, False),
        (lambda b: tf.reduce_mean(tf.boolean_mask(b.z, b.mask)), "sum", True, True),
        (lambda b: tf.nn.l2_loss(b.w + 0.0), "mean", False, False),
    ],
)
def test_the_loss_is_merged_as_its_kind_says(compute: Compute, loss: str, mixed: bool, grows: bool) -> None:
    found = decide(compute)
    assert (found.loss, found.mixed, found.grows) == (loss, mixed, grows)
    assert found.exactness


def test_a_loss_that_does_not_add_up_is_a_reason_with_its_op() -> None:
    found = decide(lambda b: tf.reduce_mean(tf.matmul(b.z, b.z, transpose_b=True)))
    assert "the loss is no sum or mean over samples" in reasons(found)
    assert "multiplies samples with each other" in reasons(found)
    assert "batch_loss=True" in reasons(found)


@pytest.mark.parametrize(
    "compute",
    [
        lambda b: tf.cast(b.n, tf.float64),
        lambda b: tf.cast(b.n, tf.float64) ** 2,
    ],
)
def test_a_loss_that_is_a_size_is_a_reason(compute: Compute) -> None:
    assert "the loss" in reasons(decide(compute))


def test_the_reason_names_the_layer() -> None:
    class Contrast(keras.Layer):
        def call(self, z: Any) -> Any:
            return tf.matmul(z, z, transpose_b=True)

    layer = Contrast(name="contrast", dtype="float64")
    assert "contrast" in decide(lambda b: tf.reduce_mean(layer(b.z))).exactness.undocumented[0].layer


# --- once a step


def test_a_statistic_of_the_batch_runs_once_and_nothing_else_does() -> None:
    captured, found = analyse(make_loss(lambda b: tf.reduce_sum(b.z) / tf.reduce_sum(tf.cast(b.mask, tf.float64))))
    assert {captured.graph.node(name).op for name in found.once} == {"Sum"}


def by_doubling(b: Batch) -> Any:
    """A mean, times a power of two that a loop makes as large as the batch."""
    _, power = tf.while_loop(lambda i, _: i < b.n // 4, lambda i, v: (i + 1, 2 * v), (0, tf.constant(1.0, tf.float64)))
    return tf.reduce_mean(b.z) * power


@pytest.mark.parametrize(
    ("compute", "op"),
    [
        (by_doubling, "StatelessWhile"),  # it gives x back too
        (lambda b: tf.reduce_mean(b.z) * tf.linalg.qr(b.x)[1][0, 0], "Qr"),
    ],
)
def test_a_statistic_beside_outputs_that_nothing_uses_runs_once(compute: Compute, op: str) -> None:
    captured, found = analyse(make_loss(compute))
    assert op in {captured.graph.node(name).op for name in found.once}
    assert found.exactness.exact


def test_a_statistic_beside_values_of_samples_is_a_reason() -> None:
    def compute(b: Batch) -> Any:
        largest, columns = tf.function(lambda x: (tf.reduce_max(x), tf.transpose(x)))(b.x)
        return tf.reduce_mean(b.z * largest) + tf.reduce_mean(columns[0])

    assert "computes a statistic of the whole batch (%PartitionedCall:0) and values of samples in one op" in reasons(
        decide(compute)
    )


def test_a_plain_loss_has_nothing_that_runs_once_and_no_sizes() -> None:
    found = decide(lambda b: tf.reduce_mean(tf.tanh(b.z)))
    assert (found.once, found.sizes, found.draws, found.shapes) == (frozenset(), (), (), ())


def test_sizes_used_as_numbers_are_the_whole_batchs() -> None:
    found = decide(lambda b: tf.reduce_sum(b.z) / tf.cast(b.n + 1, tf.float64))
    (size,) = found.sizes
    assert (int(size.scale), int(size.offset), size.operand) == (1, 1, None)


def test_an_integer_size_is_replaced_at_the_operand_alone() -> None:
    found = decide(lambda b: tf.reduce_mean(tf.cast(b.y * b.n, tf.float64) * b.z[:, 0]))
    (size,) = found.sizes
    assert (int(size.scale), int(size.offset)) == (1, 0)
    assert size.operand is not None


def test_a_size_that_makes_a_shape_stays_the_micro_batchs() -> None:
    assert not decide(lambda b: tf.reduce_mean(tf.reshape(b.z, [b.n, 2, 2]))).sizes


# --- writes


def with_writes(write: Any) -> BatchDependence:
    """The decision about a mean, where ``write`` writes the counter or the moving average."""
    count = tf.Variable(0, name="count")
    average = tf.Variable(tf.zeros(4, tf.float64), name="average", trainable=False)

    def compute(b: Batch) -> Any:
        write(b, count, average)
        return tf.reduce_mean(b.z)

    return decide(compute)


@pytest.mark.parametrize(
    "write",
    [
        lambda b, count, average: count.assign_add(1),
        lambda b, count, average: average.assign(0.9 * average + 0.1 * b.w),
        lambda b, count, average: average.assign(tf.reduce_mean(b.x, 0)),
        lambda b, count, average: count.assign(b.n),
        lambda b, count, average: count.assign_add(b.n),
        lambda b, count, average: average.scatter_add(tf.IndexedSlices(b.x[:, 0], b.y)),
        lambda b, count, average: average.scatter_nd_update(((2 + tf.range(b.n)) % 4)[:, None], b.x[:, 0]),
    ],
)
def test_a_write_that_depends_on_no_trained_variable_runs_once(write: Any) -> None:
    found = with_writes(write)
    assert found.exactness.exact, str(found.exactness)
    assert any("Assign" in name or "Scatter" in name for name in found.once)


@pytest.mark.parametrize(
    "write",
    [
        lambda b, count, average: average.assign_add(tf.reduce_sum(b.z, 0)),
        lambda b, count, average: average.assign_sub(tf.reduce_sum(b.z, 0)),
        lambda b, count, average: average.assign(average + tf.reduce_sum(b.z, 0)),
        lambda b, count, average: average.assign(tf.identity(tf.reduce_sum(b.z, 0) + average)),
        lambda b, count, average: average.assign(average - tf.reduce_sum(b.z, 0)),
    ],
)
def test_a_sum_that_is_added_to_a_variable_is_exact(write: Any) -> None:
    found = with_writes(write)
    assert found.exactness.exact, str(found.exactness)
    assert len(found.adds) == 1
    assert not found.mean_adds


@pytest.mark.parametrize(
    "write",
    [
        lambda b, count, average: average.assign_add(tf.reduce_mean(b.z, 0)),
        lambda b, count, average: average.assign(average - tf.reduce_mean(b.z, 0)),
    ],
)
def test_a_mean_that_is_added_to_a_variable_is_added_in_shares(write: Any) -> None:
    found = with_writes(write)
    assert found.exactness.exact, str(found.exactness)
    assert found.adds == found.mean_adds
    assert len(found.adds) == 1


def test_shares_of_a_mean_are_too_small_for_a_variable_of_16_bits() -> None:
    """At 256 the next bfloat16 is 258: it can grow by a mean of 2 but not by a share of it."""
    total = tf.Variable(256.0, dtype=tf.bfloat16, trainable=False, name="total")
    found = with_writes(lambda b, count, average: total.assign_add(tf.cast(tf.reduce_mean(b.z), tf.bfloat16)))
    assert "writes total once for each micro-batch" in reasons(found)
    assert not found.adds


@pytest.mark.parametrize(
    "write",
    [
        lambda b, count, average: average.assign(tf.reduce_sum(b.z, 0)),
        lambda b, count, average: average.assign(tf.reduce_sum(b.z, 0) - average),
        lambda b, count, average: average.assign(average + tf.reduce_sum(b.z)),
        lambda b, count, average: average.assign(2.0 * average + tf.reduce_sum(b.z, 0)),
        lambda b, count, average: average.assign_add(tf.reduce_mean(b.z, 0) + tf.reduce_sum(b.z, 0)),
        lambda b, count, average: average.assign_add(average * tf.reduce_sum(b.z, 0)),
        lambda b, count, average: average.scatter_add(tf.IndexedSlices(b.z[:, 0], b.y)),
    ],
)
def test_a_write_of_what_samples_give_is_a_reason(write: Any) -> None:
    found = with_writes(write)
    assert "writes average once for each micro-batch" in reasons(found)
    assert not any("Assign" in name for name in found.once)


def test_a_read_of_what_micro_batches_write_couples() -> None:
    state = tf.Variable(tf.zeros(4, tf.float64), name="state", trainable=False)

    def compute(b: Batch) -> Any:
        state.assign(tf.reduce_mean(b.z, 0))
        return tf.reduce_mean(b.z * state)

    assert "reads state, which each micro-batch writes" in reasons(decide(compute))


def read_before_a_write(read: Callable[[Batch, tf.Variable], Any]) -> Compute:
    """Return a loss that writes a trainable variable after it has read it."""
    scale = tf.Variable(1.0, name="scale", dtype=tf.float64)

    def compute(b: Batch) -> Any:
        before = tf.reduce_mean(read(b, scale))
        with tf.control_dependencies([before]):
            scale.assign_add(1.0)
        return before

    return compute


def test_trained_rows_that_are_read_before_a_write_once_a_step_are_a_reason() -> None:
    table = tf.Variable(tf.ones([5, 4], tf.float64), name="table")

    def compute(b: Batch) -> Any:
        before = tf.gather(table, tf.cast(b.x[:, 0] > 0, tf.int32))
        table.assign(0.9 * table)
        return tf.reduce_mean(before)

    assert "reads table before the loss writes it" in reasons(decide(compute))


@pytest.mark.parametrize(
    "read",
    [
        lambda b, scale: b.z * scale,
        lambda b, scale: tf.stop_gradient(b.z * scale) + b.z,
        lambda b, scale: b.z * tf.stop_gradient(scale),
    ],
)
def test_a_variable_is_read_once_before_it_is_written(read: Callable[[Batch, tf.Variable], Any]) -> None:
    found = decide(read_before_a_write(read))
    assert not found.exactness.reasons
    assert len(found.once) > 1


def test_rows_that_are_read_before_a_write_are_read_once_and_sliced() -> None:
    def compute(b: Batch) -> Any:
        before = tf.gather(b.u, b.y)
        b.u.scatter_add(tf.IndexedSlices(b.x[:, 0], b.y))
        return tf.reduce_mean(b.z * (before - tf.gather(b.u, b.y))[:, tf.newaxis])

    found = decide(compute)
    assert found.exactness.exact, str(found.exactness)
    assert len(found.sliced) == 1


def test_a_read_after_a_write_once_a_step_is_exact() -> None:
    count = tf.Variable(1.0, name="count", dtype=tf.float64, trainable=False)
    assert decide(lambda b: tf.reduce_mean(b.z * count.assign_add(1.0))).exactness


@pytest.mark.parametrize(
    "number", [lambda chosen: tf.cast(tf.shape(chosen)[0], tf.float64), lambda chosen: tf.reduce_max(tf.shape(chosen))]
)
def test_the_shape_of_activations_that_data_choose_is_no_number_of_the_whole_batch(number: Callable[..., Any]) -> None:
    def compute(b: Batch) -> Any:
        chosen = tf.boolean_mask(b.z, b.mask)
        return tf.reduce_sum(chosen) / tf.cast(number(chosen), tf.float64)

    assert "truediv" in reasons(decide(compute))


# --- one micro-batch


def uncut(compute: Compute) -> BatchDependence:
    captured, dependence = analyse(make_loss(compute))
    assert not dependence.exactness.exact
    return find_uncut_dependence(captured, N)


def test_what_one_micro_batch_computes_is_not_rewritten() -> None:
    found = uncut(
        lambda b: tf.sqrt(tf.reduce_mean(b.z * tf.random.stateless_uniform([b.n, 4], [1, 2], dtype="float64")))
    )
    assert found.uncut
    assert found.exactness.exact
    assert (found.loss, found.aux) == ("mean", ())
    assert (found.draws, found.sizes, found.shapes, found.adds, found.loss_head) == ((), (), (), frozenset(), None)


def test_a_seed_still_advances_once_where_layers_of_several_stages_draw_from_it() -> None:
    seed = tf.Variable([1, 2], name="seed", trainable=False)

    def draw(b: Batch) -> Any:
        return tf.random.stateless_uniform([b.n, 4], seed.assign_add([0, 1]), dtype="float64")

    assert any("Assign" in name for name in uncut(lambda b: tf.sqrt(tf.reduce_mean(draw(b) * b.z))).once)


def test_a_write_after_a_read_and_a_draw_from_a_hidden_state_stay_where_the_program_has_them() -> None:
    def compute(b: Batch) -> Any:
        kept = tf.reduce_sum(tf.cast(b.mask, tf.float64), name="kept")
        drawn = tf.random.uniform([], dtype=tf.float64, name="drawn")
        before = tf.sqrt(tf.reduce_mean(b.z * b.w * kept * drawn))
        with tf.control_dependencies([before]):
            b.u.assign(b.u + 1)
        return before * b.u[0]

    def read_first(b: Batch) -> Any:
        before = b.z * tf.sqrt(b.u) * b.w
        with tf.control_dependencies([before]):
            b.u.assign(b.u + 1)
        return compute(dataclasses.replace(b, z=before))

    once = uncut(read_first).once
    assert "kept" in once
    assert not any("drawn" in name for name in once)


# --- aux outputs


def aux(compute: Compute) -> tuple[str | None, str]:
    """How the aux output is merged, and the reasons."""
    _, found = analyse(make_loss(compute, as_aux=True))
    (merge,) = found.aux
    return merge, reasons(found)


@pytest.mark.parametrize(
    ("compute", "merge"),
    [
        (lambda b: b.z, "concat"),
        (lambda b: tf.argmax(b.z, 1), "concat"),
        (lambda b: tf.reduce_sum(b.z), "sum"),
        (lambda b: tf.reduce_mean(b.z), "mean"),
        (lambda b: tf.reduce_sum(b.y), "first"),
        (lambda b: tf.constant(7), "first"),
        (lambda b: b.w + 0.0, "first"),
        (lambda b: b.n, "sum"),
        (lambda b: 2 * b.n, "sum"),
        (lambda b: b.n + 1, "first"),
        (lambda b: tf.sqrt(tf.cast(b.n // 2, tf.float64)), "first"),
        (lambda b: tf.shape(b.z), "first"),
        (lambda b: tf.reduce_sum(tf.cast(tf.argmax(b.z, 1) == tf.cast(b.y, tf.int64), tf.int32)), "sum"),
    ],
)
def test_aux_outputs_are_merged_by_their_kind(compute: Compute, merge: str) -> None:
    assert aux(compute) == (merge, "")


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (lambda b: tf.reduce_max(b.z), "aux output 0 is no sum or mean over samples"),
        (lambda b: tf.transpose(b.z), "aux output 0 does not have the batch on axis 0"),
        (lambda b: tf.tile(b.z, [2, 1]), "aux output 0 does not have the batch on axis 0"),
        (lambda b: tf.range(b.n), "aux output 0 does not have the batch on axis 0"),
        (lambda b: tf.shape(tf.boolean_mask(b.z, b.mask))[0] + 1, "aux output 0 is a size of the micro-batch"),
        (lambda b: tf.reduce_sum(b.z) + tf.reduce_mean(b.z), "aux output 0 does not have the batch on axis 0"),
    ],
)
def test_aux_outputs_that_cannot_be_put_together_are_reasons(compute: Compute, why: str) -> None:
    merge, found = aux(compute)
    assert merge is None
    assert why in found


# --- batch norm


def test_batch_norm_in_training_mode_is_a_documented_reason_that_names_the_layer() -> None:
    layer = keras.layers.BatchNormalization(name="norm", dtype="float64")
    found = decide(lambda b: tf.reduce_mean(layer(b.z, training=True) ** 2 * b.w))
    (reason,) = found.exactness.reasons
    assert reason.documented
    assert "norm" in reason.layer
    assert "normalises by the mean and variance of its micro-batch" in reason.why
    assert "batch_norm='deferred'" in reason.remedy
    assert "layer norm" in reason.remedy
    assert found.loss == "mean"


def test_batch_norm_in_inference_mode_is_exact() -> None:
    layer = keras.layers.BatchNormalization(name="norm", dtype="float64")
    assert decide(lambda b: tf.reduce_mean(layer(b.z, training=False))).exactness


@pytest.mark.parametrize("trained", [True, False])
def test_a_mask_of_batch_norm_is_counted_where_its_activations_are_normalised(trained: bool) -> None:
    """The count depends on the arguments alone; so do the other statistics where no activation is trained."""
    layer = keras.layers.BatchNormalization(name="norm", dtype="float64")

    def compute(b: Batch) -> Any:
        rows = b.x[:, tf.newaxis] * (b.w[0] if trained else 1.0)
        mask = tf.reduce_any(b.x > 0, -1, keepdims=True)
        return tf.reduce_mean(layer(rows, training=True, mask=mask) * b.w)

    found = decide(compute)
    assert bool(found.exactness.reasons) == trained
    assert found.exactness.undocumented == ()
    assert any("norm" in name for name in found.once) != trained
