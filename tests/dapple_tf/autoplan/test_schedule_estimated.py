"""``schedule="auto"`` without a profile: by estimated work and exact bytes."""

from __future__ import annotations

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.autoplan.layer_estimates import EstimatedCosts
from dapple_tf.autoplan.schedule_auto import ScheduleChoice
from dapple_tf.autoplan.schedule_estimated import choose_estimated_schedule, detect_cluster
from dapple_tf.compiler import PlannedModel
from dapple_tf.errors import PlanError
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.shapes import infer_shapes, mark_batch
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.profiler.cluster import Link, config
from dapple_tf.staged_model import stage_model
from tests.dapple_tf.simulator.builders import make_plan

ROWS, WIDTH, MICRO_BATCHES, LAYERS = 64, 64, 8, 6
TENSOR, LAYER = ROWS * WIDTH * 4, (WIDTH * WIDTH + WIDTH) * 4
QUICK = Link(bandwidth=1e15, latency=0.0)


def choose(memory: float, link: Link = QUICK, *, ranks: bool = False) -> ScheduleChoice:
    """For three stages of two dense layers, a second of forward each, on devices of ``memory`` bytes."""
    stack = [keras.layers.Dense(WIDTH, activation="relu", name=f"d{i}") for i in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *stack])
    batch = (np.ones((ROWS * MICRO_BATCHES, WIDTH), np.float32),)
    captured = capture(lambda x: tf.reduce_mean(tf.square(model(x))), batch)
    shapes = infer_shapes(captured, ROWS)
    captured = dataclasses.replace(captured, graph=mark_batch(captured.graph, shapes, ROWS))
    layers = find_layers(captured.graph)
    starts = [layers.find("d2"), layers.find("d4")]
    staged = stage_model(captured, layers, starts, keras.optimizers.SGD(0.1))
    bounds = [0, *starts, len(layers.layers)]
    stages = [(first, end - 1, (i,)) for i, (first, end) in enumerate(itertools.pairwise(bounds))]
    size = {"global_batch_size": ROWS * MICRO_BATCHES, "micro_batch_size": ROWS, "micro_batches": MICRO_BATCHES}
    plan = make_plan(*stages, schedule="dapple-a", **size)
    seconds = [float(position in bounds) for position in range(len(layers.layers))]
    cluster = dataclasses.replace(config("c", 3), device_memory=memory, inter_server=link)
    return choose_estimated_schedule(
        PlannedModel(staged, plan, ROWS * MICRO_BATCHES), EstimatedCosts(seconds, []), shapes, 0, cluster, ranks=ranks
    )


def test_with_fast_links_the_policy_with_the_smallest_stash_is_chosen() -> None:
    choice = choose(1e12)
    assert (choice.schedule, choice.micro_batches, choice.measured) == ("dapple-a", MICRO_BATCHES, False)
    assert choice.max_in_flight == (MICRO_BATCHES,) * 3


def test_with_transfers_of_a_tenth_of_the_work_more_is_in_flight() -> None:
    """F = 1 s, B = 2 s; what crosses, 16 kB, takes 0.15 s each way: an ACR of 0.1."""
    choice = choose(1e12, Link(bandwidth=TENSOR / 0.15, latency=0.0))
    assert choice.schedule == "dapple-b"
    assert choice.acr == pytest.approx(0.1)


def test_d_is_the_number_of_micro_batches_that_memory_holds() -> None:
    """Of 14 tensors 4 are weights with their gradients, and 4 to 6 are worked on. A micro-batch keeps two or three."""
    choice = choose(14 * TENSOR, Link(bandwidth=TENSOR / 0.15, latency=0.0))
    assert choice.max_in_flight == (2, 1, 1)
    assert choice.schedule == "dapple-a:D=1"
    assert "gpipe" not in choice.seconds
    assert "D = 1: a device's 229 kB hold no more micro-batches of stage 1" in str(choice)


def test_a_memory_that_no_schedule_fits_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"no schedule fits: with M = 8 .* stage \d needs .* and lacks"):
        choose(4 * LAYER + TENSOR)


def test_a_pipeline_of_given_stages_explains_its_schedule() -> None:
    matrix = tf.Variable(tf.eye(4))
    step = dapple.pipeline(
        lambda x: tf.reduce_mean(tf.square(x @ matrix)),
        optimizer=keras.optimizers.SGD(0.1),
        stages=1,
        micro_batches=2,
        example_batch=(np.ones((4, 4), np.float32),),
    )
    assert step.plan.schedule == step.choice.schedule == "dapple-a"
    assert "(estimated)" in str(step.choice)
    assert detect_cluster(step.plan, ranks=False).devices == 1


def test_ranks_prefer_the_policy_that_hides_transfers_where_both_are_equally_fast() -> None:
    assert choose(1e12, ranks=True).schedule == "dapple-b"
