"""Backward split into gradients of inputs and of weights equals one device, and runs in the schedule's order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.dapple_tf.distributed.programs.cases import CASES
from tests.draws import draw
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import chain, data, sgd, weights
from tests.graph_passes.builders import refused
from tests.graph_passes.schedules.mixed import mixed

BY_HAND = "0F0 0F1 0F2 0I2 0I0 0W2 0I1 0W1 0W0; 1F0 1F2 1F1 1I2 1I0 1W0 1I1 1W2 1W1"
BOTH = "0F0 0F1 0B0 0I1 0W1; 1F0 1I0 1W0 1F1 1B1"
MIXED = "0F0 0F1 0F2 0I2 0B0 0W2 0I1 0W1; 1F0 1F2 1F1 1B2 1I0 1B1 1W0"


@pytest.mark.parametrize(
    "name",
    [
        "tied, overlap",
        "dropout",
        "DP 2, overlap, M = 1",
        "integers and booleans, split",
        "batch norm",
        "a GRU",
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
    assert len(nodes_of(graph, "weights")) == len(nodes_of(graph, "inputs")) == len(nodes_of(graph, "forward"))
    assert not nodes_of(graph, "backward")


def problem(layers: int) -> Problem:
    matrices = weights(layers)
    return Problem(chain(matrices), {f"w{i}": matrix for i, matrix in enumerate(matrices)}, sgd)


@pytest.mark.parametrize(
    ("order", "split"),
    [
        (BY_HAND, ["0W0", "0W1", "1W0", "1W1"]),
        (MIXED, ["0W1", "1W0"]),
    ],
)
def test_an_order_by_hand_equals_one_device_and_is_what_runs(order: str, split: list[str]) -> None:
    comparison = compare(problem(4), [data(7), data(7), data(2)], stages=["layer2"], micro_batches=3, schedule=order)
    comparison.check(1e-12)
    step = comparison.step  # the last batch had two samples, so two micro-batches in the same order
    found = [f"{node.integer('stage')}W{node.integer('micro_batch')}" for node in nodes_of(step.graph, "weights")]
    assert sorted(found) == split
    step.record(*data(7))
    for stage, actions in enumerate(order.split("; ")):
        assert " ".join(map(str, step.timeline.order(stage))) == actions


def test_an_order_of_an_earlier_version_equals_one_device() -> None:
    """There B beside W was what is I now."""
    old = BY_HAND.replace("I", "B")
    comparison = compare(problem(4), [data(7), data(2)], stages=["layer2"], micro_batches=3, schedule=old)
    comparison.check(1e-12)
    step = comparison.step
    step.record(*data(7))
    for stage, actions in enumerate(BY_HAND.split("; ")):
        assert " ".join(map(str, step.timeline.order(stage))) == actions


ORDERS = ("gpipe", "dapple-a", "dapple-b", "zb-h1", "interleaved-1f1b:v=2", "looped-bfs:v=2")
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": sgd,
    "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
}


@st.composite
def mixed_options(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a step of a chain of four layers, in which each backward is whole or split."""
    order = draw(st.sampled_from(ORDERS))
    stages = draw(st.sampled_from([2, 4]) if ":" in order else st.integers(1, 4))
    schedule = draw(mixed(ScheduleSpec.parse(order).build(stages, draw(st.integers(1, 4)))))
    workers = len(schedule.workers)
    return {
        "stages": [f"layer{i}" for i in range(1, stages)] or 1,
        "replicas": draw(st.lists(st.integers(1, 2), min_size=workers, max_size=workers)),
        "micro_batches": schedule.micro_batches,
        "schedule": str(schedule),
        "recompute": draw(st.sampled_from([False, True, ["layer0", "layer2"]])),
    }


