"""Programs about how to train: averages of weights, adapters, quantisation, clipping, several tasks, callbacks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.exactness_cases.case import Expected, Training
from benchmarks.program_cases.program import BATCH, ROWS, Fit, Program, batches


def rows(number: int = ROWS, width: int = 6, seed: int = 0) -> Any:
    """Return floats [number, width]."""
    return np.random.default_rng(seed).normal(size=(number, width))


def labels(classes: int = 3, number: int = ROWS) -> Any:
    """Return classes [number]."""
    return np.arange(number) % classes


def dense(outputs: int = 3, dropout: float = 0.2) -> Any:
    """Return a network of dense layers and dropout."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu"),
            layers.Dropout(dropout),
            layers.Dense(8, "relu"),
            layers.Dense(outputs),
        ]
    )


def crossentropy() -> Any:
    """Return the loss of logits and classes."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def uncertain_tasks() -> Fit:
    """Two tasks weighted by learned uncertainties, which a last layer turns into the loss."""

    class Weighted(layers.Layer):
        def build(self, shape: Any) -> None:
            self.log_variance = self.add_weight(shape=(2,), initializer="zeros", name="log_variance")

        def call(self, inputs: Any) -> Any:
            classes, values, y_classes, y_values = inputs
            losses = ops.stack(
                [
                    ops.mean(keras.losses.sparse_categorical_crossentropy(y_classes, classes, from_logits=True)),
                    ops.mean(ops.square(values - y_values)),
                ]
            )
            self.add_loss(ops.sum(ops.exp(-self.log_variance) * losses + self.log_variance))
            return ops.concatenate([classes, values], -1)

    entry, y_classes, y_values = keras.Input((6,)), keras.Input((), dtype="int32"), keras.Input((1,))
    x = layers.Dense(8, "relu")(entry)
    heads = [layers.Dense(3)(layers.Dense(6, "relu")(x)), layers.Dense(1)(layers.Dense(6, "relu")(x))]
    model = keras.Model([entry, y_classes, y_values], Weighted()([*heads, y_classes, y_values]))
    model.compile("adam")
    inputs = ((rows(), labels().astype("int32"), rows(width=1, seed=1)),)
    return Fit(model, tf.data.Dataset.from_tensor_slices(inputs).batch(BATCH), None, {"epochs": 2})


def adversarial_training() -> Training:
    """Inputs are moved along the sign of their gradient, and both the clean and the moved ones are learned."""
    model = dense(dropout=0.0)

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            clean = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        moved = tf.stop_gradient(x + 0.1 * tf.sign(tape.gradient(clean, x)))
        hard = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(moved, training=True))
        return tf.reduce_mean(clean) + 0.5 * tf.reduce_mean(hard)

    data = batches(rows(3 * BATCH), labels(3, 3 * BATCH))
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, data)


def virtual_adversary() -> Training:
    """The direction in which an answer changes most, by one power iteration, and the divergence there."""
    model = dense(dropout=0.0)

    @tf.function
    def loss_fn(x: Any, y: Any, start: Any) -> Any:
        logits = model(x, training=True)
        chance = tf.stop_gradient(tf.nn.softmax(logits))
        with tf.GradientTape() as tape:
            step = 1e-2 * tf.math.l2_normalize(start, 1)
            tape.watch(step)
            apart = keras.losses.kl_divergence(chance, tf.nn.softmax(model(x + step, training=True)))
        worst = tf.math.l2_normalize(tf.stop_gradient(tape.gradient(apart, step)), 1)
        smooth = keras.losses.kl_divergence(chance, tf.nn.softmax(model(x + 0.5 * worst, training=True)))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)) + tf.reduce_mean(smooth)

    data = batches(rows(3 * BATCH), labels(3, 3 * BATCH), rows(3 * BATCH, seed=1))
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, data)


class Quantised(layers.Layer):
    """A dense layer whose kernel is rounded to eight bits, with the gradient of the unrounded one."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")

    def call(self, x: Any) -> Any:
        scale = ops.max(ops.abs(self.kernel)) / 127.0
        rounded = ops.round(self.kernel / scale) * scale
        kernel = self.kernel + ops.stop_gradient(rounded - self.kernel)
        step = ops.max(ops.abs(x), axis=-1, keepdims=True) / 127.0 + 1e-9
        x = x + ops.stop_gradient(ops.round(x / step) * step - x)
        return ops.matmul(x, kernel) + self.bias


