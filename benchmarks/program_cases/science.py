"""Programs about shapes, graphs and equations: points, molecules, operators, differential equations."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.exactness_cases.case import Training
from benchmarks.program_cases.program import BATCH, ROWS, Fit, Program, batches


@keras.saving.register_keras_serializable()
class Orthogonal(keras.regularizers.Regularizer):
    """The distance of each sample's matrix times its transpose from the identity."""

    def __init__(self, size: int, factor: float = 0.001) -> None:
        self.size, self.factor = size, factor

    def __call__(self, x: Any) -> Any:
        x = ops.reshape(x, (-1, self.size, self.size))
        product = ops.matmul(x, ops.transpose(x, (0, 2, 1)))
        return ops.sum(self.factor * ops.square(product - ops.eye(self.size, dtype=x.dtype)))

    def get_config(self) -> dict[str, Any]:
        return {"size": self.size, "factor": self.factor}


def turned(x: Any, size: int) -> Any:
    """Return points after a small network has given each cloud a matrix."""
    y = layers.GlobalMaxPooling1D()(layers.Conv1D(8, 1, activation="relu")(x))
    bias = keras.initializers.Constant(np.eye(size).flatten())
    matrix = layers.Dense(
        size * size, kernel_initializer="zeros", bias_initializer=bias, activity_regularizer=Orthogonal(size)
    )(layers.Dense(6, "relu")(y))
    return layers.Dot(axes=(2, 1))([x, layers.Reshape((size, size))(matrix)])


def point_clouds() -> Fit:
    """PointNet: clouds and their features turned by matrices whose distance from orthogonal ones is a loss."""
    entry = keras.Input((12, 3))
    x = layers.Conv1D(5, 1, activation="relu")(turned(entry, 3))
    x = layers.Conv1D(8, 1, activation="relu")(turned(x, 5))
    x = layers.Dropout(0.3)(layers.Dense(8, "relu")(layers.GlobalMaxPooling1D()(x)))
    model = keras.Model(entry, layers.Dense(4, "softmax")(x))
    model.compile(
        keras.optimizers.Adam(0.001), "sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"]
    )
    clouds = np.random.default_rng(0).normal(size=(ROWS, 12, 3))
    return Fit(model, clouds, np.arange(ROWS) % 4, {"batch_size": BATCH, "epochs": 2})


NODES, EDGES = 10, 24


def graph() -> Any:
    """Return edges [2, EDGES] and features [NODES, 4] of one graph."""
    rng = np.random.default_rng(0)
    return tf.constant(rng.integers(0, NODES, (2, EDGES))), tf.constant(rng.normal(size=(NODES, 4)))


class GraphLayer(layers.Layer):
    """Messages along edges, summed at each node by an unsorted segment sum."""

    def __init__(self, units: int, edges: Any) -> None:
        super().__init__()
        self.edges = edges
        self.message, self.update = layers.Dense(units, "gelu"), layers.Dense(units, "gelu")

    def build(self, shape: Any) -> None:
        self.message.build(shape)
        self.update.build((None, shape[-1] + self.message.units))

    def call(self, nodes: Any) -> Any:
        sent = tf.gather(self.message(nodes), self.edges[1])
        got = tf.math.unsorted_segment_mean(sent, self.edges[0], NODES)
        return tf.math.l2_normalize(self.update(tf.concat([nodes, got], 1)), -1)


class Papers(keras.Model):
    """A graph network whose input are numbers of nodes: the graph belongs to the model."""

    def __init__(self) -> None:
        super().__init__()
        edges, self.features = graph()
        self.first = layers.Dense(6, "gelu")
        self.layers_of_graph = [GraphLayer(6, edges) for _ in range(2)]
        self.head = layers.Dense(3)

    def call(self, numbers: Any, training: bool = False) -> Any:
        x = self.first(self.features)
        for layer in self.layers_of_graph:
            x = layer(x) + x
        return self.head(tf.gather(x, tf.reshape(numbers, [-1])))


def cited_papers() -> Fit:
    """Classes of the nodes of one graph, which every batch runs through whole."""
    model = Papers()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    numbers = np.arange(ROWS) % NODES
    return Fit(model, numbers, numbers % 3, {"batch_size": BATCH, "epochs": 2})