# Replicas, layers that are computed again, and, in the second, two stages on each device.
EXAMPLES: tuple[dict[str, Any], ...] = (
    {
        "stages": ["layer1", "layer2"],
        "replicas": [1, 2, 1],
        "micro_batches": 3,
        "schedule": "0F0 0F1 0F2 0B0 0I1 0I2 0W2 0W1; 1F0 1F1 1I0 1F2 1B1 1W0 1I2 1W2; 2F0 2I0 2F1 2B1 2W0 2F2 2I2 2W2",
        "recompute": ["layer0", "layer2"],
    },
    {
        "stages": ["layer1", "layer2", "layer3"],
        "replicas": [2, 1],
        "micro_batches": 3,
        "schedule": "0F0 0F1 0F2 2F0 2F1 2I0 2F2 2B1 0I0 2W0 2I2 0B1 0W0 2W2 0B2; "
        "1F0 1F1 3F0 3B0 1F2 3F1 3I1 1I0 3F2 3I2 3W1 1B1 1W0 3W2 1I2 1W2",
        "recompute": True,
    },
)


@pytest.mark.timeout(1200)  # Hypothesis may spend five minutes to make a failure small
def test_any_whole_and_split_backwards_equal_one_device() -> None:
    @draw(few=3, many=30)
    @example(EXAMPLES[0], "clipped", 1)
    @example(EXAMPLES[1], "sgd", 5)
    @given(mixed_options(), st.sampled_from(sorted(OPTIMIZERS)), st.integers(0, 5))
    def check(options: dict[str, Any], optimizer: str, more: int) -> None:
        size = 2 * options["micro_batches"] + more
        model = dataclasses.replace(problem(4), make_optimizer=OPTIMIZERS[optimizer])
        compare(model, [data(size), data(size, 2)], **options).check(1e-12)

    check()


@pytest.mark.parametrize(
    "order",
    [
        "0F0 0F1 0F2 0I0 0I1 0W0 0W1 0B2",  # the last micro-batch is whole, and is reduced in buckets
        "0F0 0F1 0F2 0B0 0B1 0I2 0W2",  # it is split, and the part for weights is
        "0F0 0F1 0F2 0I2 0B1 0W2 0B0",
        "0F2 0F1 0B2 0F0 0B1 0I0 0W0",
    ],
)
def test_the_last_micro_batch_is_reduced_in_buckets_whether_it_is_whole_or_split(order: str) -> None:
    asked = dapple.pipeline(
        chain(weights(4)),
        optimizer=sgd(),
        stages=1,
        replicas=[2],
        micro_batches=3,
        schedule="gpipe",
        example_batch=data(9),
    )
    plan = dataclasses.replace(asked.plan, schedule=order, overlap=True)
    comparison = compare(problem(4), [data(9), data(9)], plan=plan)
    comparison.check(1e-12)
    last = "weights" if "W2" in order else "backward"
    inlined = [node.name for node in comparison.step.graph.nodes if node.has("inline")]
    assert inlined == [f"stage0/replica{replica}/mb2/{last}" for replica in (0, 1)]
    assert f"stage0/last_{last}" in comparison.step.graph.function_by_name


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("2:1 float64", "0F1 0F0 0B1 0B0; 1F1 1B1 1F0 1B0"),
        ("2:1, overlap, zb-h1", "0F2 0F1 0F0 0I2 0W2 0I1 0I0 0W0 0W1; 1F2 1I2 1W2 1F1 1I1 1F0 1I0 1W1 1W0"),
        ("2:1, overlap, zb-h1", "0F2 0F1 0F0 0I2 0B1 0W2 0B0; 1F2 1B2 1F1 1I1 1F0 1I0 1W1 1W0"),
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
    [
        (3, 5, "zb-h1:D=2"),
        (2, 3, MIXED),
        (4, 6, "zb-h1"),
        (2, 1, "zb-h1"),
    ],
)
def test_the_measured_order_is_that_of_the_schedule(stages: int, micro_batches: int, schedule: str) -> None:
    starts = [f"layer{i}" for i in range(1, stages)]
    loss_fn = chain(weights(stages))
    step = dapple.pipeline(loss_fn, optimizer=sgd(), stages=starts, micro_batches=micro_batches, schedule=schedule)
    for _ in range(2):  # the first step may wait for things to be made ready
        step.record(*data(micro_batches * 2 + 1))
        for stage, actions in enumerate(ScheduleSpec.parse(schedule).build(stages, micro_batches).stages):
            assert step.timeline.order(stage) == actions
            events = [event for event in step.timeline.events if event.action.stage == stage]
            for first, second in itertools.pairwise(events):
                assert first.start <= first.end <= second.start


