"""Backward split into gradients of inputs and of weights equals one device, and runs in the schedule's order."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import ScheduleError
from graph_passes.ir.graph import Graph
from graph_passes.ir.names import nodes_of
from graph_passes.schedules.policies import build_schedule
from tests.dapple_tf.distributed.programs.cases import CASES
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import chain, data, sgd, weights
from tests.graph_passes.builders import refused

slow = pytest.mark.slow

BY_HAND = "0F0 0F1 0F2 0B2 0B0 0W2 0B1 0W1 0W0; 1F0 1F2 1F1 1B2 1B0 1W0 1B1 1W2 1W1"


@pytest.mark.parametrize(
    "name",
    [
        "tied, overlap",
        "dropout",
        pytest.param("DP 2, overlap, M = 1", marks=slow),
        pytest.param("integers and booleans, split", marks=slow),
        pytest.param("batch norm", marks=slow),
        pytest.param("a GRU", marks=slow),
    ],
)
def test_zb_h1_equals_one_device(name: str) -> None:
    """Adam clipped by the global norm, except for models with state."""
    case = CASES[name]
    options = dict(case.options)
    if "plan" in options:
        options["plan"] = dataclasses.replace(options["plan"], schedule="zb-h1")
    else:
        options["schedule"] = "zb-h1"
    comparison = compare(case.make_problem(), case.batches(), in_turn=case.in_turn, **options)
    kept = {name: e for name, e in comparison.errors.items() if not any(word in name for word in case.not_equal)}
    dataclasses.replace(comparison, errors=kept).check(case.tolerance)
    graph = comparison.step.graph
    assert len(nodes_of(graph, "weights")) == len(nodes_of(graph, "backward")) == len(nodes_of(graph, "forward"))


def problem(layers: int) -> Problem:
    matrices = weights(layers)
    return Problem(chain(matrices), {f"w{i}": matrix for i, matrix in enumerate(matrices)}, sgd)


def test_an_order_by_hand_equals_one_device_and_is_what_runs() -> None:
    comparison = compare(problem(4), [data(7), data(7), data(2)], stages=["layer2"], micro_batches=3, schedule=BY_HAND)
    comparison.check(1e-12)
    step = comparison.step  # the last batch had two samples, so two micro-batches in the same order
    assert {node.integer("micro_batch") for node in nodes_of(step.graph, "weights")} == {0, 1}
    step.record(*data(7))
    for stage, actions in enumerate(BY_HAND.split("; ")):
        assert " ".join(map(str, step.timeline.order(stage))) == actions


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("2:1 float64", "0F1 0F0 0B1 0B0; 1F1 1B1 1F0 1B0"),
        pytest.param(
            "2:1, overlap, zb-h1",
            "0F2 0F1 0F0 0B2 0W2 0B1 0B0 0W0 0W1; 1F2 1B2 1W2 1F1 1B1 1F0 1B0 1W1 1W0",
            marks=slow,
        ),
    ],
)
def test_copies_of_weights_are_refreshed_before_the_first_micro_batch_in_the_order(name: str, schedule: str) -> None:
    case = CASES[name]
    options = dict(case.options)
    if "plan" in options:
        options["plan"] = dataclasses.replace(options["plan"], schedule=schedule)
    else:
        options["schedule"] = schedule
    compare(case.make_problem(), case.batches(), **options).check(case.tolerance)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "schedule"),
    [(3, 5, "zb-h1:D=2"), pytest.param(4, 6, "zb-h1", marks=slow), pytest.param(2, 1, "zb-h1", marks=slow)],
)
def test_the_measured_order_is_that_of_the_schedule(stages: int, micro_batches: int, schedule: str) -> None:
    starts = [f"layer{i}" for i in range(1, stages)]
    loss_fn = chain(weights(stages))
    step = dapple.pipeline(loss_fn, optimizer=sgd(), stages=starts, micro_batches=micro_batches, schedule=schedule)
    for _ in range(2):  # the first step may wait for things to be made ready
        step.record(*data(micro_batches * 2 + 1))
        for stage, actions in enumerate(build_schedule(schedule, stages, micro_batches).stages):
            assert step.timeline.order(stage) == actions
            events = [event for event in step.timeline.events if event.action.stage == stage]
            for first, second in itertools.pairwise(events):
                assert first.start <= first.end <= second.start


def products(graph: Graph, function: str) -> int:
    return sum(node.op == "MatMul" for node in graph.function(function).graph.nodes)


def test_no_matrix_product_is_computed_twice() -> None:
    """Two layers a stage: two products in forward and, except for the first layer's input, four in backward."""
    steps = {}
    for schedule in ("dapple-a", "zb-h1"):
        loss_fn = chain(weights(4))
        options: dict[str, Any] = {"stages": ["layer2"], "micro_batches": 2, "example_batch": data(4)}
        steps[schedule] = dapple.pipeline(loss_fn, optimizer=sgd(), schedule=schedule, **options).graph
    assert [products(steps["dapple-a"], f"stage{s}/backward") for s in (0, 1)] == [3, 4]
    assert [products(steps["zb-h1"], f"stage{s}/backward") for s in (0, 1)] == [0, 2]
    assert [products(steps["zb-h1"], f"stage{s}/weights") for s in (0, 1)] == [3, 2]


