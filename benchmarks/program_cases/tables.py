"""Programs about tables: clicks, ratings, sessions, features of several kinds, preprocessing inside the model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.exactness_cases.case import Training
from benchmarks.program_cases.program import BATCH, ONCE, ROWS, Fit, Program, batches

CITIES = ["Oslo", "Lima", "Kyoto", "Accra"]


def people(rows: int = ROWS) -> dict[str, Any]:
    """Return columns of floats, integers and strings."""
    rng = np.random.default_rng(0)
    return {
        "age": rng.normal(40, 12, (rows, 1)),
        "income": rng.lognormal(3, 1, (rows, 1)),
        "children": rng.integers(0, 4, (rows, 1)),
        "city": rng.choice(CITIES, (rows, 1)),
    }


def as_tensors(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns as tensors: Keras takes strings only so."""
    return {name: tf.constant(column) for name, column in columns.items()}


def wide_and_deep() -> Fit:
    """FeatureSpace: bins, lookups, hashes and a cross, a wide and a deep half, trained from raw values."""
    columns = people()
    space = keras.utils.FeatureSpace(
        features={
            "age": keras.utils.FeatureSpace.float_discretized(num_bins=4),
            "income": keras.utils.FeatureSpace.float_normalized(),
            "children": keras.utils.FeatureSpace.integer_categorical(num_oov_indices=0),
            "city": keras.utils.FeatureSpace.string_categorical(num_oov_indices=1),
        },
        crosses=[keras.utils.FeatureSpace.cross(("children", "city"), crossing_dim=8)],
        output_mode="concat",
    )
    space.adapt(tf.data.Dataset.from_tensor_slices(columns).batch(BATCH))
    entries, features = space.get_inputs(), space.get_encoded_features()
    wide = layers.Dense(1)(features)
    deep = layers.Dropout(0.3)(layers.Dense(8, "relu")(features))
    model = keras.Model(entries, layers.Activation("sigmoid")(layers.Add()([wide, layers.Dense(1)(deep)])))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    labels = np.arange(ROWS)[:, None] % 2
    return Fit(model, as_tensors(columns), labels, {"batch_size": BATCH, "epochs": 2})


def preprocessing_inside() -> Fit:
    """Keras's preprocessing layers inside the model: lookups, bins, hashes, category encodings, normalisation."""
    columns = people()
    entries = {
        "age": keras.Input((1,), name="age"),
        "income": keras.Input((1,), name="income"),
        "children": keras.Input((1,), name="children", dtype="int64"),
        "city": keras.Input((1,), name="city", dtype="string"),
    }
    normalize = layers.Normalization()
    normalize.adapt(columns["income"])
    bins = layers.Discretization(bin_boundaries=[25.0, 40.0, 55.0], output_mode="one_hot")
    known = layers.StringLookup(vocabulary=CITIES, output_mode="one_hot")
    places = layers.StringLookup(vocabulary=CITIES)(entries["city"])
    x = layers.Concatenate()(
        [
            normalize(entries["income"]),
            bins(entries["age"]),
            known(entries["city"]),
            layers.Flatten()(layers.Embedding(5, 3)(places)),
            layers.IntegerLookup(vocabulary=[0, 1, 2, 3], output_mode="multi_hot")(entries["children"]),
            layers.CategoryEncoding(4, output_mode="count", dtype="float64")(entries["children"]),
            layers.Flatten()(layers.Embedding(6, 2)(layers.Hashing(6)(entries["city"]))),
        ]
    )
    model = keras.Model(entries, layers.Dense(1)(layers.Dropout(0.1)(layers.Dense(8, "relu")(x))))
    model.compile(keras.optimizers.Adam(0.01), "mae", metrics=["mse"])
    data = tf.data.Dataset.from_tensor_slices((columns, np.arange(ROWS)[:, None] / ROWS)).batch(BATCH)
    return Fit(model, data, None, {"epochs": 2})


