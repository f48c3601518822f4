"""Small models, plans and layers that several tests of the library start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.eager import context

import dapple_tf as dapple
from dapple_tf.frontend.capture import capture
from dapple_tf.graph_passes.analysis.layers import Layers, find_layers
from dapple_tf.plans import Plan, StagePlan

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def chain(layers: int = 3, width: int = 4) -> tuple[keras.Model, Any]:
    """A model of dense layers called d0, d1 ..., and its loss."""
    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(width, activation="tanh", name=f"d{i}") for i in range(layers)]
    model = keras.Sequential([keras.Input((4,)), *dense], name="net")

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x)))

    return model, loss


def layers_of(loss: Any, *batch: Any) -> Layers:
    """The layers of a loss."""
    return find_layers(capture(loss, batch or (X,)).graph)


def step_of(loss: Any, **options: Any) -> Any:
    """``dapple.pipeline`` with SGD, two micro-batches and, without a plan, two stages unless said otherwise."""
    stages = {} if options.get("plan") is not None else {"stages": 2}
    options = {"optimizer": keras.optimizers.SGD(0.1), "micro_batches": 2, **stages, **options}
    return dapple.pipeline(loss, **options)


def make_plan(*stages: tuple[int, int, tuple[int, ...]], **changes: Any) -> Plan:
    """A plan of (first layer, last layer, devices)."""
    fields: dict[str, Any] = {
        "model": "loss",
        "planner": "test",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "micro_batches": 4,
        "schedule": "dapple-a",
        "recompute": False,
    }
    return Plan(**{**fields, "stages": tuple(StagePlan(*stage) for stage in stages), **changes})


def executed_nodes(function: Callable[..., object], *arguments: tf.Tensor) -> list[NodeDef]:
    """Call a function, and return the NodeDefs of the graphs that ran, after inlining."""
    context.context().enable_run_metadata()
    try:
        context.context().export_run_metadata()  # forget what ran before
        function(*arguments)
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    return [node for graph in metadata.function_graphs for node in graph.post_optimization_graph.node]
