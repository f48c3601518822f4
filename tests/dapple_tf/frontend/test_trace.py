"""Tracing a loss so that its micro-batches make up the whole batch: equal to one device, or refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.autoplan.options import Options
from dapple_tf.errors import DappleWarning, ExactnessError, PlanError
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.rows import ROWS_NAME
from dapple_tf.frontend.trace import trace_loss
from tests.dapple_tf.frontend.dependence.evaluation import (
    CUTS,
    Batch,
    Compute,
    Evaluation,
    N,
    data,
    make_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore::dapple_tf.errors.DappleWarning")


def losses_of(captured: Captured) -> list[float]:
    """The loss that the micro-batches make up, for each of CUTS."""
    graph = captured.graph
    once = [node.name for node in graph.nodes if node.has("once")]
    evaluation = Evaluation(captured, graph, once)
    assert captured.dependence is not None
    total = []
    for cuts in CUTS:
        parts = [(evaluation.run([graph.outputs[0]], a, b)[0], (b - a) / N) for a, b in itertools.pairwise(cuts)]
        mean = captured.dependence.loss == "mean"
        total.append(float(sum(value * (share if mean else 1) for value, share in parts)))
    return total


def assert_equal_to_one_device(compute: Compute) -> None:
    loss = make_loss(compute)
    expected = float(loss(*map(tf.constant, data())))
    np.testing.assert_allclose(losses_of(trace_loss(loss, data(), N)), expected, rtol=1e-11)


EXACT: dict[str, Compute] = {
    "mean": lambda b: tf.reduce_mean(b.z**2),
    "sum": lambda b: tf.reduce_sum(b.z**2),
    "sum over 12": lambda b: tf.reduce_sum(b.z) / 12.0,
    "sum and regulariser": lambda b: tf.reduce_sum(b.z) + tf.nn.l2_loss(b.w),
    "sum, mean and regulariser": lambda b: tf.reduce_sum(b.z) / 3.0 + 2 * tf.reduce_mean(b.z**2) - tf.nn.l2_loss(b.w),
    "masked mean": lambda b: tf.reduce_mean(tf.boolean_mask(b.z, b.mask)),
    "masked mean and mean": lambda b: tf.reduce_mean(tf.boolean_mask(b.z, b.mask)) + tf.reduce_mean(b.z),
    "weighted by a mask": lambda b: (
        tf.reduce_sum(b.z * tf.cast(b.mask, tf.float64)[:, None]) / tf.reduce_sum(tf.cast(b.mask, tf.float64))
    ),
    "over the batch size and one": lambda b: tf.reduce_sum(b.z) / tf.cast(b.n + 1, tf.float64),
    "class weights": lambda b: tf.reduce_mean(
        b.z[:, 0] * tf.gather(1 / (1 + tf.math.bincount(b.y, minlength=4, dtype=tf.float64)), b.y)
    ),
    "dropout": lambda b: tf.reduce_mean(tf.nn.experimental.stateless_dropout(b.z, 0.5, [1, 2])),
    "choice of terms": lambda b: tf.where(
        tf.reduce_sum(b.x) > 0, tf.reduce_sum(b.z), tf.reduce_sum(b.z) + tf.reduce_mean(b.z)
    ),
    "stacked terms": lambda b: tf.reduce_sum(tf.stack([tf.reduce_sum(b.z), tf.reduce_mean(b.z)]) * [0.25, 3.0]),
    "each sample's column": lambda b: tf.reduce_mean(tf.gather(b.z, b.y, axis=1, batch_dims=1)),
}


@pytest.mark.parametrize("case", EXACT)
def test_micro_batches_make_up_the_loss_of_one_device(case: str) -> None:
    assert_equal_to_one_device(EXACT[case])


# --- random losses


def _steps() -> dict[str, Any]:
    """Ops from [n, 4] to [n, 4] or [4], as a user may apply them to the whole batch."""
    return {
        "tanh": lambda b, v: tf.tanh(v),
        "square": lambda b, v: v * v,
        "weight": lambda b, v: v * b.w,
        "product": lambda b, v: v @ (b.w[:, None] * b.w[None] / 4) if v.shape.rank == 2 else v,
        "plus x": lambda b, v: v + b.x,
        "plus z": lambda b, v: v + b.z,
        "mask": lambda b, v: tf.where(b.mask[:, None], v, 0.5),
        "over the count": lambda b, v: v / tf.reduce_sum(tf.cast(b.mask, tf.float64)),
        "over the size": lambda b, v: v / tf.cast(tf.shape(v)[0], tf.float64),
        "less the input's mean": lambda b, v: v - tf.reduce_mean(b.x, 0),
        "less the mean": lambda b, v: v - tf.reduce_mean(v, 0),
        "cumsum": lambda b, v: tf.cumsum(v, -1),
        "columns": lambda b, v: tf.gather(v, [3, 1, 0, 2], axis=-1),
        "softmax": lambda b, v: tf.nn.softmax(v),
        "softmax of axis 0": lambda b, v: tf.nn.softmax(v, 0),
        "sum": lambda b, v: tf.reduce_sum(v, 0),
        "mean": lambda b, v: tf.reduce_mean(v, 0),
        "roll": lambda b, v: tf.roll(v, 1, 0),
        "table": lambda b, v: v + tf.gather(b.w + 0.0, b.y)[:, None],
        "reshape": lambda b, v: tf.reshape(tf.reshape(v, [-1, 2]) * 2, tf.shape(v)),
        "twice": lambda b, v: tf.concat([v, v], 0)[: tf.shape(v)[0]],
        "chosen": lambda b, v: tf.boolean_mask(v, b.mask) if v.shape.rank == 2 else v,
        "dropout": lambda b, v: tf.nn.experimental.stateless_dropout(v, 0.3, [3, 4]),
        "matmul": lambda b, v: tf.einsum("ij,ik->jk", v, b.z) if v.shape.rank == 2 else v,
        "segments": lambda b, v: tf.math.unsorted_segment_sum(v, b.y, 4),
        "condition": lambda b, v: tf.cond(tf.reduce_sum(b.x) > 0, lambda: v * 2, lambda: v + 1),
    }


REDUCTIONS = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "max": tf.reduce_max,
    "over 7": lambda v: tf.reduce_sum(v) / 7.0,
}
TERMS = st.tuples(st.lists(st.sampled_from(sorted(_steps())), max_size=4), st.sampled_from(sorted(REDUCTIONS)))


@given(st.lists(TERMS, min_size=1, max_size=2))
def test_a_random_loss_is_equal_to_one_device_or_refused(terms: list[tuple[list[str], str]]) -> None:
    def compute(b: Batch) -> Any:
        found = []
        for steps, reduction in terms:
            value = b.z
            for step in steps:
                value = _steps()[step](b, value)
            found.append(REDUCTIONS[reduction](value))
        return tf.add_n(found)

    loss = make_loss(compute)
    try:
        expected = float(loss(*map(tf.constant, data())))
    except (ValueError, tf.errors.InvalidArgumentError):  # shapes that do not fit
        return
    try:
        captured = trace_loss(loss, data(), N)
    except ExactnessError:
        return
    np.testing.assert_allclose(losses_of(captured), expected, rtol=1e-9, atol=1e-9)


# --- what is done about inexactness

CONTRASTIVE = make_loss(lambda b: tf.reduce_mean(tf.matmul(b.z, b.z, transpose_b=True)))


def test_an_inexact_loss_is_refused_with_what_to_do() -> None:
    with pytest.raises(ExactnessError, match="would not equal one device's") as caught:
        trace_loss(CONTRASTIVE, data(), N)
    assert "multiplies samples with each other" in str(caught.value).replace("\n", " ")
    assert "batch_loss=True" in str(caught.value)


def test_an_inexact_loss_is_traced_with_a_warning_or_silently() -> None:
    with pytest.warns(DappleWarning, match="does not equal one device's"):
        warned = trace_loss(CONTRASTIVE, data(), N, "warn")
    allowed = trace_loss(CONTRASTIVE, data(), N, "allow")
    for captured in (warned, allowed):
        assert captured.dependence.exactness.undocumented


def test_a_loss_that_grows_with_the_batch_is_named() -> None:
    with pytest.warns(DappleWarning, match="its gradient grows with the batch size"):
        trace_loss(make_loss(lambda b: tf.reduce_sum(b.z)), data(), N)


def test_a_batch_loss_gets_a_loss_head_and_is_exact() -> None:
    captured = trace_loss(CONTRASTIVE, data(), N, batch_loss=True)
    assert captured.dependence.exactness
    assert {node.name for node in captured.graph.nodes if node.has("loss_head")} == captured.dependence.loss_head.own


def test_auto_cuts_no_loss_head_where_the_loss_adds_up() -> None:
    for compute, loss_head in ((lambda b: tf.reduce_mean(b.z), False), (lambda b: tf.reduce_max(b.z), True)):
        dependence = trace_loss(make_loss(compute), data(), N, batch_loss="auto").dependence
        assert (dependence.loss_head is not None) == loss_head


@pytest.mark.parametrize("inexact", ["no", "", None])
def test_unknown_choices_of_inexact_are_refused(inexact: Any) -> None:
    with pytest.raises(PlanError, match=r"inexact=.*give one of 'error', 'warn', 'allow'"):
        Options(inexact=inexact)


@pytest.mark.parametrize("batch_loss", ["yes", None, 2])
def test_unknown_choices_of_batch_loss_are_refused(batch_loss: Any) -> None:
    with pytest.raises(PlanError, match="give False, True or 'auto'"):
        Options(batch_loss=batch_loss)


def test_known_choices_are_accepted() -> None:
    for inexact in ("error", "warn", "allow"):
        Options(inexact=inexact)
    for batch_loss in (False, True, "auto"):
        Options(batch_loss=batch_loss)


def test_a_plain_loss_is_left_as_it_is() -> None:
    captured = trace_loss(make_loss(lambda b: tf.reduce_mean(b.z)), data(), N)
    assert ROWS_NAME not in captured.graph.by_name
    assert captured.rows is None
    assert not any(node.has("once") or node.has("loss_head") for node in captured.graph.nodes)
