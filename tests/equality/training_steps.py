"""Training steps as users write them, each with the variables that it changes.

A case is a function without arguments that makes everything anew, from the same seed: it returns the step and the
variables. All is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Made = tuple[Callable[..., Any], list[Any]]
"""A training step, and the objects that hold the variables it changes: models, optimizers, metrics, variables."""

BATCH = 12


def regression(steps: int = 3) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(1)
    return [(tf.constant(rng.normal(size=(BATCH, 4))), tf.constant(rng.normal(size=(BATCH, 1)))) for _ in range(steps)]


def tokens(steps: int = 3) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(2)
    made = []
    for _ in range(steps):
        words = rng.integers(0, 9, size=(BATCH, 5))
        made.append((tf.constant(words), tf.constant(rng.integers(0, 3, size=BATCH))))
    return made


def mlp(outputs: int = 1) -> keras.Model:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(outputs)]
    return keras.Sequential([keras.Input([4]), *layers])


def word_model() -> keras.Model:
    keras.utils.set_random_seed(8)
    inputs = keras.Input([5], dtype="int64")
    embedded = keras.layers.Embedding(9, 4)(inputs)
    hidden = keras.layers.Dense(6, "tanh")(keras.layers.Flatten()(embedded))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(5, "tanh")(hidden)))


def mse(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p))


# --- What the tutorials teach


def tutorial() -> Made:
    model, optimizer = mlp(), keras.optimizers.Adam(0.01)
    loss_object = keras.losses.MeanSquaredError()
    train_loss = keras.metrics.Mean()
    error = keras.metrics.MeanAbsoluteError()

    @tf.function
    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = loss_object(y, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        train_loss(loss)
        error(y, predictions)

    return train_step, [model, optimizer, train_loss, error]


def metrics_and_clipping() -> Made:
    model, optimizer, metric = mlp(), keras.optimizers.Adam(0.05), keras.metrics.RootMeanSquaredError()

    def train_step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = mse(y, predictions)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.3)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        metric.update_state(y, predictions)
        return {
            "loss": loss,
            "norm": norm,
            "root": tf.sqrt(loss),
            metric.name: metric.result(),
            "steps": optimizer.iterations,
            "rate": optimizer.learning_rate,
            "rows": (predictions, tf.argmax(predictions, 1)),
        }

    return train_step, [model, optimizer, metric]


def accuracy_of_words() -> Made:
    model, optimizer = word_model(), keras.optimizers.Adam(0.01)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_object(y, logits)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        accuracy.update_state(y, logits)
        return loss, accuracy.result()

    return train_step, [model, optimizer, accuracy]


def own_sgd() -> Made:
    rng = np.random.default_rng(3)
    weights = [tf.Variable(rng.normal(size=shape), name=f"w{i}") for i, shape in enumerate([(4, 5), (5, 3), (3, 1)])]
    speeds = [tf.Variable(tf.zeros_like(weight), trainable=False, name="speed") for weight in weights]

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights[:-1]:
                x = tf.tanh(x @ weight)
            loss = mse(y, x @ weights[-1])
        for weight, speed, gradient in zip(weights, speeds, tape.gradient(loss, weights)):
            speed.assign(0.9 * speed + gradient)
            weight.assign_sub(0.1 * speed)
        return loss

    return train_step, [*weights, *speeds]


def weight_decay_and_average() -> Made:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)
    averages = [tf.Variable(weight, trainable=False) for weight in model.trainable_variables]

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        variables = model.trainable_variables
        gradients = [g + 0.01 * v.value for g, v in zip(tape.gradient(loss, variables), variables)]
        optimizer.apply_gradients(zip(gradients, variables))
        for average, weight in zip(averages, model.trainable_variables):
            average.assign(0.9 * average + 0.1 * weight)
        return loss

    return train_step, [model, optimizer, *averages]


def clipped_weights() -> Made:
    """The weights are clipped after the update; the score is not returned.

    TensorFlow itself returns a score of clipped weights now and then: it clips them before it has computed the score.
    """
    model, optimizer = mlp(), keras.optimizers.RMSprop(0.05)

    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            score = tf.reduce_mean(model(x) * y)
        optimizer.apply_gradients(zip(tape.gradient(score, model.trainable_variables), model.trainable_variables))
        for weight in model.trainable_variables:
            weight.assign(tf.clip_by_value(weight, -0.3, 0.3))

    return train_step, [model, optimizer]


def two_optimizers() -> Made:
    model = mlp()
    slow, fast = keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.Adam(0.05)
    body = [v for layer in model.layers[:-1] for v in layer.trainable_variables]
    head = model.layers[-1].trainable_variables

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        of_body, of_head = tape.gradient(loss, (body, head))
        slow.apply_gradients(zip(of_body, body))
        fast.apply_gradients(zip(of_head, head))
        return {"loss": loss}

    return train_step, [model, slow, fast]


def loss_scale() -> Made:
    model, optimizer = mlp(), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.02), dynamic_growth_steps=2)

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return train_step, [model, optimizer]


# --- Tapes


def persistent_tape() -> Made:
    model, one, other = mlp(), keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.02)
    first, rest = model.layers[0].trainable_variables, [v for m in model.layers[1:] for v in m.trainable_variables]

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = mse(y, model(x, training=True))
        one.apply_gradients(zip(tape.gradient(loss, first), first))
        other.apply_gradients(zip(tape.gradient(loss, rest), rest))
        del tape
        return loss

    return train_step, [model, one, other]


def watched_alone() -> Made:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)

    def train_step(x: Any, y: Any) -> Any:
        head = model.layers[-1].trainable_variables
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([v.value for v in head])
            loss = mse(y, model(x, training=True))
        variables = [v.value for v in model.trainable_variables]
        gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return train_step, [model, optimizer]


def unused_gradients() -> Made:
    """Gradients are taken of all variables, one of which the loss does not use, and only some are applied."""
    model, optimizer, unused = mlp(), keras.optimizers.SGD(0.1), tf.Variable(1.0)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        gradients = tape.gradient(loss, {"model": model.trainable_variables, "unused": unused})
        assert gradients["unused"] is None
        pairs = list(zip(gradients["model"], model.trainable_variables))
        optimizer.apply_gradients(pairs[1:3])
        return loss

    return train_step, [model, optimizer]


def rows_as_target() -> Made:
    model, optimizer = mlp(), keras.optimizers.SGD(0.01)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(y - model(x, training=True)), 1)
        gradients = tape.gradient(losses, model.trainable_variables, output_gradients=tf.ones_like(losses) / 2)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return losses

    return train_step, [model, optimizer]


def two_terms_as_targets() -> Made:
    model, optimizer = mlp(), keras.optimizers.SGD(0.01)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            decay = 0.01 * tf.add_n([tf.nn.l2_loss(v.value) for v in model.trainable_variables])
        gradients = tape.gradient([loss, decay], model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss, decay

    return train_step, [model, optimizer]


def teacher_outside_the_tape() -> Made:
    teacher, student, optimizer = mlp(3), mlp(3), keras.optimizers.Adam(0.01)

    def train_step(x: Any, y: Any) -> Any:
        wanted = tf.nn.softmax(teacher(x, training=False) / 2)
        with tf.GradientTape() as tape:
            found = student(x, training=True)
            loss = tf.reduce_mean(keras.losses.kl_divergence(wanted, tf.nn.softmax(found / 2)))
            loss += 0.1 * mse(y, tf.reduce_sum(found, 1, keepdims=True))
        gradients = tape.gradient(loss, student.trainable_variables)
        optimizer.apply_gradients(zip(gradients, student.trainable_variables))
        return loss

    return train_step, [teacher, student, optimizer]


def stopped_recording() -> Made:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)

    def train_step(x: Any, y: Any) -> Any:
        before = model.layers[0](x)  # not recorded: no gradient passes through it
        with tf.GradientTape() as tape:
            hidden = model.layers[1](before + model.layers[0](x))
            with tape.stop_recording():
                weight = tf.sigmoid(model.layers[1](before))
            loss = mse(y, model.layers[2](hidden * weight))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return train_step, [model, optimizer]


def gradient_penalty() -> Made:
    model, optimizer = mlp(), keras.optimizers.Adam(0.01)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = model(x, training=True)
            slope = inner.gradient(score, x)
            penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1))
            loss = mse(y, score) + 0.1 * penalty
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss, penalty

    return train_step, [model, optimizer]


def inputs_changed_by_a_keras_loss() -> Made:
    """Keras divides the sum over samples by their number: so is the gradient of the inputs."""
    model, optimizer, loss_object = mlp(), keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError()

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_object(y, model(x, training=True))
        changed = x + tape.gradient(loss, x)
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(changed, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return train_step, [model, optimizer]


# --- What comes after the gradients


def finite_or_skipped() -> Made:
    model, optimizer, skipped = mlp(), keras.optimizers.Adam(0.05), tf.Variable(0)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        if tf.linalg.global_norm(gradients) < 1.2:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        else:
            skipped.assign_add(1)
        return loss

    return train_step, [model, optimizer, skipped]


def centred_and_noisy() -> Made:
    model, optimizer, seed = mlp(), keras.optimizers.SGD(0.1), tf.Variable(5, dtype=tf.int64)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        changed = []
        for i, gradient in enumerate(tape.gradient(loss, model.trainable_variables)):
            if gradient.shape.rank > 1:
                gradient -= tf.reduce_mean(gradient, 0, keepdims=True)
            gradient += 0.01 * tf.random.stateless_normal(gradient.shape, [seed, i], dtype=gradient.dtype)
            changed.append(gradient)
        optimizer.apply_gradients(zip(changed, model.trainable_variables))
        seed.assign_add(1)
        return loss

    return train_step, [model, optimizer, seed]


def accumulated_by_hand() -> Made:
    model, optimizer, count = mlp(), keras.optimizers.SGD(0.1), tf.Variable(0)
    sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in model.trainable_variables]

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        for total, gradient in zip(sums, tape.gradient(loss, model.trainable_variables)):
            total.assign_add(gradient / 2)
        count.assign_add(1)
        if count % 2 == 0:
            optimizer.apply_gradients(zip(sums, model.trainable_variables))
            for total in sums:
                total.assign(tf.zeros_like(total))
        return loss

    return train_step, [model, optimizer, count, *sums]


def adaptive_clipping() -> Made:
    model, optimizer = mlp(), keras.optimizers.Adam(0.05)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        variables = model.trainable_variables
        gradients = []
        for gradient, variable in zip(tape.gradient(loss, variables), variables):
            limit = 0.1 * tf.maximum(tf.norm(variable.value), 1e-3)
            gradients.append(tf.where(tf.norm(gradient) > limit, gradient * limit / tf.norm(gradient), gradient))
        optimizer.apply_gradients(zip(gradients, variables))
        return loss, tf.norm(gradients[0])

    return train_step, [model, optimizer]


def schedule_by_hand() -> Made:
    """The weight of a term and the learning rate depend on a counter, which the step itself counts."""
    model, optimizer, step = mlp(), keras.optimizers.SGD(0.1), tf.Variable(0, dtype=tf.int64)

    def train_step(x: Any, y: Any) -> Any:
        step.assign_add(1)
        now = tf.cast(step, tf.float64)
        optimizer.learning_rate.assign(0.1 / now)
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = mse(y, found) + tf.minimum(tf.constant(1, tf.float64), now / 10) * tf.reduce_mean(tf.abs(found))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss, now

    return train_step, [model, optimizer, step]


def running_loss() -> Made:
    """The loss is divided by its running mean, which is written inside of the tape."""
    model, optimizer, mean = mlp(), keras.optimizers.SGD(0.1), tf.Variable(1.0, dtype=tf.float64, trainable=False)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            target = loss / mean
            mean.assign(0.9 * mean + 0.1 * loss)
        gradients = tape.gradient(target, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return target, mean

    return train_step, [model, optimizer, mean]


def masked_mean() -> Made:
    model, optimizer, metric = mlp(), keras.optimizers.SGD(0.1), keras.metrics.Mean()

    def train_step(x: Any, y: Any) -> Any:
        mask = tf.cast(y > 0, tf.float64)
        with tf.GradientTape() as tape:
            errors = tf.square(y - model(x, training=True)) * mask
            loss = tf.reduce_sum(errors) / tf.reduce_sum(mask)
            metric.update_state(errors, sample_weight=mask)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss, metric.result(), tf.reduce_sum(mask)

    return train_step, [model, optimizer, metric]


def dropout_and_regularizer() -> Made:
    keras.utils.set_random_seed(9)
    model = keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.Dense(6, "relu", kernel_regularizer="l2"),
            keras.layers.Dropout(0.3, seed=4),
            keras.layers.Dense(5, "relu", activity_regularizer=lambda x: 0.01 * tf.reduce_sum(tf.abs(x))),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True)) + tf.add_n(model.losses)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return train_step, [model, optimizer]


def sparse_gradients_clipped() -> Made:
    model, optimizer = word_model(), keras.optimizers.SGD(0.1, momentum=0.9)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss, norm

    return train_step, [model, optimizer]


def gradients_returned() -> Made:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return gradients, [tf.norm(g) for g in gradients], model.layers[0].kernel

    return train_step, [model, optimizer]


class HalfSteps(keras.optimizers.Adam):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars])

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(tf.sign(gradient), variable, learning_rate)


def own_optimizer() -> Made:
    model, optimizer = mlp(), HalfSteps(0.05, global_clipnorm=0.3, weight_decay=0.01, use_ema=True)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return train_step, [model, optimizer]


@tf.custom_gradient
def without_gradient(x: Any) -> Any:
    """Return x; no gradient passes through it, which only its gradient function tells."""
    return tf.identity(x), lambda upstream: None


def unexpected_gradients() -> Made:
    """One variable has no gradient, and one, of which columns are gathered, a dense one."""
    rng = np.random.default_rng(5)
    table, head, other = (tf.Variable(rng.normal(size=shape)) for shape in [(4, 6), (4, 1), (4, 1)])

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ tf.gather(table, [0, 2, 2, 5], axis=1))
            loss = mse(y, hidden @ head + x @ without_gradient(other))
        gradients = tape.gradient(loss, [table, head, other])
        for variable, gradient in zip([table, head, other], gradients):
            if gradient is None:
                variable.assign_add(tf.ones_like(variable))
            else:
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return train_step, [table, head, other]


def average_of_batch_norm() -> Made:
    """An average over all variables of a model, also over the moving statistics that its loss writes."""
    keras.utils.set_random_seed(11)
    layers = [keras.layers.Dense(5, use_bias=False), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model, optimizer = keras.Sequential([keras.Input([4]), *layers]), keras.optimizers.SGD(0.1)
    averages = [tf.Variable(variable, trainable=False) for variable in model.variables]

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        for average, variable in zip(averages, model.variables):
            average.assign(0.9 * average + 0.1 * variable)
        return loss

    return train_step, [model, optimizer, *averages]


def nested_arguments() -> Made:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)

    def train_step(batch: Mapping[str, Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(batch["y"], model(batch["x"], training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return [loss, None, {"size": tf.shape(batch["x"])[0]}]

    return train_step, [model, optimizer]


def minimized_by_tensorflow_1() -> Made:
    model, optimizer = mlp(), tf.compat.v1.train.GradientDescentOptimizer(0.1)
    variables = [v.value for v in model.trainable_variables]

    def train_step(x: Any, y: Any) -> Any:
        optimizer.minimize(lambda: mse(y, model(x, training=True)), var_list=variables)

    return train_step, [model]


def computed_by_tensorflow_1() -> Made:
    model, optimizer = mlp(), tf.compat.v1.train.GradientDescentOptimizer(0.1)
    variables = [v.value for v in model.trainable_variables]

    def train_step(x: Any, y: Any) -> Any:
        pairs = optimizer.compute_gradients(lambda: mse(y, model(x, training=True)), variables)
        optimizer.apply_gradients([(2 * g, v) for g, v in pairs])

    return train_step, [model]


# --- What follows weights of other stages


def mean_teacher() -> Made:
    """A teacher outside of the tape whose weights follow the student's, at a rate that the step counts."""
    student, teacher = mlp(), mlp()
    optimizer, count = keras.optimizers.Adam(0.01), tf.Variable(0.0, dtype="float64", trainable=False)

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        wanted = teacher(x + 0.1)
        with tf.GradientTape() as tape:
            found = student(x, training=True)
            loss = mse(y, found) + 0.3 * mse(wanted, found)
        optimizer.apply_gradients(zip(tape.gradient(loss, student.trainable_variables), student.trainable_variables))
        count.assign_add(1.0)
        rate = 1.0 / (count + 1.0)
        for old, new in zip(teacher.variables, student.variables):
            old.assign((1.0 - rate) * old + rate * new)
        return loss

    return train_step, [student, teacher, optimizer, count]


