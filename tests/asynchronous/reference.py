"""PipeDream's training (SOSP 2019, section 3.3) one minibatch after the other, in eager TensorFlow and plain Keras.

It shares no code with dapple_tf. There is no pipeline here: all versions of all weights are kept, minibatch after
minibatch is differentiated at the versions that the formulas name, and the optimizer of each stage applies the gradient
to the newest weights. That works because the versions of a minibatch come from earlier minibatches only.

Letters: S stages, W minibatches in a window, m the index of a minibatch, r_s the replicas of stage s, K_s its warm-up.
A version is a number of updates of a stage since the window began.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

Values = list[Any]  # the values, or the gradients, of a stage's variables


# --- the rules


def warm_ups(replicas: Sequence[int], depth: int | None = None) -> list[int]:
    """Return K_s, the minibatches in flight in a replica of each stage.

    By default K_s is the number of workers from stage s on, over r_s, rounded up (section 3.2). ``depth`` (Fig. 18),
    for stages of one replica: min(depth - s, 2 (S - s) - 1), and at least 1.
    """
    count = len(replicas)
    if depth is None:
        return [-(-sum(replicas[s:]) // replicas[s]) for s in range(count)]
    assert set(replicas) == {1}
    return [max(1, min(depth - s, 2 * (count - s) - 1)) for s in range(count)]


def forward_versions(
    weights: str, minibatches: int, replicas: Sequence[int], depth: int | None = None
) -> list[list[int]]:
    """Return the version that the forward of every minibatch reads, as [stage][minibatch]."""
    warm_up = warm_ups(replicas, depth)
    if weights == "2bw":
        return [[max(0, m - 1) for m in range(minibatches)] for _ in replicas]
    if weights == "vertical-sync":
        assert len(set(replicas)) == 1
        warm_up = [warm_up[0]] * len(replicas)
    else:
        assert weights in ("stash", "latest")
    return [[max(0, m // r - k + 1) for m in range(minibatches)] for r, k in zip(replicas, warm_up, strict=True)]


def rows(batch: Any, minibatch: int, minibatches: int) -> Any:
    """Return the rows [N m / W, N (m + 1) / W) of every tensor of the batch."""
    size = tf.nest.flatten(batch)[0].shape[0]
    low, high = size * minibatch // minibatches, size * (minibatch + 1) // minibatches
    return tf.nest.map_structure(lambda tensor: tensor[low:high], batch)


# --- models


class Model(Protocol):
    """A model in stages.

    ``stages``: the trainable variables of each stage. ``differentiate``: the mean loss of the rows of a minibatch, and
    the gradients of the stages, where stage s uses ``forward[s]`` in its forward and ``backward[s]`` in its backward.
    """

    stages: list[list[Any]]

    def differentiate(self, batch: Any, forward: list[Values], backward: list[Values]) -> tuple[Any, list[Values]]: ...


class Differentiated:
    """A loss function f(w_1, ..., w_n) of the stages' variables, differentiated by the tape at any versions of them."""

    def __init__(self, loss_fn: Callable[..., Any], stages: Sequence[Sequence[Any]]) -> None:
        self.loss_fn = loss_fn
        self.stages = [list(variables) for variables in stages]

    def differentiate(self, batch: Any, forward: list[Values], backward: list[Values]) -> tuple[Any, list[Values]]:
        assert all(found is wanted for found, wanted in zip(forward, backward, strict=True))
        newest = [copies(variables) for variables in self.stages]
        assign(self.stages, forward)
        with tf.GradientTape() as tape:
            loss = self.loss_fn(*batch)
        gradients = tape.gradient(loss, [[as_tf(v) for v in variables] for variables in self.stages])
        assign(self.stages, newest)
        return loss, gradients


@dataclass(frozen=True)
class Dense:
    """A layer x @ w, followed by tanh or not, with its derivative by hand."""

    variable: Any
    tanh: bool = True

    def forward(self, x: Any, w: Any) -> tuple[Any, tuple[Any, Any]]:
        y = tf.tanh(x @ w) if self.tanh else x @ w
        return y, (x, y)

    def backward(self, dy: Any, saved: tuple[Any, Any], w: Any) -> tuple[Any, Any]:
        """Return the gradients of x and w: that of w by the saved x, that of x by the w that is given."""
        x, y = saved
        dz = dy * (1 - y * y) if self.tanh else dy
        return tf.matmul(dz, w, transpose_b=True), tf.matmul(x, dz, transpose_a=True)