def products(graph: Graph, function: str) -> int:
    return sum(node.op == "MatMul" for node in graph.function(function).graph.nodes)


def test_no_matrix_product_is_computed_twice() -> None:
    """Two layers a stage: two products in forward and, except for the first layer's input, four in backward."""
    steps = {}
    for schedule in ("dapple-a", "zb-h1", BOTH):
        loss_fn = chain(weights(4))
        options: dict[str, Any] = {"stages": ["layer2"], "micro_batches": 2, "example_batch": data(4)}
        steps[schedule] = dapple.pipeline(loss_fn, optimizer=sgd(), schedule=schedule, **options).graph
    assert [products(steps["dapple-a"], f"stage{s}/backward") for s in (0, 1)] == [3, 4]
    assert [products(steps["zb-h1"], f"stage{s}/inputs") for s in (0, 1)] == [0, 2]
    assert [products(steps["zb-h1"], f"stage{s}/weights") for s in (0, 1)] == [3, 2]
    assert not {f"stage{s}/backward" for s in (0, 1)} & steps["zb-h1"].function_by_name.keys()
    mixed_step = steps[BOTH]
    assert [products(mixed_step, f"stage{s}/backward") for s in (0, 1)] == [3, 4]
    assert [products(mixed_step, f"stage{s}/inputs") for s in (0, 1)] == [0, 2]
    assert [products(mixed_step, f"stage{s}/weights") for s in (0, 1)] == [3, 2]


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
    in_order = "0F0 0F1 0F2 0I0 0B1 0W0 0I2 0W2; 1F0 1B0 1F1 1I1 1F2 1W1 1B2"
    for schedule in ("gpipe", "zb-h1", in_order):
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
    assert found["zb-h1"] == found[in_order] == found["gpipe"]


def test_an_invalid_order_is_refused_at_once_and_one_of_another_shape_when_the_stages_are_known() -> None:
    for text, said in (
        ("0F0 0X0", "'0X0' is not an action"),
        ("0B0 0F0", "the schedule deadlocks"),
        ("0F0 0I0; 1F0 1B0", "stage 0 must run F, and B or both I and W, of each micro-batch once; missing"),
        ("zb-h3", "no sch"),
    ):
        with refused(ScheduleError, said):
            dapple.pipeline(chain(weights(2)), optimizer=sgd(), stages=2, micro_batches=1, schedule=text)
    said = "the schedule's text is for 2 stages x 3 micro-batches, but there are 2 x 4"
    with refused(ScheduleError, said):
        dapple.pipeline(chain(weights(2)), optimizer=sgd(), stages=2, micro_batches=4, schedule=BY_HAND)
    step = dapple.pipeline(chain(weights(2)), optimizer=sgd(), stages=["layer1"], micro_batches=4, schedule=BY_HAND)
    with refused(ScheduleError, said):
        step(*data(8))


def test_a_plan_file_may_contain_the_order(tmp_path: Path) -> None:
    asked = dapple.pipeline(
        chain(weights(2)), optimizer=sgd(), stages=["layer1"], micro_batches=3, schedule=BY_HAND, example_batch=data(6)
    )
    asked.plan.save(tmp_path / "plan.json")
    plan = dapple.Plan.load(tmp_path / "plan.json")
    assert plan.schedule == BY_HAND
    compare(problem(2), [data(6), data(6)], plan=plan).check(1e-12)