def target_network() -> Made:
    """A network that takes over the weights of another one every second step."""
    network, target = mlp(2), mlp(2)
    optimizer, count = keras.optimizers.RMSprop(0.01), tf.Variable(0, dtype="int64", trainable=False)

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        best = tf.reduce_max(target(-x), axis=1)
        with tf.GradientTape() as tape:
            error = y[:, 0] + 0.9 * best - network(x)[:, 0]
            loss = tf.reduce_mean(tf.square(error))
        optimizer.apply_gradients(zip(tape.gradient(loss, network.trainable_variables), network.trainable_variables))
        count.assign_add(1)
        if count % 2 == 0:
            for old, new in zip(target.variables, network.variables):
                old.assign(new)
        return loss, tf.abs(error)

    return train_step, [network, target, optimizer, count]


def norms_of_new_weights() -> Made:
    """Norms of all weights after their update, in results, a metric, and a limit of all weights."""
    model, optimizer, largest = mlp(), keras.optimizers.SGD(0.1, momentum=0.9), keras.metrics.Mean()

    def train_step(x: Any, y: Any) -> Any:
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        old = [tf.identity(weight) for weight in weights]
        gradients, first = tf.clip_by_global_norm(tape.gradient(loss, weights), 1.0)
        gradients, second = tf.clip_by_global_norm([tf.sign(g) * tf.sqrt(tf.abs(g)) for g in gradients], 0.5)
        optimizer.apply_gradients(zip(gradients, weights))
        moved = tf.linalg.global_norm([new - before for new, before in zip(weights, old)])
        norm = tf.linalg.global_norm([weight.value for weight in weights])
        for weight in weights:
            weight.assign(weight * tf.minimum(tf.ones_like(norm), 2.0 / norm))
        for weight in weights:
            largest.update_state(tf.reduce_max(tf.abs(weight)))
        return {"norms": (first, second, norm, moved), "largest": largest.result()}

    return train_step, [model, optimizer, largest]