def aware_of_quantisation() -> Fit:
    """Quantisation in training by straight-through gradients, of weights by their range, of inputs row by row."""
    model = keras.Sequential([keras.Input((6,)), Quantised(8), layers.ReLU(), layers.Dropout(0.1), Quantised(3)])
    model.compile(keras.optimizers.Adam(0.01), crossentropy(), metrics=["accuracy"])
    return Fit(model, rows(), labels(), {"batch_size": BATCH, "epochs": 2})


def fake_quantisation() -> Training:
    """TensorFlow's own fake quantisation with learned ranges, in single precision."""
    rng = np.random.default_rng(0)
    kernel = tf.Variable(rng.normal(size=(6, 8)).astype("float32"), name="kernel")
    head = tf.Variable(rng.normal(size=(8, 1)).astype("float32"), name="head")
    low, high = (tf.Variable(np.float32(value), name=name) for value, name in ((-3.0, "low"), (3.0, "high")))

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        h = tf.quantization.fake_quant_with_min_max_vars(tf.matmul(x, kernel), low, high, num_bits=4)
        return tf.reduce_mean(tf.square(tf.nn.relu(h) @ head - y))

    data = batches(rows(3 * BATCH).astype("float32"), rows(3 * BATCH, 1, 1).astype("float32"))
    return Training(loss_fn, keras.optimizers.SGD(0.01), [kernel, head, low, high], data)


class Clipped(keras.Model):
    """Differential privacy: each sample's gradient is clipped and noise added, in a training step of its own."""

    def train_step(self, data: Any) -> Any:
        x, y = data

        def one(sample: Any) -> Any:
            image, label = sample
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.compute_loss(y=label[None], y_pred=self(image[None], training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            return [loss, *tf.clip_by_global_norm(gradients, 1.0)[0]]

        loss, *gradients = tf.map_fn(one, (x, y), [x.dtype] * (1 + len(self.trainable_variables)))
        self.optimizer.apply_gradients(
            zip([tf.reduce_mean(g, 0) for g in gradients], self.trainable_variables, strict=True)
        )
        return {"loss": tf.reduce_mean(loss)}


def private_training() -> Fit:
    """Gradients clipped sample by sample in ``train_step``."""
    entry = keras.Input((6,))
    model = Clipped(entry, layers.Dense(3)(layers.Dense(8, "relu")(entry)))
    model.compile("sgd", crossentropy())
    return Fit(model, rows(), labels(), {"batch_size": BATCH})


@tf.custom_gradient
def clipped_by_sample(x: Any) -> Any:
    """Return x; its gradient is clipped for each sample."""
    return tf.identity(x), lambda g: tf.clip_by_norm(g, 0.01, axes=[1])


def gradients_clipped_by_sample() -> Training:
    """A custom gradient that bounds what each sample sends back to the lower layers, and one that reverses it."""

    @tf.custom_gradient
    def reversed_gradient(x: Any) -> Any:
        return tf.identity(x), lambda g: -0.3 * g

    lower = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh")])
    task = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
    domain = keras.Sequential([keras.Input((8,)), layers.Dense(6, "tanh"), layers.Dense(2)])

    @tf.function
    def loss_fn(x: Any, y: Any, place: Any) -> Any:
        h = clipped_by_sample(lower(x, training=True))
        known = tf.cast(y >= 0, h.dtype)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(y, 0), task(h))
        guess = domain(reversed_gradient(h))
        return tf.reduce_sum(each * known) / tf.maximum(tf.reduce_sum(known), 1.0) + tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(place, guess)
        )

    n = 3 * BATCH
    data = batches(rows(n), np.where(np.arange(n) % 4 == 0, -1, labels(3, n)), labels(2, n))
    trained = [v for part in (lower, task, domain) for v in part.trainable_variables]
    return Training(loss_fn, keras.optimizers.SGD(0.1, momentum=0.9), trained, data)


def low_rank_adapters() -> Fit:
    """LoRA by Keras's own ``enable_lora``, and by a layer of the user's own; all else is frozen."""

    class Adapted(layers.Layer):
        def __init__(self, inner: Any, rank: int = 2, alpha: float = 4.0) -> None:
            super().__init__()
            self.inner, self.rank, self.alpha = inner, rank, alpha
            self.inner.trainable = False

        def build(self, shape: Any) -> None:
            self.inner.build(shape)
            self.down = self.add_weight(shape=(shape[-1], self.rank), initializer="he_uniform", name="down")
            self.up = self.add_weight(shape=(self.rank, self.inner.units), initializer="zeros", name="up")

        def call(self, x: Any) -> Any:
            return self.inner(x) + self.alpha / self.rank * ops.matmul(ops.matmul(x, self.down), self.up)

    entry = keras.Input((5,), dtype="int32")
    embed, first = layers.Embedding(12, 8), layers.Dense(8, "gelu")
    x = layers.GlobalAveragePooling1D()(embed(entry))
    model = keras.Model(entry, layers.Dense(3)(Adapted(layers.Dense(8))(first(x))))
    embed.enable_lora(2)
    first.enable_lora(2)
    model.compile(keras.optimizers.AdamW(0.01), crossentropy(), weighted_metrics=["accuracy"])
    ids = np.random.default_rng(0).integers(0, 12, (ROWS, 5))
    return Fit(model, ids, labels(), {"batch_size": BATCH, "epochs": 2})


