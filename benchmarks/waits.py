"""A model whose work is waiting: calibrated sleeps in place of arithmetic, so that stages may outnumber the cores.

What is measured is the real graph, with its edges, transfers and runtime; only the devices are pretended. The work of a
stage takes turns, as a device computes one thing at a time. What is computed beside (products with a weight that has
one entry for each column) is tiny, and its gradients are right, so that a step can be compared with one device's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from benchmarks.workloads import Timed
from dapple_tf import Workload


class Wait(keras.layers.Layer):
    """``x * weight`` of [samples, width]: waits in forward, for the gradient of ``x``, and for that of the weight.

    ``seconds``: those three. Layers that share ``turn`` wait one after the other.
    """

    def __init__(self, seconds: Sequence[float], turn: Any, width: int, name: str) -> None:
        super().__init__(name=name)
        self.seconds = tuple(seconds)
        self.turn = turn
        self.weight = self.add_weight(shape=(width,), initializer="ones")

    def call(self, x: Any) -> Any:
        """See the class."""
        forward, inputs, weights = self.seconds

        @tf.custom_gradient
        def multiply(x: Any, weight: Any) -> Any:
            def differentiate(dy: Any) -> tuple[Any, Any]:
                dx = pause(dy, inputs, self.turn) * weight
                return dx, tf.reduce_sum(pause(dy, weights, self.turn) * x, 0)

            return pause(x, forward, self.turn) * weight, differentiate

        return multiply(x, tf.convert_to_tensor(self.weight))


def pause(tensor: Any, seconds: float, turn: Any) -> Any:
    """The same tensor, ``seconds`` after it is there and ``turn`` is free; it takes a thread, but no core."""
    if not seconds:
        return tensor

    def wait(value: Any) -> Any:
        with turn:
            time.sleep(seconds)
        return value

    later = tf.numpy_function(wait, [tensor], tensor.dtype, stateful=False)
    later.set_shape(tensor.shape)
    return later


def waits(
    stages: int,
    *,
    forward: float = 0.02,
    inputs: float = 0.02,
    weights: float = 0.02,
    width: int = 4,
    batch_size: int = 64,
) -> Timed:
    """A chain of ``stages`` layers that wait so many seconds a micro-batch, however many samples it has.

    ``inputs``, ``weights``: the backward's gradients of what enters a layer, and of its weight. ``width``: columns of
    what crosses (float32), of ``batch_size`` samples. The first layer scales the batch, so that the one after it has a
    gradient of its inputs to compute, as in any model with several layers in its first stage. See ``stage_names``.
    """
    layers = [Wait((forward, inputs, weights), threading.Lock(), width, name) for name in _names(stages)]
    scale = tf.Variable(tf.ones([width]), name="scale")

    def loss_fn(x: Any, y: Any) -> Any:
        x = x * scale
        for layer in layers:
            x = layer(x)
        return tf.reduce_mean(tf.square(x - y))

    generator = np.random.default_rng(0)
    x, y = (tf.constant(generator.normal(size=(batch_size, width)), tf.float32) for _ in range(2))
    return Timed(Workload(loss_fn, keras.optimizers.SGD(0.01), [(x, y)]), (x, y))


def stage_names(stages: int) -> list[str]:
    """The layers at which the stages of ``waits`` after the first start, for ``dapple.pipeline(stages=...)``."""
    return _names(stages)[1:]


def _names(stages: int) -> list[str]:
    return [f"wait_{stage}" for stage in range(stages)]


def start_waiting(stages: int) -> None:
    """``dapple.init`` with threads for as many stages: each waits in one, and two gradients may wait for their turn."""
    tf.config.threading.set_inter_op_parallelism_threads(4 * stages)
    dapple.init(stages)