def test_side_effects_of_a_custom_gradient_happen_once_and_in_order() -> None:
    done: list[float] = []
    counter = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="counter")
    matrices = weights(2)

    def note(value: Any) -> Any:
        done.append(float(value))
        return value

    @tf.custom_gradient
    def layer(x: Any, w: Any) -> Any:
        def differentiate(dy: Any) -> tuple[Any, Any]:
            count = counter.assign_add(1.0, read_value=True)
            seen = tf.numpy_function(note, [count], tf.float64)
            seen.set_shape([])
            return dy @ tf.transpose(w), tf.transpose(x) @ (dy * seen)

        return x @ w + 0.0 * counter, differentiate

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.tanh(x @ matrices[0])
        with tf.name_scope("second"):
            h = layer(h, tf.convert_to_tensor(matrices[1]))
        return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1))

    found = {}
    for schedule in ("gpipe", "zb-h1"):
        counter.assign(0.0)
        for matrix, value in zip(matrices, weights(2), strict=True):
            matrix.assign(value)
        done.clear()
        step = dapple.pipeline(
            loss_fn,
            optimizer=keras.optimizers.SGD(0.1),
            stages=["second"],
            micro_batches=3,
            schedule=schedule,
            inexact="allow",  # one device writes the counter once
        )
        step(*data(6))
        found[schedule] = (list(done), counter.numpy(), [matrix.numpy().tolist() for matrix in matrices])
    assert found["gpipe"][:2] == ([1.0, 2.0, 3.0], 3.0)
    assert found["zb-h1"] == found["gpipe"]


def test_an_invalid_order_is_refused_at_once_and_one_of_another_shape_at_the_first_batch() -> None:
    for text, said in (
        ("0F0 0X0", "'0X0' is not an action"),
        ("0B0 0F0", "the schedule deadlocks"),
        ("zb-h3", "no sch"),
    ):
        with refused(ScheduleError, said):
            dapple.pipeline(chain(weights(2)), optimizer=sgd(), stages=2, micro_batches=1, schedule=text)
    step = dapple.pipeline(chain(weights(2)), optimizer=sgd(), stages=2, micro_batches=4, schedule=BY_HAND)
    with refused(ScheduleError, "the schedule's text is for 2 stages x 3 micro-batches, but there are 2 x 4"):
        step(*data(8))


def test_a_plan_file_may_contain_the_order(tmp_path: Path) -> None:
    asked = dapple.pipeline(
        chain(weights(2)), optimizer=sgd(), stages=["layer1"], micro_batches=3, schedule=BY_HAND, example_batch=data(6)
    )
    asked.plan.save(tmp_path / "plan.json")
    plan = dapple.Plan.load(tmp_path / "plan.json")
    assert plan.schedule == BY_HAND
    compare(problem(2), [data(6), data(6)], plan=plan).check(1e-12)
