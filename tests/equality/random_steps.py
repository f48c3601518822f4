"""Random training steps: phases, groups of variables, shared forwards, clipping, assigns, optimizers.

A step is drawn as data (``RandomStep``) and made from it. It may be any combination of what users write between a tape
and the end of a step; all of it is meant to be exact or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf
from hypothesis import strategies as st

from tests.equality.training_steps import Made

optimizers = keras.optimizers
OPTIMIZERS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "sgd": lambda: optimizers.SGD(0.05),
        "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: optimizers.Adam(0.01),
        "adamw, clipnorm": lambda: optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.3),
        "rmsprop, averages": lambda: optimizers.RMSprop(0.01, use_ema=True, ema_momentum=0.9),
        "adam, global_clipnorm": lambda: optimizers.Adam(0.01, global_clipnorm=0.2),
    }
)
TARGETS = ("squares", "absolute", "weighted", "masked", "penalty", "teacher", "sum of rows", "counted", "totalled")
CLIPS = ("none", "norm", "global norm", "value", "central", "noise", "scaled by the loss", "twice")
AFTER = ("average", "teacher follows", "swap", "limit", "count", "metric", "norm of new weights", "old weights")


@dataclass(frozen=True)
class RandomPhase:
    """One target: its loss, which models its gradients are of, what clips them, and what follows the update.

    ``shares``: the target is computed from the predictions of the phase before. ``groups``: kernels and biases have an
    optimizer each.
    """

    target: str
    of_second: bool
    shares: bool
    clip: str
    optimizer: str
    groups: bool
    after: tuple[str, ...]


@dataclass(frozen=True)
class RandomStep:
    """The phases of a step, and how it runs."""

    phases: tuple[RandomPhase, ...]
    skips: bool
    stages: int
    micro_batches: int
    replicas: tuple[int, ...] | None

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``dapple.train_step``."""
        replicas = {} if self.replicas is None else {"replicas": list(self.replicas)}
        return {"stages": self.stages, "micro_batches": self.micro_batches, **replicas}


@st.composite
def random_steps(draw: st.DrawFn) -> RandomStep:
    phase = st.builds(
        RandomPhase,
        st.sampled_from(TARGETS),
        st.booleans(),
        st.booleans(),
        st.sampled_from(CLIPS),
        st.sampled_from(sorted(OPTIMIZERS)),
        st.booleans(),
        st.lists(st.sampled_from(AFTER), max_size=2, unique=True).map(tuple),
    )
    phases = draw(st.lists(phase, min_size=1, max_size=3))
    stages = draw(st.integers(1, 3))
    replicas = draw(st.sampled_from([None, None, (2, *(1,) * (stages - 1)), (1,) * (stages - 1) + (2,)]))
    return RandomStep(tuple(phases), draw(st.booleans()), stages, draw(st.sampled_from([1, 2, 3, 5])), replicas)


def _model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input([4]), *layers])


def _loss(target: str, found: Any, y: Any, taught: Any) -> Any:
    squares = tf.square(found - y)
    weights = tf.abs(y[:, 0]) + 0.1
    mask = tf.cast(y > 0, squares.dtype)
    match target:
        case "absolute":
            return tf.reduce_mean(tf.abs(found - y))
        case "weighted":
            return tf.reduce_sum(tf.reduce_sum(squares, 1) * weights) / tf.reduce_sum(weights)
        case "masked":
            return tf.reduce_sum(squares * mask) / (tf.reduce_sum(mask) + 1.0)
        case "teacher":
            return tf.reduce_mean(squares) + tf.reduce_mean(tf.square(found - taught))
        case "sum of rows":
            return tf.reduce_sum(squares, 1) / tf.cast(tf.shape(y)[0], squares.dtype)  # rows as a target
    return tf.reduce_mean(squares)


def _clip(clip: str, gradients: list[Any], loss: Any, number: int) -> list[Any]:
    match clip:
        case "norm":
            return [tf.clip_by_norm(g, 0.1) for g in gradients]
        case "global norm":
            return list(tf.clip_by_global_norm(gradients, 0.2)[0])
        case "value":
            return [tf.clip_by_value(g, -0.05, 0.05) for g in gradients]
        case "central":
            return [g - tf.reduce_mean(g, 0, keepdims=True) for g in gradients]
        case "noise":
            return [
                g + 0.01 * tf.random.stateless_normal(g.shape, [number, i], dtype=g.dtype)
                for i, g in enumerate(gradients)
            ]
        case "scaled by the loss":
            return [g / (1.0 + tf.reduce_sum(tf.stop_gradient(loss))) for g in gradients]
        case "twice":
            once = [tf.tanh(g) for g in tf.clip_by_global_norm(gradients, 0.5)[0]]
            return list(tf.clip_by_global_norm(once, 0.1)[0])
    return gradients