class Ratings(keras.Model):
    """The sigmoid of the product of a user's and a film's vector, with a bias of each."""

    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        regularizer = keras.regularizers.l2(1e-6)
        self.user = layers.Embedding(users, 5, "he_normal", embeddings_regularizer=regularizer)
        self.film = layers.Embedding(films, 5, "he_normal", embeddings_regularizer=regularizer)
        self.user_bias, self.film_bias = layers.Embedding(users, 1), layers.Embedding(films, 1)

    def call(self, pairs: Any) -> Any:
        user, film = pairs[:, 0], pairs[:, 1]
        product = ops.sum(self.user(user) * self.film(film), 1, keepdims=True)
        return ops.sigmoid(product + self.user_bias(user) + self.film_bias(film))


def collaborative_filtering() -> Fit:
    """A subclassed matrix factorisation over pairs of ids."""
    model = Ratings(12, 9)
    model.compile(keras.optimizers.Adam(0.001), keras.losses.BinaryCrossentropy())
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.integers(0, 12, ROWS), rng.integers(0, 9, ROWS)], 1)
    return Fit(model, pairs, rng.random(ROWS), {"batch_size": BATCH, "epochs": 2, "validation_split": 0.2})


def two_towers() -> Training:
    """Retrieval: the other films of the batch are the negatives, with a correction for how often each is seen."""
    user = keras.Sequential([keras.Input((), dtype="int32"), layers.Embedding(12, 8), layers.Dense(6)])
    film = keras.Sequential([keras.Input((), dtype="int32"), layers.Embedding(9, 8), layers.Dense(6)])

    @tf.function
    def loss_fn(users: Any, films: Any, chances: Any) -> Any:
        scores = tf.matmul(user(users), film(films), transpose_b=True) - tf.math.log(chances)[None]
        same = tf.cast(films[:, None] == films[None], scores.dtype) - tf.eye(tf.shape(films)[0], dtype=scores.dtype)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(films)[0]), scores - 1e9 * same)
        return tf.reduce_sum(each)

    rng = np.random.default_rng(0)
    n = 3 * BATCH
    data = batches(rng.integers(0, 12, n).astype("int32"), rng.integers(0, 9, n).astype("int32"), rng.random(n) + 0.1)
    return Training(
        loss_fn, keras.optimizers.Adagrad(0.1), [*user.trainable_variables, *film.trainable_variables], data
    )