class ByHand:
    """Stages of dense layers whose backward may use other weights than their forward: no weight stashing.

    ``loss``: of the last layer's output and the targets: the mean loss, and its derivative by the output.
    """

    def __init__(self, stages: Sequence[Sequence[Dense]], loss: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self.layers = [list(layers) for layers in stages]
        self.stages = [[layer.variable for layer in layers] for layers in self.layers]
        self.loss = loss

    def differentiate(self, batch: Any, forward: list[Values], backward: list[Values]) -> tuple[Any, list[Values]]:
        x, targets = batch
        saved: list[list[Any]] = [[] for _ in self.layers]
        for s, layers in enumerate(self.layers):
            for layer, w in zip(layers, forward[s], strict=True):
                x, kept = layer.forward(x, w)
                saved[s].append(kept)
        loss, d = self.loss(x, targets)
        gradients: list[Values] = [[] for _ in self.layers]
        for s in reversed(range(len(self.layers))):
            for layer, kept, w in zip(self.layers[s][::-1], saved[s][::-1], backward[s][::-1], strict=True):
                d, dw = layer.backward(d, kept, w)
                gradients[s].insert(0, dw)
        return loss, gradients


def squared_error(output: Any, targets: Any) -> tuple[Any, Any]:
    """Return the mean over samples of the sum of squared differences, and its derivative by the output."""
    difference = output - targets
    return tf.reduce_mean(tf.reduce_sum(difference * difference, 1)), 2 * difference / len(difference)


# --- training


@dataclass(frozen=True)
class Window:
    """The mean loss of each minibatch, and the version that its forward read, as [stage][minibatch]."""

    losses: list[float]
    versions: list[list[int]]


class Reference:
    """A model in training, with an optimizer for each stage."""

    def __init__(self, model: Model, make_optimizer: Callable[[], Any]) -> None:
        self.model = model
        self.optimizers = [make_optimizer() for _ in model.stages]
        for optimizer, variables in zip(self.optimizers, model.stages, strict=True):
            optimizer.build(variables)

    @property
    def iterations(self) -> int:
        """The optimizer steps so far, a minibatch each; those of all stages agree between windows."""
        found = {int(optimizer.iterations.numpy()) for optimizer in self.optimizers}
        assert len(found) == 1
        return found.pop()

    def window(
        self,
        batch: Any,
        minibatches: int,
        weights: str = "stash",
        replicas: Sequence[int] | None = None,
        depth: int | None = None,
    ) -> Window:
        """Train on the minibatches of a window; the variables, slots and iterations are then those of its end."""
        stages = self.model.stages
        replicas = list(replicas or [1] * len(stages))
        assert all(minibatches % r == 0 for r in replicas)
        begin = self.iterations
        read = forward_versions(weights, minibatches, replicas, depth)
        history = [[copies(variables)] for variables in stages]  # [stage][version]
        pending: list[list[Values]] = [[] for _ in stages]
        losses = []
        for m in range(minibatches):
            forward = [history[s][read[s][m]] for s in range(len(stages))]
            backward = [history[s][m // replicas[s]] for s in range(len(stages))] if weights == "latest" else forward
            loss, gradients = self.model.differentiate(rows(batch, m, minibatches), forward, backward)
            losses.append(float(loss))
            for s, r in enumerate([1] * len(stages) if weights == "2bw" else replicas):
                pending[s].append(gradients[s])
                if len(pending[s]) == r:
                    self._update(s, [mean(each) for each in zip(*pending[s], strict=True)], begin + m)
                    history[s].append(copies(stages[s]))
                    pending[s].clear()
        for optimizer in self.optimizers:
            optimizer.iterations.assign(begin + minibatches)
        return Window(losses, read)

    def synchronous_step(self, batch: Any) -> float:
        """Train on the whole batch at once, as any optimizer step does."""
        begin = self.iterations
        newest = [copies(variables) for variables in self.model.stages]
        loss, gradients = self.model.differentiate(batch, newest, newest)
        for s, found in enumerate(gradients):
            self._update(s, found, begin)
        for optimizer in self.optimizers:
            optimizer.iterations.assign(begin + 1)
        return float(loss)

    def continue_from(self, other: Reference) -> None:
        """Take over the slots and iterations of a model of the same variables in other stages."""
        found = other.slots()
        for optimizer in self.optimizers:
            for variable in optimizer.variables:
                if (name := slot_name(variable)) in found:
                    variable.assign(found[name])
            optimizer.iterations.assign(other.iterations)

    def slots(self) -> dict[str, Any]:
        """Return the values of the slots of all stages' optimizers."""
        return {name: value for optimizer in self.optimizers for name, value in slots(optimizer).items()}

    def _update(self, stage: int, gradients: Values, iteration: int) -> None:
        optimizer = self.optimizers[stage]
        optimizer.iterations.assign(iteration)
        optimizer.apply(gradients, self.model.stages[stage])


def mean(gradients: Sequence[Any]) -> Any:
    """Return the mean; that of IndexedSlices keeps every row of every one of them, that of no gradient is None."""
    if len(gradients) == 1 or gradients[0] is None:
        return gradients[0]
    if isinstance(gradients[0], tf.IndexedSlices):
        values = tf.concat([g.values for g in gradients], 0) / len(gradients)
        return tf.IndexedSlices(values, tf.concat([g.indices for g in gradients], 0), gradients[0].dense_shape)
    return tf.add_n(gradients) / len(gradients)


def slots(optimizer: Any) -> dict[str, Any]:
    """Return the values of an optimizer's slots, by the names of slot and variable."""
    found = {}
    for variable in optimizer.variables:
        name = slot_name(variable)
        if name not in ("iteration", "learning_rate"):
            assert name not in found, f"two slots are called {name}: name the model's variables"
            found[name] = variable.numpy()
    return found


def slot_name(variable: Any) -> str:
    """Return the name of an optimizer's variable without the name of the optimizer."""
    return re.sub(r"_\d+$", "", variable.path.split("/", 1)[-1])


def as_tf(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def copies(variables: Sequence[Any]) -> Values:
    return [np.array(variable.numpy()) for variable in variables]


def assign(stages: Sequence[Sequence[Any]], values: Sequence[Values]) -> None:
    for variables, found in zip(stages, values, strict=True):
        for variable, value in zip(variables, found, strict=True):
            variable.assign(value)
