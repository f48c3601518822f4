"""A step that is dropped leaves no object of ours behind: programs that make pipelines again and again do not grow."""

from __future__ import annotations

import gc
import weakref

import keras
import tensorflow as tf

from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.staged_model import StagedModel
from tests.dapple_tf.builders import X, step_of


def make_and_drop() -> list[weakref.ref[object]]:
    weights = [tf.Variable(tf.ones((4, 4))) for _ in range(2)]

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.tanh(tf.tanh(x @ weights[0]) @ weights[1]))

    step = step_of(loss, optimizer=keras.optimizers.SGD(0.1), stages=2)
    step(X)
    return [weakref.ref(thing) for thing in (step, step._compiled_last().planned.model, step.graph, *weights)]


def test_what_a_dropped_step_has_made_is_freed() -> None:
    made = make_and_drop()
    gc.collect()
    assert [type(one()).__name__ for one in made if one() is not None] == []


def test_the_number_of_our_objects_does_not_grow() -> None:
    kinds = (PipelinedStep, StagedModel, Graph)

    def count() -> int:
        gc.collect()
        return sum(isinstance(one, kinds) for one in gc.get_objects())

    make_and_drop()
    before = count()
    for _ in range(3):
        make_and_drop()
    assert count() <= before