def forward_with_new_weights() -> Made:
    """A step that returns the model's outputs for the batch after the update."""
    model, optimizer = mlp(), keras.optimizers.Adam(0.05)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = mse(y, found)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss, mse(y, model(x)) - loss

    return train_step, [model, optimizer]


def results_of_conditions() -> Made:
    """A condition that writes and returns, and one inside of it."""
    model, optimizer = mlp(), keras.optimizers.Adam(0.01)
    scale, skipped = (tf.Variable(v, dtype="float64", trainable=False) for v in (8.0, 0.0))

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True)) * scale
        gradients = [gradient / scale for gradient in tape.gradient(loss, model.trainable_variables)]
        norm = tf.linalg.global_norm(gradients)

        def apply() -> Any:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            grown = tf.cond(norm < 0.3, lambda: scale.assign(scale * 2.0) * 1.0, lambda: tf.constant(1.0, tf.float64))
            return tf.constant(True), norm, grown

        def skip() -> Any:
            skipped.assign_add(1.0)
            return tf.constant(False), 2.0 * skipped, tf.constant(0.0, tf.float64)

        return tf.cond(norm < 1.0, apply, skip)

    return train_step, [model, optimizer, scale, skipped]


def loops_over_words() -> Made:
    """Recurrent layers with masks: a loop over the words of a sentence."""
    keras.utils.set_random_seed(8)
    inputs = keras.Input([None], dtype="int64")
    embedded = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = keras.layers.LSTM(4)(keras.layers.GRU(5, return_sequences=True)(embedded))
    model, optimizer = keras.Model(inputs, keras.layers.Dense(3)(hidden)), keras.optimizers.Adam(0.01)

    def train_step(words: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            found = model(words, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, found)
            loss = tf.reduce_mean(tf.map_fn(tf.square, losses))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return train_step, [model, optimizer]


def gradients_by_a_function() -> Made:
    """Loss and gradients are those of a tf.function that the step calls, in which AutoGraph converts a condition."""
    model, optimizer, steps = mlp(), keras.optimizers.Adam(0.02), tf.Variable(0, trainable=False)

    @tf.function
    def loss_and_gradients(x: Any, y: Any) -> Any:
        scale = tf.ones([], x.dtype)
        if steps > 1:
            scale = scale / 2
        with tf.GradientTape() as tape:
            loss = scale * mse(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def update(gradients: Any, *, limit: float) -> Any:
        gradients, norm = tf.clip_by_global_norm(gradients, limit)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return norm

    def train_step(x: Any, y: Any) -> Any:
        loss, gradients = loss_and_gradients(x, y)
        norm = update(gradients, limit=0.5)
        steps.assign_add(1)
        return loss, norm

    return train_step, [model, optimizer, steps]


def sums_by_label() -> Made:
    """Rows of the batch are added to those of a variable, by their labels."""
    model, optimizer = word_model(), keras.optimizers.Adam(0.01)
    sums = tf.Variable(tf.zeros([3, 3], tf.float64), trainable=False)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits + tf.gather(sums, y))
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        sums.scatter_nd_add(y[:, None], 0.1 * tf.nn.softmax(logits))
        return loss

    return train_step, [model, optimizer, sums]


def variances_of_weights() -> Made:
    """Averages of weights and of their squares, by a counter; the sum of all variances of the new ones is returned."""
    model, optimizer = mlp(), keras.optimizers.SGD(0.1, momentum=0.9)
    means = [tf.Variable(weight, trainable=False) for weight in model.trainable_variables]
    squares = [tf.Variable(tf.square(weight), trainable=False) for weight in model.trainable_variables]
    count = tf.Variable(1.0, dtype=tf.float64, trainable=False)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        for mean, square, weight in zip(means, squares, model.trainable_variables):
            mean.assign((count * mean + weight) / (count + 1))
            square.assign((count * square + tf.square(weight)) / (count + 1))
        count.assign_add(1)
        return loss, tf.add_n([tf.reduce_sum(s - tf.square(m)) for m, s in zip(means, squares)])

    return train_step, [model, optimizer, *means, *squares, count]


# --- What a custom gradient uses, and the number of samples


@tf.custom_gradient
def squashed(x: Any) -> Any:
    """Forward does not need the slope."""
    y = tf.tanh(x)
    slope = 1 - tf.square(y)
    return y, lambda gradient: gradient * slope


def slope_for_the_gradient() -> Made:
    """In both of two phases."""
    body, head = mlp(outputs=4), keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)]

    def train_step(x: Any, y: Any) -> Any:
        losses = []
        for optimizer, model in zip(optimizers, (body, head)):
            with tf.GradientTape() as tape:
                loss = mse(y, head(squashed(body(x, training=True))))
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            losses.append(loss)
        return losses

    return train_step, [body, head, *optimizers]