class Normalised(layers.Wrapper):
    """Weight normalisation: the length and the direction of a dense layer's kernel are trained apart."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.length = self.add_weight(shape=(self.layer.units,), initializer="ones", name="length")

    def call(self, x: Any) -> Any:
        kernel = self.length * ops.normalize(self.layer.kernel, axis=0)
        return ops.matmul(x, kernel) + self.layer.bias


def normalised_weights() -> Fit:
    """Weight normalisation and spectral normalisation, with constraints on other weights."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            Normalised(layers.Dense(8)),
            layers.LeakyReLU(),
            layers.SpectralNormalization(layers.Dense(8)),
            layers.PReLU(),
            layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(1.0), bias_constraint="non_neg"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5), crossentropy(), metrics=["accuracy"])
    return Fit(model, rows(), labels(), {"batch_size": BATCH, "epochs": 2})


def average_of_the_optimizer() -> Fit:
    """Moving averages of weights by the optimizer, swapped in for evaluation and at the end."""
    model = dense()
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=None)
    model.compile(optimizer, crossentropy(), metrics=["accuracy"])
    options = {"batch_size": BATCH, "epochs": 2, "validation_data": (rows(seed=1), labels())}
    return Fit(model, rows(), labels(), {**options, "callbacks": [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]})


class AverageOfWeights(keras.callbacks.Callback):
    """Stochastic weight averaging: the mean of the weights after each epoch from a given one on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.mean = first, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch >= self.first:
            number, weights = epoch - self.first, self.model.get_weights()
            old = weights if self.mean is None else self.mean
            self.mean = [(number * a + b) / (number + 1) for a, b in zip(old, weights, strict=True)]

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.mean)


def average_of_epochs() -> Fit:
    """Stochastic weight averaging by a callback of the user's own, with a cyclic learning rate."""
    model = dense()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), crossentropy(), metrics=["accuracy"])
    cycle = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch % 2 else 0.02)
    return Fit(model, rows(), labels(), {"batch_size": BATCH, "epochs": 4, "callbacks": [cycle, AverageOfWeights(1)]})


def half_precision() -> Fit:
    """Mixed precision with a loss scale that the optimizer finds."""
    policy = keras.DTypePolicy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="float32"),
            layers.Dense(8, "relu", dtype=policy),
            layers.LayerNormalization(dtype=policy),
            layers.Dense(8, "relu", dtype=policy),
            layers.Dense(3, dtype="float32"),
        ]
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1024)
    model.compile(optimizer, crossentropy())
    return Fit(model, rows().astype("float32"), labels(), {"batch_size": BATCH, "epochs": 2})


class Centralised(keras.optimizers.Adam):
    """An optimizer of the user's own: the mean of each kernel's gradient is taken off before the update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if len(gradient.shape) > 1:
            gradient = gradient - ops.mean(gradient, axis=tuple(range(len(gradient.shape) - 1)), keepdims=True)
        super().update_step(gradient, variable, learning_rate)


def centralised_gradients() -> Fit:
    """An optimizer that overrides ``update_step``, with gradients accumulated over two batches."""
    model = dense()
    model.compile(Centralised(0.01, gradient_accumulation_steps=2), crossentropy(), metrics=["accuracy"])
    return Fit(model, rows(), labels(), {"batch_size": BATCH, "epochs": 2})


class Sharpness(keras.Model):
    """SAM: the gradient is taken where the loss is worst near the weights, in a training step of its own."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        moves = [0.05 * g / (tf.linalg.global_norm(gradients) + 1e-12) for g in gradients]
        for variable, move in zip(self.trainable_variables, moves, strict=True):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            worst = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(worst, self.trainable_variables)
        for variable, move in zip(self.trainable_variables, moves, strict=True):
            variable.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def sharpness_aware() -> Fit:
    """Two gradients for each update, in ``train_step``."""
    entry = keras.Input((6,))
    model = Sharpness(entry, layers.Dense(3)(layers.Dense(8, "relu")(entry)))
    model.compile("sgd", crossentropy())
    return Fit(model, rows(), labels(), {"batch_size": BATCH})


