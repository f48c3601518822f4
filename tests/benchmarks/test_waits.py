"""Stages that sleep instead of computing: they are captured, split and correct like any other model."""

from __future__ import annotations

import dapple_tf as dapple
from benchmarks.waits import stage_names, waits
from dapple_tf.graph_passes.ir.graph import Graph


def count_waits(graph: Graph, function: str) -> int:
    return sum(node.op == "PyFuncStateless" for node in graph.function(function).graph.nodes)


def test_each_part_of_a_stage_waits_once_and_the_gradients_are_right() -> None:
    timed = waits(2, forward=1e-3, inputs=1e-3, weights=1e-3, batch_size=8)
    loss_fn, optimizer = timed.workload.loss_fn, timed.workload.optimizer
    step = dapple.pipeline(
        loss_fn,
        optimizer=optimizer,
        stages=stage_names(2),
        micro_batches=2,
        schedule="zb-h1",
        example_batch=timed.batch,
        inexact="allow",
    )
    assert [count_waits(step.graph, f"stage1/{what}") for what in ("forward", "inputs", "weights")] == [1, 1, 1]
    report = dapple.verify(loss_fn, optimizer=optimizer, batch=timed.batch, plan=step.plan, inexact="allow")
    assert report.ok, str(report)


def test_a_wait_of_no_time_adds_no_op() -> None:
    timed = waits(1, forward=0, inputs=0, weights=0, batch_size=4)
    step = timed.pipeline(stages=1, micro_batches=2, example_batch=timed.batch)
    assert count_waits(step.graph, "stage0/forward") == count_waits(step.graph, "stage0/backward") == 0
