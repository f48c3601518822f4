"""All-reduce in buckets during the last backward, in one process: equal to one device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import StepError
from dapple_tf.graph_passes.ir.names import nodes_of
from tests.dapple_tf.distributed.programs.cases import CASES
from tests.dapple_tf.planner.builders import make_cluster, make_profile
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import chain, data, sgd, values, weights


@pytest.mark.parametrize("name", ["DP 2, overlap, M = 1", "tied, overlap"])
def test_all_reduce_in_buckets_equals_one_device(name: str) -> None:
    case = CASES[name]
    comparison = compare(case.make_problem(), case.batches(), **case.options)
    comparison.check(case.tolerance)
    assert len(nodes_of(comparison.step.graph, "allreduce")) > 1


def test_a_plan_of_the_dp_planner_with_overlap_equals_one_device() -> None:
    matrices, batch = weights(3), data(12)
    loss_fn = chain(matrices)
    plan = dapple.plan(
        make_profile(*[(1.0, 2.0, 10.0, 10.0, 10.0)] * 10),  # two a matrix, four for the loss
        make_cluster(3),
        global_batch_size=12,
        micro_batch_size=6,
        planner="dp",
        overlap=True,
    )
    problem = Problem(loss_fn, {f"w{i}": matrix for i, matrix in enumerate(matrices)}, sgd)
    comparison = compare(problem, [batch, batch], plan=plan)
    comparison.check(1e-12)
    graph = comparison.step.graph
    assert (plan.replicas, plan.micro_batches) == ((3,), 2)
    assert [node.name for node in nodes_of(graph, "allreduce")] == ["stage0/allreduce/bucket0"]
    assert sum(node.has("inline") for node in nodes_of(graph, "backward")) == 3


def test_a_gradient_that_is_not_finite_is_reported_with_overlap() -> None:
    matrices = weights(2)
    loss_fn = chain(matrices)
    asked = dapple.pipeline(loss_fn, optimizer=sgd(), stages=1, replicas=[2], micro_batches=2)
    x, y = data(8)
    asked.build(x, y)
    step = dapple.pipeline(loss_fn, optimizer=sgd(), plan=dataclasses.replace(asked.plan, overlap=True))
    step.check_numerics = True
    before = values(matrices)
    with pytest.raises(
        StepError, match=r"on stage 0 the gradient of variable 'w0' is not finite|the loss is not finite"
    ):
        step(x, tf.concat([y[:-1], y[-1:] * np.nan], 0))
    np.testing.assert_array_equal(values(matrices), before)
    step(x, y)
    assert not np.array_equal(values(matrices), before)
