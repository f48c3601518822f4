"""Weighing the terms of a loss, so that the micro-batches' losses add up to the whole batch's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.weigh import weigh_terms
from dapple_tf.frontend.rows import ROWS_NAME
from tests.dapple_tf.frontend.dependence.evaluation import (
    CUTS,
    Batch,
    Compute,
    Evaluation,
    analyse,
    data,
    depend,
    make_loss,
)


def chosen(b: Batch) -> tf.Tensor:
    return tf.boolean_mask(b.z, b.mask)


MIXED: dict[str, Compute] = {
    "a sum and a regulariser": lambda b: tf.reduce_sum(b.z) + tf.nn.l2_loss(b.w),
    "a sum less a regulariser": lambda b: tf.reduce_sum(b.z) - tf.nn.l2_loss(b.w),
    "a sum, a mean and a constant": lambda b: tf.add_n(
        [tf.reduce_sum(b.z), tf.reduce_mean(b.z), tf.constant(3.0, tf.float64)]
    ),
    "a scaled sum of both": lambda b: (tf.reduce_sum(b.z) + tf.reduce_mean(b.z)) * 0.25,
    "a term of a term": lambda b: 2 * (tf.reduce_sum(b.z) / 7 + (tf.reduce_mean(b.z**2) - tf.reduce_sum(b.w))),
    "a mean over chosen rows": lambda b: tf.reduce_mean(chosen(b)),
    "a mean over chosen rows, twice": lambda b: tf.reduce_mean(tf.reduce_mean(chosen(b), 0)),
    "a mean over chosen numbers": lambda b: tf.reduce_mean(tf.reduce_sum(chosen(b), 1)),
    "a matrix times a mixed sum": lambda b: tf.reduce_sum(
        tf.ones([4, 4], tf.float64) @ (tf.reduce_sum(b.z, 0) + tf.reduce_mean(b.z, 0))[:, None]
    ),
    "concatenated": lambda b: tf.reduce_sum(tf.concat([tf.reduce_sum(b.z, 0), tf.reduce_mean(b.z, 0)], 0) * 0.5),
    "a part of a split": lambda b: tf.reduce_sum(tf.split(tf.reduce_sum(b.z, 0) + tf.reduce_mean(b.z, 0), 2)[1]),
    "a part of an uneven split": lambda b: tf.reduce_sum(
        tf.split(tf.reduce_sum(b.z, 0) + tf.reduce_mean(b.z, 0), [1, 3])[1]
    ),
    "one of several passed on": lambda b: tf.identity_n([b.w, tf.reduce_sum(b.z) + tf.reduce_mean(b.z)])[1],
    "chosen by a statistic": lambda b: tf.where(
        tf.reduce_sum(b.x) > 0, tf.reduce_sum(b.z) + tf.reduce_mean(b.z), tf.reduce_mean(b.z)
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_weighted_micro_batches_add_up(case: str) -> None:
    loss = make_loss(MIXED[case])
    captured, dependence = analyse(loss)
    assert dependence.mixed
    weighted = weigh_terms(captured, dependence)
    assert ROWS_NAME in weighted.graph.by_name
    again = depend(weighted)  # the number of chosen rows runs once too
    assert (again.loss, again.mixed) == ("sum", False)
    evaluation = Evaluation(weighted, weighted.graph, sorted(again.once))
    expected = float(loss(*map(tf.constant, data())))
    for cuts in CUTS:
        parts = [evaluation.run([weighted.graph.outputs[0]], a, b)[0] for a, b in itertools.pairwise(cuts)]
        np.testing.assert_allclose(sum(parts), expected, rtol=1e-12)


def test_only_what_follows_the_reduction_is_built_anew() -> None:
    captured, dependence = analyse(make_loss(MIXED["a sum and a regulariser"]))
    before = {node.name: node for node in captured.graph.nodes}
    after = weigh_terms(captured, dependence).graph
    added = [node.op for node in after.nodes if node.name not in before]
    assert added.count("AddV2") <= 1
    assert not {"Sum", "L2Loss"} & set(added)