def easy_samples_first() -> Training:
    """A curriculum: losses above a threshold that grows with the steps count less, and label noise is smoothed."""
    model = dense(dropout=0.3)
    number = tf.Variable(0, trainable=False, dtype=tf.int64, name="number")

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        limit = 0.5 + 0.5 * tf.cast(number.assign_add(1), x.dtype)
        each = keras.losses.categorical_crossentropy(
            tf.one_hot(y, 3, dtype=x.dtype), model(x, training=True), from_logits=True, label_smoothing=0.1
        )
        weight = tf.stop_gradient(tf.where(each < limit, tf.ones_like(each), limit / each))
        return tf.reduce_mean(weight * each), {"easy": tf.reduce_mean(tf.cast(each < limit, x.dtype))}

    data = batches(rows(3 * BATCH), labels(3, 3 * BATCH))
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, data)


def policy_of_an_agent() -> Training:
    """PPO: a ratio of chances, clipped, a value function and the entropy, for steps that were played before."""
    entry = keras.Input((6,))
    x = layers.Dense(8, "tanh")(entry)
    model = keras.Model(entry, [layers.Dense(4)(x), layers.Dense(1)(layers.Dense(8, "tanh")(entry))])

    @tf.function
    def loss_fn(state: Any, action: Any, old: Any, advantage: Any, reward: Any) -> Any:
        logits, value = model(state, training=True)
        chances = tf.nn.log_softmax(logits)
        chance = tf.reduce_sum(tf.one_hot(action, 4, dtype=chances.dtype) * chances, 1)
        ratio = tf.exp(chance - old)
        gain = tf.minimum(ratio * advantage, tf.clip_by_value(ratio, 0.8, 1.2) * advantage)
        entropy = -tf.reduce_sum(tf.exp(chances) * chances, 1)
        return (
            -tf.reduce_mean(gain) + 0.5 * tf.reduce_mean((reward - value[:, 0]) ** 2) - 0.01 * tf.reduce_mean(entropy)
        )

    n = 3 * BATCH
    data = batches(rows(n), labels(4, n), -np.ones(n), rows(n, 1)[:, 0], rows(n, 1, 1)[:, 0])
    return Training(loss_fn, keras.optimizers.Adam(0.003), model.trainable_variables, data)


def values_of_actions() -> Training:
    """Double and duelling Q-learning with a target network that follows slowly, and weights of replayed steps."""

    def network() -> Any:
        entry = keras.Input((6,))
        x = layers.Dense(8, "relu")(entry)
        advantage = layers.Dense(4)(x)
        return keras.Model(entry, layers.Dense(1)(x) + advantage - ops.mean(advantage, axis=1, keepdims=True))

    model, target = network(), network()
    target.set_weights(model.get_weights())

    @tf.function
    def loss_fn(state: Any, action: Any, reward: Any, following: Any, done: Any, weight: Any) -> Any:
        best = tf.argmax(model(following), 1)
        later = tf.gather(target(following), best, batch_dims=1)
        wanted = tf.stop_gradient(reward + 0.9 * (1 - done) * later)
        index = tf.stack([tf.range(tf.shape(action)[0]), action], 1)
        error = wanted - tf.gather_nd(model(state, training=True), index)
        for slow, fast in zip(target.variables, model.variables, strict=True):
            slow.assign(slow * 0.99 + fast * 0.01)
        return tf.reduce_mean(weight * keras.losses.huber(wanted[:, None], (wanted - error)[:, None]))

    n = 3 * BATCH
    data = batches(
        rows(n), labels(4, n).astype("int32"), rows(n, 1)[:, 0], rows(n, seed=1), labels(2, n) * 1.0, 0.5 + labels(2, n)
    )
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, data)


PROGRAMS = (
    Program(uncertain_tasks, ranks=True),
    Program(adversarial_training, ranks=True),
    Program(virtual_adversary),
    Program(aware_of_quantisation, ranks=True),
    Program(fake_quantisation),
    Program(private_training, Expected.REFUSED, "it takes a gradient of each sample in tf.map_fn"),
    Program(gradients_clipped_by_sample, ranks=True),
    Program(low_rank_adapters, dtype="float32", ranks=True),
    Program(normalised_weights),
    Program(average_of_the_optimizer, ranks=True),
    Program(average_of_epochs, ranks=True),
    Program(half_precision, dtype="float16", ranks=True),
    Program(centralised_gradients),
    Program(sharpness_aware),
    Program(easy_samples_first, ranks=True),
    Program(policy_of_an_agent),
    Program(values_of_actions),
)