def reversed_gradients() -> Made:
    """Domain adaptation by gradient reversal: a factor, which only the custom gradient reads, grows each step."""
    body, domain = mlp(outputs=3), keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    factor = tf.Variable(0.5, dtype=tf.float64, trainable=False)
    widths, limits = tf.constant([1.0, 0.5, 0.25], tf.float64), tf.ones([200, 3], tf.float64)

    @tf.custom_gradient
    def reverse(x: Any) -> Any:
        return tf.identity(x), lambda gradient: -factor * gradient * widths * tf.reduce_mean(limits, axis=0)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = body(x, training=True)
            loss = mse(y, hidden[:, :1]) + mse(tf.cast(x[:, :1] > 0, x.dtype), domain(reverse(hidden), training=True))
        weights = body.trainable_weights + domain.trainable_weights
        optimizer.apply(tape.gradient(loss, weights), weights)
        factor.assign(1 - (1 - factor) * 0.9)
        return loss

    return train_step, [body, domain, optimizer, factor]


def reversed_by_a_schedule() -> Made:
    """The factor is set before the loss, which reads it for its gradient alone."""
    body, domain = mlp(outputs=3), keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    steps = tf.Variable(0.0, dtype=tf.float64, trainable=False)
    factor = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def reverse(x: Any) -> Any:
        now = tf.identity(factor)
        return tf.custom_gradient(lambda x: (tf.identity(x), lambda gradient: -now * gradient))(x)

    def train_step(x: Any, y: Any) -> Any:
        factor.assign(tf.tanh(steps.assign_add(0.3)))
        with tf.GradientTape() as tape:
            hidden = body(x, training=True)
            loss = mse(y, hidden[:, :1]) + mse(tf.cast(x[:, :1] > 0, x.dtype), domain(reverse(hidden), training=True))
        weights = body.trainable_weights + domain.trainable_weights
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return train_step, [body, domain, optimizer, steps, factor]