def make(drawn: RandomStep) -> Made:
    """Return a training step of one batch (x, y), and the objects whose variables it changes."""
    first, second, teacher = _model(1), _model(2), _model(3)
    pairs = [[OPTIMIZERS[phase.optimizer]() for _ in range(2)] for phase in drawn.phases]
    averages = {id(v): tf.Variable(v, trainable=False) for m in (first, second) for v in m.trainable_variables}
    mean, count = keras.metrics.Mean(), tf.Variable(0.0, dtype="float64", trainable=False)
    counts = tf.Variable(tf.ones([2], tf.float64), trainable=False)
    total = tf.Variable(0.0, dtype="float64", trainable=False)

    def update(phase: RandomPhase, own: list[Any], gradients: list[Any], weights: list[Any]) -> None:
        if not phase.groups:
            own[0].apply_gradients(zip(gradients, weights, strict=True))
            return
        for optimizer, kernels in zip(own, (True, False), strict=True):
            pairs_of = zip(gradients, weights, strict=True)
            optimizer.apply_gradients([(g, w) for g, w in pairs_of if (len(w.shape) == 2) == kernels])

    def follow(phase: RandomPhase, loss: Any, weights: list[Any], old: list[Any], results: list[Any]) -> None:
        for after in phase.after:
            match after:
                case "average":
                    for weight in weights:
                        averages[id(weight)].assign(0.9 * averages[id(weight)] + 0.1 * weight)
                case "teacher follows":
                    for new, weight in zip(teacher.trainable_variables, weights, strict=True):
                        new.assign(0.8 * new + 0.2 * weight)
                case "swap":
                    for weight in weights:
                        kept = tf.identity(averages[id(weight)])
                        averages[id(weight)].assign(weight)
                        weight.assign(0.5 * (weight + kept))
                case "limit":
                    norm = tf.linalg.global_norm([weight.value for weight in weights])
                    for weight in weights:
                        weight.assign(weight * tf.minimum(tf.ones_like(norm), 2.0 / norm))
                case "count":
                    count.assign_add(1.0)
                    results.append(count * tf.reduce_sum(loss))
                case "metric":
                    mean.update_state(loss)
                    results.append(mean.result())
                case "norm of new weights":
                    results.append(tf.linalg.global_norm([weight.value for weight in weights]))
                case "old weights":
                    results.append(tf.add_n([tf.reduce_sum(w * o) for w, o in zip(weights, old, strict=True)]))

    @tf.autograph.experimental.do_not_convert
    def train_step(x: Any, y: Any) -> Any:
        taught, results = teacher(x), list[Any]()
        tape, found, shared_by = tf.GradientTape(persistent=True), None, None
        for number, (phase, own) in enumerate(zip(drawn.phases, pairs, strict=True)):
            model = second if phase.of_second else first
            weights = model.trainable_variables
            shares = phase.shares and found is not None and model is shared_by
            if not shares:
                tape = tf.GradientTape(persistent=True)
            labels = tf.cast(y[:, 0] > 0, tf.int32)
            if phase.target == "counted":
                counts.scatter_add(tf.IndexedSlices(tf.ones_like(y[:, 0]), labels))
            with tape:
                if not shares:
                    found, shared_by = model(x, training=True), model
                loss = _loss(phase.target, found, y, taught)
                if phase.target == "counted":
                    loss = tf.reduce_mean(tf.reduce_sum(tf.square(found - y), 1) / tf.gather(counts, labels))
                if phase.target == "totalled":
                    total.assign(total + loss)
                if phase.target == "penalty":
                    loss += 0.01 * tf.add_n([tf.reduce_sum(tf.square(weight)) for weight in weights])
            gradients = _clip(phase.clip, tape.gradient(loss, weights), loss, number)
            old = [tf.identity(weight) for weight in weights]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
            if drawn.skips and number == 0:
                tf.cond(finite, lambda p=phase, o=own, g=gradients, w=weights: update(p, o, g, w), lambda: None)
            else:
                update(phase, own, gradients, weights)
            follow(phase, loss, weights, old, results)
            results.append(loss)
        return results

    used = [optimizer for pair in pairs for optimizer in pair]
    return train_step, [first, second, teacher, *used, *averages.values(), mean, count, counts, total]
