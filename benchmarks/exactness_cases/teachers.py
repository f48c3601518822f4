"""Distillation, teachers that follow the student, and several tasks at once."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    WIDTH,
    batches,
    cross_entropy,
    integers,
    mask,
    mlp,
    normal,
    train,
)
from benchmarks.exactness_cases.case import Case, Training

CLASSES = 3
TEMPERATURE = 2.0


def distillation(taught: Any, logits: Any) -> Any:
    """Return the cross entropy of each row with the softened teacher."""
    soft = tf.nn.softmax(tf.stop_gradient(taught) / TEMPERATURE)
    return tf.nn.softmax_cross_entropy_with_logits(soft, logits / TEMPERATURE) * TEMPERATURE**2


def teacher_of(student: Any) -> Any:
    """Return a frozen copy of a model, with the same weights."""
    teacher = keras.models.clone_model(student)
    teacher.set_weights(student.get_weights())
    teacher.trainable = False
    return teacher


def follow(teacher: Any, student: Any, rate: float) -> None:
    for old, new in zip(teacher.weights, student.weights, strict=True):
        old.assign(rate * old + (1.0 - rate) * new)


def frozen_teacher(seed: int) -> Training:
    student, teacher = mlp(CLASSES), mlp(CLASSES)
    teacher.trainable = False

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        logits = student(x, training=True)
        return tf.reduce_mean(0.3 * cross_entropy(y, logits) + 0.7 * distillation(teacher(x), logits))

    return train(student, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))


def mean_teacher(assign_first: bool) -> Any:
    """Return the ``make`` of a teacher whose weights are a moving average of the student's, assigned in the loss."""

    def make(seed: int) -> Training:
        student = mlp(CLASSES)
        teacher = teacher_of(student)

        @tf.function
        def loss_fn(x: Any, y: Any) -> Any:
            if assign_first:
                follow(teacher, student, 0.9)
            logits = student(x, training=True)
            loss = tf.reduce_mean(cross_entropy(y, logits) + distillation(teacher(x), logits))
            if not assign_first:
                follow(teacher, student, 0.9)
            return loss

        return train(student, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))

    return make


def byol(seed: int) -> Training:
    """Two views, a predictor, and a target network that follows the online one."""
    online = mlp(WIDTH)
    target = teacher_of(online)
    predictor = mlp(WIDTH, features=WIDTH, layers=1)

    @tf.function
    def loss_fn(a: Any, b: Any) -> Any:
        def one_way(first: Any, second: Any) -> Any:
            predicted = tf.math.l2_normalize(predictor(online(first)), 1)
            wanted = tf.stop_gradient(tf.math.l2_normalize(target(second), 1))
            return 2.0 - 2.0 * tf.reduce_sum(predicted * wanted, 1)

        loss = tf.reduce_mean(one_way(a, b) + one_way(b, a))
        follow(target, online, 0.95)
        return loss

    data = batches(seed, normal(FEATURES), normal(FEATURES))
    return train(online, loss_fn, data, extra=predictor.trainable_variables)


def confident_samples(seed: int) -> Training:
    """FixMatch: only rows on which the model is confident count, by the size of the batch."""
    model = mlp(CLASSES)

    @tf.function
    def loss_fn(x: Any, strong: Any, y: Any) -> Any:
        guess = tf.stop_gradient(tf.nn.softmax(model(x)))
        sure = tf.cast(tf.reduce_max(guess, 1) > 0.4, x.dtype)
        losses = cross_entropy(tf.argmax(guess, 1), model(strong)) * sure
        return tf.reduce_mean(cross_entropy(y, model(x))) + tf.reduce_mean(losses)

    return train(model, loss_fn, batches(seed, normal(FEATURES), normal(FEATURES), integers(CLASSES)))


# --- several tasks


def two_heads() -> Any:
    x = entry = keras.Input((FEATURES,))
    for _ in range(3):
        x = keras.layers.Dense(WIDTH, "tanh")(x)
    return keras.Model(entry, [keras.layers.Dense(CLASSES)(x), keras.layers.Dense(1)(x)])


def multi_task(seed: int) -> Training:
    model = two_heads()

    @tf.function
    def loss_fn(x: Any, y: Any, z: Any) -> Any:
        classes, value = model(x, training=True)
        return tf.reduce_mean(cross_entropy(y, classes)) + 0.5 * tf.reduce_mean(tf.square(value - z))

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), normal(1)))


def uncertainty(seed: int) -> Training:
    """Each task's loss is weighted by a trained variance."""
    model = two_heads()
    spread = [tf.Variable(tf.zeros((), keras.config.floatx()), name=f"log_variance_{i}") for i in range(2)]

    @tf.function
    def loss_fn(x: Any, y: Any, z: Any) -> Any:
        classes, value = model(x, training=True)
        losses = tf.reduce_mean(cross_entropy(y, classes)), tf.reduce_mean(tf.square(value - z))
        return tf.add_n([tf.exp(-s) * loss + 0.5 * s for s, loss in zip(spread, losses, strict=True)])

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), normal(1)), extra=spread)


def partly_labelled(seed: int) -> Training:
    """Each task has labels for some samples only, and is divided by their number."""
    model = two_heads()

    @tf.function
    def loss_fn(x: Any, y: Any, has_y: Any, z: Any, has_z: Any) -> Any:
        classes, value = model(x, training=True)
        first = tf.reduce_sum(cross_entropy(y, classes) * has_y) / tf.reduce_sum(has_y)
        second = tf.reduce_sum(tf.square(value - z)[:, 0] * has_z) / tf.reduce_sum(has_z)
        return first + 0.1 * second

    columns = (normal(FEATURES), integers(CLASSES), mask(), normal(1), mask())
    return train(model, loss_fn, batches(seed, *columns))


def compiled_multi_task(seed: int) -> Training:
    """The weighted losses of a compiled Keras model with two outputs."""
    model = two_heads()
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.losses.Huber()]
    model.compile(loss=losses, loss_weights=[1.0, 0.3])

    @tf.function
    def loss_fn(x: Any, y: Any, z: Any) -> Any:
        return model.compute_loss(x, [y, z], model(x, training=True))

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), normal(1)))


def deep_supervision(seed: int) -> Training:
    """A loss at every depth, which stages other than the last compute."""
    x = entry = keras.Input((FEATURES,))
    heads = []
    for _ in range(3):
        x = keras.layers.Dense(WIDTH, "tanh")(x)
        heads.append(keras.layers.Dense(CLASSES)(x))
    model = keras.Model(entry, heads)

    @tf.function
    def loss_fn(x: Any, y: Any, keep: Any) -> Any:
        losses = [tf.reduce_sum(cross_entropy(y, logits) * keep) for logits in model(x, training=True)]
        return tf.add_n(losses) / tf.reduce_sum(keep)

    return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), mask()))


CASES = (
    Case("distillation_frozen_teacher", "teachers", frozen_teacher),
    Case("distillation_ema_teacher", "teachers", mean_teacher(assign_first=False)),
    Case("distillation_ema_teacher_assigned_first", "teachers", mean_teacher(assign_first=True)),
    Case("byol", "teachers", byol),
    Case("confident_samples", "teachers", confident_samples),
    Case("multi_task", "tasks", multi_task),
    Case("multi_task_uncertainty", "tasks", uncertainty),
    Case("multi_task_partly_labelled", "tasks", partly_labelled),
    Case("multi_task_compiled", "tasks", compiled_multi_task),
    Case("deep_supervision", "tasks", deep_supervision),
)