def molecules() -> Training:
    """Message passing on padded graphs: a matrix of each edge, gated updates, and attention that pools the atoms."""
    embed, edge = layers.Dense(4), layers.Dense(16)
    cell, score, head = layers.GRUCell(4), layers.Dense(1), layers.Dense(1)
    embed.build((None, 3))
    edge.build((None, 2))
    cell.build((None, 4))
    score.build((None, 4))
    head.build((None, 4))

    @tf.function
    def loss_fn(atoms: Any, bonds: Any, pairs: Any, valid: Any, y: Any) -> Any:
        rows, number = tf.shape(atoms)[0], atoms.shape[1]
        state = embed(atoms)
        matrix = tf.reshape(edge(bonds), [rows, -1, 4, 4])
        onto = tf.one_hot(pairs[..., 0], number, axis=1, dtype=atoms.dtype)
        for _ in range(2):
            sent = tf.einsum("beij,bej->bei", matrix, tf.gather(state, pairs[..., 1], batch_dims=1))
            got = tf.matmul(onto, sent * valid[..., None])
            flat, _ = cell(tf.reshape(got, [-1, 4]), [tf.reshape(state, [-1, 4])])
            state = tf.reshape(flat, [rows, number, 4])
        pooled = tf.reduce_sum(tf.nn.softmax(score(state), 1) * state, 1)
        return tf.reduce_mean(keras.losses.binary_crossentropy(y, tf.sigmoid(head(pooled))))

    rng = np.random.default_rng(0)
    n = 3 * BATCH
    data = batches(
        rng.normal(size=(n, 5, 3)),
        rng.normal(size=(n, 7, 2)),
        rng.integers(0, 5, (n, 7, 2)),
        (rng.random((n, 7)) < 0.7) * 1.0,
        rng.integers(0, 2, (n, 1)) * 1.0,
    )
    trained = [v for part in (embed, edge, cell, score, head) for v in part.trainable_variables]
    return Training(loss_fn, keras.optimizers.Adam(0.01), trained, data)


def graph_attention() -> Training:
    """Attention along the edges of one graph: a softmax over each node's neighbours by segment sums and maxima."""
    edges, features = graph()
    rng = np.random.default_rng(1)
    kernel = tf.Variable(rng.normal(size=(4, 6)) / 2, name="kernel")
    attention = tf.Variable(rng.normal(size=(12, 1)) / 2, name="attention")
    head = tf.Variable(rng.normal(size=(6, 3)) / 2, name="head")

    @tf.function
    def loss_fn(numbers: Any, labels: Any) -> Any:
        h = features @ kernel
        pairs = tf.reshape(tf.gather(h, tf.transpose(edges)), [EDGES, 12])
        score = tf.squeeze(tf.nn.leaky_relu(pairs @ attention), -1)
        score = tf.exp(score - tf.gather(tf.math.unsorted_segment_max(score, edges[0], NODES), edges[0]))
        weight = score / tf.gather(tf.math.unsorted_segment_sum(score, edges[0], NODES), edges[0])
        out = tf.math.unsorted_segment_sum(tf.gather(h, edges[1]) * weight[:, None], edges[0], NODES)
        logits = tf.gather(tf.nn.elu(out) @ head, numbers)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    numbers = np.arange(3 * BATCH) % NODES
    return Training(loss_fn, keras.optimizers.SGD(0.5, 0.9), [kernel, attention, head], batches(numbers, numbers % 3))


def operators() -> Fit:
    """DeepONet: a branch for a function's values, a trunk for the place, their product and a bias of its own."""

    class Product(layers.Layer):
        def build(self, shape: Any) -> None:
            self.bias = self.add_weight(shape=(), initializer="zeros", name="bias")

        def call(self, pair: Any) -> Any:
            return ops.einsum("bk,bpk->bp", *pair) + self.bias

    values, place = keras.Input((9,)), keras.Input((4, 1))
    branch = layers.Dense(6)(layers.Dense(8, "tanh")(values))
    trunk = layers.Dense(6, "tanh")(layers.Dense(8, "tanh")(place))
    model = keras.Model([values, place], Product()([branch, trunk]))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(ROWS, 9)), rng.random((ROWS, 4, 1))]
    return Fit(model, x, rng.normal(size=(ROWS, 4)), {"batch_size": BATCH, "epochs": 2})


def heat_equation() -> Training:
    """A physics-informed network: first and second derivatives by nested tapes, and values at the boundary."""
    model = keras.Sequential([keras.Input((2,)), *(layers.Dense(8, "tanh") for _ in range(2)), layers.Dense(1)])
    diffusion = tf.Variable(np.float64(0.5), name="diffusion")

    @tf.function
    def loss_fn(inside: Any, edge: Any, value: Any) -> Any:
        x, t = inside[:, :1], inside[:, 1:]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch([x, t])
                u = model(tf.concat([x, t], 1))
            u_x, u_t = inner.gradient(u, x), inner.gradient(u, t)
        u_xx = outer.gradient(u_x, x)
        residual = u_t - diffusion * u_xx + u * u_x
        return tf.reduce_mean(residual**2) + 10.0 * tf.reduce_mean((model(edge) - value) ** 2)

    rng = np.random.default_rng(0)
    n = 3 * BATCH
    data = batches(rng.random((n, 2)), rng.random((n, 2)), rng.random((n, 1)))
    return Training(loss_fn, keras.optimizers.Adam(0.01), [*model.trainable_variables, diffusion], data)