def sessions_by_transformer() -> Fit:
    """A behaviour sequence transformer: past films and ratings, with the user's features, predict the next rating."""
    films = keras.Input((5,), dtype="int32", name="films")
    ratings = keras.Input((4,), name="ratings")
    user = keras.Input((), dtype="string", name="sex")
    lookup = layers.StringLookup(vocabulary=["F", "M"], num_oov_indices=0)
    embed = layers.Embedding(12, 6)
    encoded = embed(films)
    places = layers.Embedding(4, 6)(ops.arange(4))
    past = (encoded[:, :4] + places) * ops.expand_dims(ratings, -1)
    x = layers.Concatenate(axis=1)([past, encoded[:, 4:]])
    attended = layers.Dropout(0.1)(layers.MultiHeadAttention(3, 6, dropout=0.1)(x, x))
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    y = layers.Dropout(0.1)(layers.Dense(6)(layers.LeakyReLU()(x)))
    x = layers.Flatten()(layers.LayerNormalization()(layers.Add()([x, y])))
    x = layers.Concatenate()([x, layers.Embedding(2, 3)(lookup(user))])
    model = keras.Model([films, ratings, user], layers.Dense(1)(layers.Dropout(0.1)(layers.Dense(8, "relu")(x))))
    model.compile(keras.optimizers.Adagrad(0.01), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    rng = np.random.default_rng(0)
    columns = {
        "films": rng.integers(0, 12, (ROWS, 5)).astype("int32"),
        "ratings": rng.random((ROWS, 4)),
        "sex": rng.choice(["F", "M"], ROWS),
    }
    data = tf.data.Dataset.from_tensor_slices((columns, rng.random(ROWS))).batch(BATCH)
    return Fit(model, data, None, {"epochs": 2})


class Gated(layers.Layer):
    """A gated residual network (GRN): two dense layers, dropout, a gate, a residual connection, normalisation."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units
        self.first, self.second = layers.Dense(units, "elu"), layers.Dense(units)
        self.value, self.gate, self.drop = layers.Dense(units), layers.Dense(units, "sigmoid"), layers.Dropout(0.15)
        self.norm, self.project = layers.LayerNormalization(), layers.Dense(units)

    def build(self, shape: Any) -> None:
        narrow = (*shape[:-1], self.units)
        for layer in (self.first, self.project):
            layer.build(shape)
        for layer in (self.second, self.value, self.gate, self.norm):
            layer.build(narrow)

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.drop(self.second(self.first(x)), training=training)
        if x.shape[-1] != self.units:
            x = self.project(x)
        return self.norm(x + self.value(y) * self.gate(y))


def selected_variables() -> Fit:
    """Variable selection: a GRN for each feature, and a softmax over features from all of them."""
    columns = people()
    entries = {name: keras.Input((1,), name=name) for name in ("age", "income", "children")}
    encoded = [layers.Dense(6)(entry) for entry in entries.values()]
    weights = layers.Dense(3, "softmax")(Gated(6)(layers.Concatenate()(encoded)))
    stacked = ops.stack([Gated(6)(x) for x in encoded], axis=1)
    x = ops.squeeze(ops.matmul(ops.expand_dims(weights, 1), stacked), 1)
    model = keras.Model(entries, layers.Dense(1, "sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    x = {name: columns[name] / 40.0 for name in entries}
    weights = np.random.default_rng(1).random(ROWS)
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(ROWS)[:, None] % 2, weights)).batch(BATCH)
    return Fit(model, data, None, {"epochs": 2})


def crossed_features() -> Fit:
    """A deep and cross network, and a factorisation machine of the same embeddings."""
    entry = keras.Input((4,), dtype="int32")
    x = layers.Embedding(20, 4)(entry)
    square = 0.5 * (ops.square(ops.sum(x, 1)) - ops.sum(ops.square(x), 1))
    x0 = crossed = layers.Flatten()(x)
    for _ in range(2):
        crossed = x0 * layers.Dense(16)(crossed) + crossed
    deep = layers.Dropout(0.2)(layers.Dense(8, "relu")(x0))
    model = keras.Model(entry, layers.Dense(1, "sigmoid")(layers.Concatenate()([square, crossed, deep])))
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(), keras.metrics.Recall()]
    model.compile(keras.optimizers.Ftrl(0.05), "binary_crossentropy", metrics=metrics)
    ids = np.random.default_rng(0).integers(0, 20, (ROWS, 4))
    return Fit(model, ids, np.arange(ROWS) % 2, {"batch_size": BATCH, "epochs": 2})


def frauds_are_rare() -> Fit:
    """Class weights, metrics that count, a bias that starts from the share of positives, and early stopping."""
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    y = (np.arange(ROWS) % 5 == 0).astype("uint8")[:, None]
    bias = keras.initializers.Constant(float(np.log(y.mean() / (1 - y.mean()))))
    stack = [layer for _ in range(2) for layer in (layers.Dense(8, "relu"), layers.Dropout(0.3))]
    model = keras.Sequential([keras.Input((6,)), *stack, layers.Dense(1, "sigmoid", bias_initializer=bias)])
    metrics = [
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.TruePositives(name="tp"),
        keras.metrics.AUC(curve="PR"),
    ]
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=metrics)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    options = {"batch_size": BATCH, "epochs": 3, "class_weight": {0: 0.1, 1: 1.0}, "callbacks": [stop]}
    return Fit(model, x, y, {**options, "validation_data": (x[:9], y[:9])})


class Experts(layers.Layer):
    """A mixture of experts: each sample goes to its two best ones, and a loss balances them over the batch."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number, self.width = number, width
        self.gate = layers.Dense(number, use_bias=False)

    def build(self, shape: Any) -> None:
        self.gate.build(shape)
        self.kernel = self.add_weight(shape=(self.number, shape[-1], self.width), name="kernel")

    def call(self, x: Any) -> Any:
        chances = ops.softmax(self.gate(x))
        best, index = ops.top_k(chances, 2)
        weights = ops.sum(ops.one_hot(index, self.number, dtype=x.dtype) * best[..., None], 1)
        outputs = ops.relu(ops.einsum("bi,eij->bej", x, self.kernel))
        share = ops.mean(ops.one_hot(ops.argmax(chances, -1), self.number, dtype=x.dtype), 0)
        self.add_loss(0.01 * self.number * ops.sum(share * ops.mean(chances, 0)))
        return ops.einsum("be,bej->bj", weights, outputs)


def experts_in_balance() -> Fit:
    """Experts chosen by a gate; the balancing loss multiplies two means over the batch."""
    entry = keras.Input((6,))
    x = Experts(4, 8)(layers.Dense(8, "relu")(entry))
    model = keras.Model(entry, layers.Dense(3)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    return Fit(model, x, np.arange(ROWS) % 3, {"batch_size": BATCH, "epochs": 2})


def experts_of_several_tasks() -> Fit:
    """Shared experts with a gate for each of two tasks, one of them with labels for some samples only."""
    entry = keras.Input((6,))
    experts = ops.stack([layers.Dense(5, "relu")(entry) for _ in range(3)], 1)
    outputs = {}
    for task in ("click", "buy"):
        gate = layers.Dense(3, "softmax")(entry)
        x = ops.einsum("be,bej->bj", gate, experts)
        outputs[task] = layers.Dense(1, "sigmoid", name=task)(layers.Dense(4, "relu")(x))
    model = keras.Model(entry, outputs)
    model.compile(
        keras.optimizers.Lion(0.001),
        {"click": "binary_crossentropy", "buy": keras.losses.BinaryFocalCrossentropy()},
        loss_weights={"click": 0.3, "buy": 0.7},
        weighted_metrics={"click": ["accuracy"], "buy": ["accuracy"]},
    )
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    y = {"click": np.arange(ROWS)[:, None] % 2, "buy": np.arange(ROWS)[:, None] // 2 % 2}
    kept = {"click": np.ones(ROWS), "buy": (np.arange(ROWS) % 3 > 0) * 1.0}
    return Fit(model, x, y, {"batch_size": BATCH, "epochs": 2, "sample_weight": kept})


class Tree(layers.Layer):
    """A soft decision tree: each inner node sends a sample left or right by a chance."""

    def __init__(self, depth: int, classes: int, used: Any) -> None:
        super().__init__()
        self.depth, self.classes = depth, classes
        self.used = tf.constant(used)
        self.decide = layers.Dense(2**depth, "sigmoid")

    def build(self, shape: Any) -> None:
        self.decide.build((None, int(self.used.shape[0])))
        self.leaves = self.add_weight(shape=(2**self.depth, self.classes), initializer="random_normal", name="leaves")

    def call(self, x: Any) -> Any:
        rows = tf.shape(x)[0]
        right = tf.expand_dims(self.decide(tf.gather(x, self.used, axis=1)), 2)
        both = tf.concat([right, 1 - right], 2)
        chance, first = tf.ones([rows, 1, 1], x.dtype), 1
        for level in range(self.depth):
            chance = tf.tile(tf.reshape(chance, [rows, -1, 1]), [1, 1, 2])
            chance = chance * both[:, first : first + 2**level]
            first += 2**level
        return tf.matmul(tf.reshape(chance, [rows, 2**self.depth]), tf.nn.softmax(self.leaves))


def decision_forest() -> Fit:
    """The mean of soft decision trees, each of which sees some of the features."""
    entry = keras.Input((6,))
    x = layers.Dense(6)(entry)
    rng = np.random.default_rng(0)
    trees = [Tree(3, 3, rng.choice(6, 4, replace=False))(x) for _ in range(3)]
    model = keras.Model(entry, layers.Average()(trees))
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return Fit(model, rng.normal(size=(ROWS, 6)), np.arange(ROWS) % 3, {"batch_size": BATCH, "epochs": 2})


def deep_sets() -> Fit:
    """Sets of unequal sizes: each element by itself, a masked sum, a maximum, and a dense layer over both."""
    elements, present = keras.Input((6, 3)), keras.Input((6,), dtype="bool")
    x = layers.Dense(8, "relu")(layers.Dense(8, "relu")(elements))
    kept = ops.expand_dims(ops.cast(present, x.dtype), -1)
    x = layers.Concatenate()([ops.sum(x * kept, 1), ops.max(ops.where(kept > 0, x, -1e9), 1)])
    model = keras.Model([elements, present], layers.Dense(1)(layers.Dense(6, "relu")(x)))
    model.compile(keras.optimizers.Adamax(0.01), "mse", metrics=[keras.metrics.R2Score()])
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(ROWS, 6, 3)), np.arange(6) < rng.integers(1, 7, (ROWS, 1))]
    return Fit(model, x, rng.normal(size=(ROWS, 1)), {"batch_size": BATCH, "epochs": 2})


def ranked_lists() -> Training:
    """Learning to rank: a softmax over each query's list, LambdaRank's pairs by their gains, padding left out."""
    entry = keras.Input((5, 4))
    # No bias: only differences of scores count, so its gradient is rounding, which Adam would enlarge.
    score_of = layers.Dense(1, use_bias=False)
    model = keras.Model(entry, layers.Flatten()(score_of(layers.Dense(8, "relu")(entry))))

    @tf.function
    def loss_fn(x: Any, gain: Any) -> Any:
        score = model(x, training=True)
        valid = gain >= 0
        kept = tf.cast(valid[:, :, None] & valid[:, None, :], score.dtype)
        better = tf.cast(gain[:, :, None] > gain[:, None, :], score.dtype) * kept
        place = tf.cast(tf.argsort(tf.argsort(score, direction="DESCENDING")), score.dtype)
        discount = 1 / tf.math.log(place + 2.0)
        swap = tf.abs(gain[:, :, None] - gain[:, None, :]) * tf.abs(discount[:, :, None] - discount[:, None, :])
        pairs = better * tf.stop_gradient(swap) * tf.math.softplus(score[:, None, :] - score[:, :, None])
        return tf.reduce_mean(tf.reduce_sum(pairs, [1, 2]))

    rng = np.random.default_rng(0)
    gain = np.where(rng.random((3 * BATCH, 5)) < 0.8, rng.integers(0, 4, (3 * BATCH, 5)), -1) * 1.0
    return Training(
        loss_fn,
        keras.optimizers.Adam(0.01),
        model.trainable_variables,
        batches(rng.normal(size=(3 * BATCH, 5, 4)), gain),
    )


PROGRAMS = (
    Program(wide_and_deep, ranks=True),
    Program(preprocessing_inside, ranks=True),
    Program(collaborative_filtering),
    Program(two_towers, options=ONCE, ranks=True),
    Program(sessions_by_transformer, ranks=True),
    Program(selected_variables, ranks=True),
    Program(crossed_features),
    Program(frauds_are_rare, ranks=True),
    Program(experts_in_balance, options=ONCE),
    Program(experts_of_several_tasks, ranks=True),
    Program(decision_forest),
    Program(deep_sets),
    Program(ranked_lists),
)