def normalised_by_all_inputs() -> Made:
    """Inputs are normalised by the mean and variance of all inputs so far, joined as Chan et al. do."""
    model, optimizer = mlp(), keras.optimizers.Adam(0.01)
    mean = tf.Variable(tf.zeros([4], tf.float64), trainable=False)
    variance = tf.Variable(tf.ones([4], tf.float64), trainable=False)
    count = tf.Variable(0.01, dtype=tf.float64, trainable=False)

    def train_step(x: Any, y: Any) -> Any:
        samples = tf.cast(tf.shape(x)[0], x.dtype)
        total, difference = count + samples, tf.reduce_mean(x, axis=0) - mean
        moment = variance * count + tf.math.reduce_variance(x, axis=0) * samples
        moment += tf.square(difference) * count * samples / total
        mean.assign_add(difference * samples / total)
        variance.assign(moment / total)
        count.assign(total)
        with tf.GradientTape() as tape:
            loss = mse(y, model((x - mean) / tf.sqrt(variance), training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return loss, count, samples, samples + 1

    return train_step, [model, optimizer, mean, variance, count]


def counted_before_the_loss() -> Made:
    """Rows of the batch are counted by word, and kept in a ring of the last inputs, before the loss reads both."""
    model, optimizer = word_model(), keras.optimizers.Adam(0.01)
    counts = tf.Variable(tf.ones([3], tf.float64), trainable=False)
    ring = tf.Variable(tf.zeros([20, 5], tf.int64), trainable=False)
    place = tf.Variable(0, trainable=False)

    def train_step(x: Any, y: Any) -> Any:
        samples, old = tf.shape(x)[0], tf.gather(counts, y)
        counts.scatter_add(tf.IndexedSlices(tf.ones_like(y, tf.float64), y))
        ring.scatter_nd_update(((place + tf.range(samples)) % 20)[:, tf.newaxis], x)
        place.assign((place + samples) % 20)
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
            loss = tf.reduce_mean(losses * old / tf.gather(counts, y)) + 0.1 * tf.reduce_mean(model(ring) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return loss, old

    return train_step, [model, optimizer, counts, ring, place]


def hardest_samples() -> Made:
    """Samples of small weight are left out, and the step returns the hardest ones: more than a micro-batch has."""
    model, optimizer = mlp(), keras.optimizers.Adam(0.01)

    def train_step(x: Any, y: Any) -> Any:
        least = tf.math.top_k(x[:, 0], 7).values[-1]
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum(tf.square(model(x, training=True) - y), axis=1)
            loss = tf.reduce_mean(tf.where(x[:, 0] >= least, errors, tf.zeros_like(errors)))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return loss, tf.math.top_k(errors, 8), tf.gather(x, tf.argsort(errors)[-5:])

    return train_step, [model, optimizer]


class Observed(keras.layers.Layer):
    """Centres by a running mean, and keeps the range and the mean size of its inputs, as for a quantization."""

    def build(self, shape: Any) -> None:
        """Make the statistics."""
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False, name="largest")
        self.sizes = keras.metrics.Mean(name="sizes")

    def call(self, x: Any, training: bool = False) -> Any:
        """Centre the inputs by the mean of the steps before."""
        if training:
            self.sizes.update_state(tf.abs(x))
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x)))
        centred = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, axis=0))
        return centred