def neural_differential_equation() -> Training:
    """An ODE of a network, solved by fourth-order Runge-Kutta steps in a while loop."""
    field = keras.Sequential([keras.Input((3,)), layers.Dense(8, "tanh"), layers.Dense(3)])

    @tf.function
    def loss_fn(start: Any, end: Any) -> Any:
        h = tf.constant(0.1, start.dtype)

        def advance(i: Any, x: Any) -> Any:
            k1 = field(x)
            k2 = field(x + h / 2 * k1)
            k3 = field(x + h / 2 * k2)
            k4 = field(x + h * k3)
            return i + 1, x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

        _, found = tf.while_loop(lambda i, x: i < 5, advance, (0, start))
        return tf.reduce_mean(tf.abs(found - end))

    rng = np.random.default_rng(0)
    data = batches(rng.normal(size=(3 * BATCH, 3)), rng.normal(size=(3 * BATCH, 3)))
    return Training(loss_fn, keras.optimizers.RMSprop(0.01), field.trainable_variables, data)


def energies_and_forces() -> Training:
    """A potential of atoms from their distances; its negative gradient by the places are the forces."""
    each = keras.Sequential([keras.Input((5, 6)), layers.Dense(8, "softplus"), layers.Dense(1)])

    @tf.function
    def loss_fn(place: Any, energy: Any, force: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(place)
            apart = place[:, :, None] - place[:, None]
            square = tf.reduce_sum(apart**2, -1) + tf.eye(5, dtype=place.dtype)
            distance = tf.sqrt(square)[..., None]
            waves = tf.exp(-((distance - tf.linspace(tf.constant(0.5, place.dtype), 3.0, 6)) ** 2))
            waves *= (1 - tf.eye(5, dtype=place.dtype))[..., None]
            total = tf.reduce_sum(each(tf.reduce_sum(waves, 2)), [1, 2])
        found = -tape.gradient(total, place)
        return tf.reduce_mean((total - energy) ** 2) + 5.0 * tf.reduce_mean((found - force) ** 2)

    rng = np.random.default_rng(0)
    n = 3 * BATCH
    data = batches(rng.normal(size=(n, 5, 3)), rng.normal(size=n), rng.normal(size=(n, 5, 3)))
    return Training(loss_fn, keras.optimizers.Adam(0.001), each.trainable_variables, data)


def points_of_a_kernel() -> Training:
    """A Gaussian process of each sample: a kernel of learned features, a Cholesky factor, the marginal likelihood."""
    features = keras.Sequential([keras.Input((2,)), layers.Dense(6, "tanh"), layers.Dense(2, use_bias=False)])
    # No bias: distances do not depend on it, so its gradient is rounding, which Adam would enlarge.
    noise = tf.Variable(np.float64(-1.0), name="noise")

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        z = tf.reshape(features(tf.reshape(x, [-1, 2])), tf.shape(x))
        square = tf.reduce_sum((z[:, :, None] - z[:, None]) ** 2, -1)
        kernel = tf.exp(-0.5 * square) + (tf.nn.softplus(noise) + 1e-3) * tf.eye(6, dtype=x.dtype)
        factor = tf.linalg.cholesky(kernel)
        alpha = tf.linalg.triangular_solve(factor, y[..., None])
        determinant = tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)), -1)
        return tf.reduce_mean(0.5 * tf.reduce_sum(alpha**2, [1, 2]) + determinant)

    rng = np.random.default_rng(0)
    data = batches(rng.normal(size=(3 * BATCH, 6, 2)), rng.normal(size=(3 * BATCH, 6)))
    return Training(loss_fn, keras.optimizers.Adam(0.01), [*features.trainable_variables, noise], data)


def beams_of_waves() -> Training:
    """Masks for two speakers from a spectrogram; the waves are compared in the better order of the speakers."""
    entry = keras.Input((13, 9))
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(entry)
    x = layers.Dropout(0.2)(x)
    model = keras.Model(entry, layers.Reshape((13, 9, 2))(layers.Dense(18, "sigmoid")(x)))

    @tf.function
    def loss_fn(mixed: Any, one: Any, two: Any) -> Any:
        window = tf.signal.hann_window
        waves = tf.signal.stft(mixed, 16, 8, 16, window, pad_end=False)
        masks = model(tf.abs(waves), training=True)
        found = [
            tf.signal.inverse_stft(waves * tf.cast(masks[..., i], waves.dtype), 16, 8, 16, window) for i in range(2)
        ]

        def cost(a: Any, b: Any) -> Any:
            return tf.reduce_mean((a - b) ** 2, 1)

        straight = cost(found[0], one) + cost(found[1], two)
        crossed = cost(found[0], two) + cost(found[1], one)
        return tf.reduce_mean(tf.minimum(straight, crossed))

    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(3 * BATCH, 112)), rng.normal(size=(3 * BATCH, 112))
    return Training(loss_fn, keras.optimizers.Adam(0.01), model.trainable_variables, batches(one + two, one, two))


PROGRAMS = (
    Program(point_clouds, ranks=True),
    Program(cited_papers, ranks=True),
    Program(molecules),
    Program(graph_attention),
    Program(operators, ranks=True),
    Program(heat_equation, ranks=True),
    Program(neural_differential_equation, ranks=True),
    Program(energies_and_forces),
    Program(points_of_a_kernel),
    Program(beams_of_waves, ranks=True),
)
