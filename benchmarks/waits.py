"""A model that sleeps for a set time instead of computing, so that there can be more stages than cores.

The graph, its control edges, its transfers and the runtime are the real ones; only the devices' work is emulated. One
lock per stage makes its work sequential, as on a device. What is computed besides (a product with one weight per
column) is tiny and has correct gradients, so that a step can be compared with the same step on one device.
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
    """``x * weight`` of [samples, width], with a sleep in forward, in the gradient of ``x`` and in that of the weight.

    ``seconds``: of these three sleeps, of ``samples`` samples and in proportion of others; of any number if None.
    Layers that share the lock ``turn`` sleep one after the other.
    """

    def __init__(self, seconds: Sequence[float], turn: Any, width: int, name: str, samples: int | None) -> None:
        super().__init__(name=name)
        self.seconds = tuple(seconds)
        self.turn = turn
        self.samples = samples
        self.weight = self.add_weight(shape=(width,), initializer="ones")

    def call(self, x: Any) -> Any:
        """Return ``x * weight`` after the sleep of forward."""
        forward, inputs, weights = self.seconds

        @tf.custom_gradient
        def multiply(x: Any, weight: Any) -> Any:
            def differentiate(dy: Any) -> tuple[Any, Any]:
                dx = pause(dy, inputs, self.turn, self.samples) * weight
                return dx, tf.reduce_sum(pause(dy, weights, self.turn, self.samples) * x, 0)

            return pause(x, forward, self.turn, self.samples) * weight, differentiate

        return multiply(x, tf.convert_to_tensor(self.weight))


def pause(tensor: Any, seconds: float, turn: Any, samples: int | None = None) -> Any:
    """Return the tensor ``seconds`` after it is computed and ``turn`` is free; this occupies a thread, but no core.

    The seconds are of ``samples`` rows, or of any number.
    """
    if not seconds:
        return tensor

    def wait(value: Any) -> Any:
        with turn:
            time.sleep(seconds * (len(value) / samples if samples else 1.0))  # in place of computing: a device's work
        return value

    later = tf.numpy_function(wait, [tensor], tensor.dtype, stateful=False)
    later.set_shape(tensor.shape)
    return tf.reshape(later, tf.shape(tensor))  # so that it is known to have the rows of the tensor


def waits(
    stages: int,
    *,
    forward: float = 0.02,
    inputs: float = 0.02,
    weights: float = 0.02,
    width: int = 4,
    batch_size: int = 64,
    devices: Sequence[int] | None = None,
    samples: int | None = None,
    extra_weights: int = 0,
) -> Timed:
    """Return a chain of ``stages`` layers that sleep for a set time per micro-batch, whatever its number of samples.

    With ``samples`` the times are of that many samples, and in proportion of others.
    ``devices``: the number of each layer's device; layers of one device sleep one after the other. By default each
    layer has a device of its own. ``extra_weights``: of each layer, more weights (float32) that take nothing to use.

    ``forward``: seconds of forward. ``inputs``, ``weights``: seconds of backward for the gradients of a layer's inputs
    and of its weight. ``width``: columns (float32) of the tensor between layers, for ``batch_size`` samples. A variable
    scales the batch first, so that the first layer has a gradient of its inputs to compute, as the later layers of a
    stage do in any model. See ``stage_names``.
    """
    turns = [threading.Lock() for _ in range(stages)]
    places = range(stages) if devices is None else devices
    layers = [
        Wait((forward, inputs, weights), turns[place], width, name, samples)
        for name, place in zip(_names(stages), places, strict=True)
    ]
    scale = tf.Variable(tf.ones([width]), name="scale")

    extra = [tf.Variable(tf.zeros([extra_weights]), name=f"extra_{i}") for i in range(stages) if extra_weights]

    def loss_fn(x: Any, y: Any) -> Any:
        x = x * scale
        for i, layer in enumerate(layers):
            x = layer(x)
            if extra:
                x = x + tf.reduce_sum(extra[i])
        return tf.reduce_mean(tf.square(x - y))

    generator = np.random.default_rng(0)
    x, y = (tf.constant(generator.normal(size=(batch_size, width)), tf.float32) for _ in range(2))
    return Timed(Workload(loss_fn, keras.optimizers.SGD(0.01), [(x, y)]), (x, y))


def stage_names(stages: int) -> list[str]:
    """Return the layers that start the stages of ``waits`` but the first, for ``dapple.pipeline(stages=...)``."""
    return _names(stages)[1:]


def _names(stages: int) -> list[str]:
    return [f"wait_{stage}" for stage in range(stages)]


def start_waiting(stages: int) -> None:
    """Call ``dapple.init`` with enough threads: each stage sleeps in one, and two gradients may wait for the lock."""
    tf.config.threading.set_inter_op_parallelism_threads(4 * stages)
    dapple.init(stages)