def statistics_of_layers() -> Made:
    """Layers keep statistics of what they get."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, "tanh"), Observed(), keras.layers.Dense(5, "tanh"), Observed()]
    model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    observed = [layer for layer in layers if isinstance(layer, Observed)]

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return loss, [layer.sizes.result() for layer in observed]

    return train_step, [model, optimizer, *(layer.sizes for layer in observed)]


def spectral_norms_called_twice() -> Made:
    """The critic of an SNGAN: its call for generated rows goes on with the weights that the one for real rows left."""
    keras.utils.set_random_seed(14)
    normalised = keras.layers.SpectralNormalization
    layers = [normalised(keras.layers.Dense(6, "relu")), normalised(keras.layers.Dense(1))]
    critic, optimizer = keras.Sequential([keras.Input([4]), *layers]), keras.optimizers.Adam(0.02)
    generator = keras.Sequential([keras.Input([1]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(4)])

    def train_step(x: Any, noise: Any) -> Any:
        with tf.GradientTape() as tape:
            real, generated = critic(x, training=True), critic(generator(noise), training=True)
            loss = tf.reduce_mean(tf.nn.relu(1 - real)) + tf.reduce_mean(tf.nn.relu(1 + generated))
        optimizer.apply(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)
        return loss

    return train_step, [critic, optimizer]


CASES: Mapping[str, Callable[[], Made]] = MappingProxyType(
    {
        made.__name__: made
        for made in (
            tutorial,
            metrics_and_clipping,
            accuracy_of_words,
            own_sgd,
            weight_decay_and_average,
            clipped_weights,
            two_optimizers,
            loss_scale,
            persistent_tape,
            watched_alone,
            unused_gradients,
            rows_as_target,
            two_terms_as_targets,
            teacher_outside_the_tape,
            stopped_recording,
            gradient_penalty,
            inputs_changed_by_a_keras_loss,
            finite_or_skipped,
            centred_and_noisy,
            accumulated_by_hand,
            adaptive_clipping,
            schedule_by_hand,
            running_loss,
            masked_mean,
            dropout_and_regularizer,
            sparse_gradients_clipped,
            gradients_returned,
            own_optimizer,
            unexpected_gradients,
            nested_arguments,
            minimized_by_tensorflow_1,
            computed_by_tensorflow_1,
            mean_teacher,
            target_network,
            norms_of_new_weights,
            forward_with_new_weights,
            results_of_conditions,
            loops_over_words,
            gradients_by_a_function,
            sums_by_label,
            variances_of_weights,
            slope_for_the_gradient,
            reversed_gradients,
            reversed_by_a_schedule,
            normalised_by_all_inputs,
            counted_before_the_loss,
            hardest_samples,
            statistics_of_layers,
            spectral_norms_called_twice,
        )
    }
)

_DATA = MappingProxyType(
    dict.fromkeys(
        (
            "accuracy_of_words",
            "sparse_gradients_clipped",
            "loops_over_words",
            "sums_by_label",
            "counted_before_the_loss",
        ),
        tokens,
    )
)


def batches_of(name: str) -> list[tuple[Any, ...]]:
    """Return three batches for the case of this name."""
    made = _DATA.get(name, regression)()
    return [({"x": x, "y": y},) for x, y in made] if name == "nested_arguments" else made


def values_of(objects: list[Any]) -> list[np.ndarray]:
    """Return the values of all variables of models, optimizers, metrics and single variables."""
    found = []
    for item in objects:
        variables = item.variables if hasattr(item, "variables") else [item]
        found += [np.array(variable.numpy()) for variable in variables]
    return found
