"""Steps run in the order of their schedule, by measured times; and the size of the graph."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.compiler import pipeline_graph
from dapple_tf.frontend.capture import capture
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.ir.graph import Node
from dapple_tf.staged_model import stage_model
from tests.dapple_tf.builders import make_plan
from tests.equality.small_models import chain, data, sgd, weights

SHAPES = [
    # stages, micro-batches, schedule, warm-up K_i of every stage (by hand, from the paper's formulas)
    (2, 5, "gpipe", [5, 5]),
    (3, 8, "dapple-b", [5, 3, 1]),
    (4, 6, "dapple-a:D=2", [2, 2, 2, 1]),
    (1, 4, "dapple-a", [1]),
    (2, 16, "dapple-a", [2, 1]),
    (4, 16, "dapple-b", [7, 5, 3, 1]),
    (4, 16, "dapple-a", [4, 3, 2, 1]),
]


def build(stages: int, micro_batches: int, schedule: str, **options: Any) -> tuple[Any, Any]:
    """Return a step of as many layers as stages, and a batch for it."""
    step = dapple.pipeline(
        chain(weights(stages)),
        optimizer=sgd(),
        stages=[f"layer{i}" for i in range(1, stages)],
        micro_batches=micro_batches,
        schedule=schedule,
        **options,
    )
    return step, data(micro_batches * 3 + 1)


def expected(stage: int, warm: int, micro_batches: int) -> list[str]:
    """Return a stage's actions: ``warm`` forwards, then backwards and forwards in alternation, then backwards."""
    forwards = [f"{stage}F{m}" for m in range(micro_batches)]
    backwards = [f"{stage}B{m}" for m in range(micro_batches)]
    rest = itertools.zip_longest(backwards, forwards[warm:])
    return forwards[:warm] + [action for pair in rest for action in pair if action]


@pytest.mark.parametrize(("stages", "micro_batches", "schedule", "warm"), SHAPES)
def test_the_measured_order_is_that_of_the_schedule(
    stages: int, micro_batches: int, schedule: str, warm: list[int]
) -> None:
    step, batch = build(stages, micro_batches, schedule)
    for _ in range(2):  # the first step may wait for things to be made ready
        step.record(*batch)
        for stage in range(stages):
            assert [str(a) for a in step.timeline.order(stage)] == expected(stage, warm[stage], micro_batches)
            events = [e for e in step.timeline.events if e.action.stage == stage]
            for first, second in itertools.pairwise(events):
                assert first.start <= first.end <= second.start


def test_every_replica_keeps_the_order() -> None:
    step, _ = build(3, 4, "dapple-a", replicas=[2, 1, 3])
    step.record(*data(4 * 4 + 1))
    for stage, (warm, replicas) in enumerate([(3, 2), (2, 1), (1, 3)]):
        for replica in range(replicas):
            assert [str(a) for a in step.timeline.order(stage, replica)] == expected(stage, warm, 4)


# --- size


def pipelined_nodes(stages: int, micro_batches: int, layers_per_stage: int = 1) -> tuple[Node, ...]:
    """Return the nodes of a pipelined graph, which is not emitted."""
    captured = capture(chain(weights(stages * layers_per_stage)), data(2))
    layers = find_layers(captured.graph)
    starts = [layers.find(f"layer{i * layers_per_stage}") for i in range(1, stages)]
    model = stage_model(captured, layers, starts, sgd())
    devices = [f"/device:CPU:{i}" for i in range(stages)]
    plan = make_plan(*((i, i, (i,)) for i in range(stages)), micro_batches=micro_batches, schedule="dapple-a")
    return pipeline_graph(model, plan, devices, devices[0]).nodes


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 8), (2, 4), (3, 8), (4, 2), (4, 16)])
def test_the_graph_holds_five_nodes_a_stage_and_micro_batch_at_most(stages: int, micro_batches: int) -> None:
    """Forward, backward, accumulate, a slice, a seed; and a constant number for each stage and for the step."""
    assert len(pipelined_nodes(stages, micro_batches)) <= 5 * stages * micro_batches + 6 * stages + 10


def test_the_graph_does_not_grow_with_the_model() -> None:
    assert len(pipelined_nodes(2, 4, layers_per_stage=1)) == len(pipelined_nodes(2, 4, layers_per_stage=5))
