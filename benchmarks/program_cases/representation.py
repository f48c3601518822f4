"""Programs that learn to compare: pairs, triplets, contrast, teachers and students, several senses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.exactness_cases.case import Training
from benchmarks.program_cases.program import BATCH, ONCE, ROWS, Fit, Program, batches


def images(rows: int = 3 * BATCH, seed: int = 0) -> Any:
    """Return floats [rows, 8, 8, 1] between 0 and 1."""
    return np.random.default_rng(seed).random((rows, 8, 8, 1))


def encoder(width: int = 6, name: str | None = None) -> Any:
    """Return a network of images that gives a vector of each."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Conv2D(6, 3, 2, activation="relu"),
            layers.Flatten(),
            layers.Dense(width),
        ],
        name=name,
    )


def siamese_pairs() -> Fit:
    """Two images through one network, the distance of their vectors, and a contrastive loss with a margin."""

    def contrastive(y_true: Any, y_pred: Any) -> Any:
        near = ops.square(y_pred)
        far = ops.square(ops.maximum(1.0 - y_pred, 0.0))
        return ops.mean((1 - y_true) * near + y_true * far)

    left, right = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    embed = encoder()
    distance = layers.Lambda(
        lambda pair: ops.sqrt(ops.maximum(ops.sum(ops.square(pair[0] - pair[1]), 1, keepdims=True), 1e-7)),
        output_shape=(1,),
    )([embed(left), embed(right)])
    model = keras.Model(
        [left, right], layers.Dense(1, "sigmoid")(layers.LayerNormalization(axis=-1)(distance) + distance)
    )
    model.compile("rmsprop", contrastive, metrics=["accuracy"])
    x = [images(ROWS), images(ROWS, 1)]
    return Fit(model, x, np.arange(ROWS)[:, None] % 2, {"batch_size": BATCH, "epochs": 2})


class TripletModel(keras.Model):
    """Adds the triplet loss in ``compute_loss``: the network gives two distances."""

    def __init__(self, network: Any, margin: float = 0.5) -> None:
        super().__init__()
        self.network, self.margin = network, margin

    def call(self, triplet: Any) -> Any:
        anchor, positive, negative = (self.network(image) for image in triplet)
        return ops.sum(ops.square(anchor - positive), -1), ops.sum(ops.square(anchor - negative), -1)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        near, far = y_pred
        return ops.mean(ops.maximum(near - far + self.margin, 0.0))


def siamese_triplets() -> Fit:
    """Anchor, positive and negative through one network, with a loss that needs no labels."""
    model = TripletModel(encoder())
    model.compile(keras.optimizers.Adam(0.001), weighted_metrics=[])
    images_of = tuple(images(ROWS, seed) for seed in range(3))
    data = tf.data.Dataset.from_tensor_slices((images_of,)).batch(BATCH)
    return Fit(model, data, None, {"epochs": 2})


def contrast_of_views() -> Training:
    """SimCLR: two views of each image, drawn by augmentation layers; all other images of the batch are negatives."""
    augment = keras.Sequential([layers.RandomFlip(seed=1), layers.RandomTranslation(0.2, 0.2, seed=2)])
    embed = encoder()
    project = keras.Sequential([keras.Input((6,)), layers.Dense(6, "relu"), layers.Dense(4)])

    @tf.function
    def loss_fn(image: Any) -> Any:
        rows = tf.shape(image)[0]
        views = tf.concat([augment(image, training=True), augment(image, training=True)], 0)
        z = tf.math.l2_normalize(project(embed(views, training=True)), axis=1)
        scores = tf.matmul(z, z, transpose_b=True) / 0.1 - 1e9 * tf.eye(2 * rows, dtype=z.dtype)
        partner = tf.concat([tf.range(rows, 2 * rows), tf.range(rows)], 0)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(partner, scores))

    trained = [*embed.trainable_variables, *project.trainable_variables]
    return Training(loss_fn, keras.optimizers.Adam(0.01), trained, batches(images()))


def images_and_captions() -> Fit:
    """CLIP: a model of images and tokens whose outputs are both vectors; the loss compares all pairs of the batch."""

    class Dual(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.embed, self.read = encoder(5), layers.Embedding(20, 6, mask_zero=True), layers.GRU(5)
            self.temperature = self.add_weight(
                shape=(), initializer=keras.initializers.Constant(1.0), name="temperature"
            )

        def call(self, inputs: Any) -> Any:
            image, caption = self.image(inputs["image"]), self.read(self.embed(inputs["caption"]))
            return {"image": ops.normalize(image), "caption": ops.normalize(caption)}

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
        ) -> Any:
            scores = ops.matmul(y_pred["caption"], ops.transpose(y_pred["image"])) * ops.exp(self.temperature)
            target = ops.eye(ops.shape(scores)[0], dtype=scores.dtype)
            both = keras.losses.categorical_crossentropy(target, scores, from_logits=True)
            both += keras.losses.categorical_crossentropy(target, ops.transpose(scores), from_logits=True)
            return ops.mean(both) / 2

    model = Dual()
    model.compile(keras.optimizers.AdamW(0.01))
    inputs = {"image": images(ROWS), "caption": np.random.default_rng(0).integers(0, 20, (ROWS, 5))}
    return Fit(model, tf.data.Dataset.from_tensor_slices((inputs,)).batch(BATCH), None, {"epochs": 2})


def softmax_over_classes() -> Fit:
    """Metric learning: cosines to a vector of each class, with an angular margin for the right one."""

    class Cosines(layers.Layer):
        def build(self, shape: Any) -> None:
            self.centers = self.add_weight(shape=(shape[-1], 4), initializer="glorot_uniform", name="centers")

        def call(self, x: Any) -> Any:
            return ops.matmul(ops.normalize(x, axis=-1), ops.normalize(self.centers, axis=0))

    def arc(y_true: Any, cosine: Any) -> Any:
        right = ops.one_hot(ops.cast(ops.reshape(y_true, (-1,)), "int32"), 4, dtype=cosine.dtype)
        angle = ops.arccos(ops.clip(cosine, -1 + 1e-7, 1 - 1e-7))
        logits = 8.0 * (right * ops.cos(angle + 0.3) + (1 - right) * cosine)
        return ops.categorical_crossentropy(right, logits, from_logits=True)

    entry = keras.Input((8, 8, 1))
    model = keras.Model(entry, Cosines()(encoder()(entry)))
    model.compile(keras.optimizers.Adam(0.005), arc, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return Fit(model, images(ROWS), np.arange(ROWS) % 4, {"batch_size": BATCH, "epochs": 2})


def hardest_triplets() -> Fit:
    """A loss of all pairs of the batch: the farthest of the same class and the nearest of another."""

    def hardest(y_true: Any, z: Any) -> Any:
        label = tf.reshape(y_true, [-1])
        distance = tf.reduce_sum(tf.square(z[:, None] - z[None]), -1)
        same = tf.cast(label[:, None] == label[None], z.dtype)
        far = tf.reduce_max(same * distance, 1)
        near = tf.reduce_min(distance + 1e6 * same, 1)
        return tf.reduce_mean(tf.nn.relu(far - near + 0.2))

    model = encoder()
    model.compile(keras.optimizers.SGD(0.01), hardest)
    return Fit(model, images(ROWS), np.arange(ROWS) % 3, {"batch_size": BATCH, "epochs": 2})


def teacher_and_student() -> Training:
    """Distillation: a frozen teacher's softened answers and the labels, by shares."""
    teacher, student = encoder(4), encoder(4)
    teacher.trainable = False

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        wanted, found = teacher(x, training=False), student(x, training=True)
        hard = keras.losses.sparse_categorical_crossentropy(y, found, from_logits=True)
        soft = keras.losses.kl_divergence(tf.nn.softmax(wanted / 3.0), tf.nn.softmax(found / 3.0)) * 9.0
        return tf.reduce_mean(0.1 * hard + 0.9 * soft)

    data = batches(images(), np.arange(3 * BATCH) % 4)
    return Training(loss_fn, keras.optimizers.Adam(0.01), student.trainable_variables, data)


class Distiller(keras.Model):
    """A student whose ``compute_loss`` asks the teacher."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        teacher.trainable = False

    def call(self, x: Any, training: bool = False) -> Any:
        return self.student(x, training=training)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        hard = super().compute_loss(x, y, y_pred, sample_weight)
        wanted = ops.softmax(self.teacher(x, training=False) / 2.0)
        soft = keras.losses.kl_divergence(wanted, ops.softmax(y_pred / 2.0))
        return 0.3 * hard + 0.7 * ops.mean(soft)


def distillation_by_fit() -> Fit:
    """The same by ``fit``: a model that holds a teacher and a student."""
    model = Distiller(encoder(4), encoder(4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return Fit(model, images(ROWS), np.arange(ROWS) % 4, {"batch_size": BATCH, "epochs": 2})


def momentum_teacher() -> Training:
    """BYOL: a target network that follows the trained one by a moving average in the loss function."""
    online, target = encoder(), encoder()
    predict = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(6)])
    target.set_weights(online.get_weights())
    target.trainable = False

    @tf.function
    def loss_fn(one: Any, two: Any) -> Any:
        for slow, fast in zip(target.variables, online.variables, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        total = 0.0
        for a, b in ((one, two), (two, one)):
            found = tf.math.l2_normalize(predict(online(a, training=True)), -1)
            wanted = tf.stop_gradient(tf.math.l2_normalize(target(b, training=False), -1))
            total += 2 - 2 * tf.reduce_mean(tf.reduce_sum(found * wanted, -1))
        return total

    trained = [*online.trainable_variables, *predict.trainable_variables]
    return Training(loss_fn, keras.optimizers.SGD(0.05, momentum=0.9), trained, batches(images(), images(seed=1)))


def masked_autoencoder() -> Training:
    """MAE: three of four patches, by a drawn order, are hidden from the encoder and predicted."""
    draws = keras.random.SeedGenerator(3)
    look = keras.Sequential([keras.Input((4, 4)), layers.Dense(8)])
    place = tf.Variable(np.random.default_rng(0).normal(size=(16, 8)) / 4, name="place")
    hidden = tf.Variable(np.zeros((1, 1, 8)), name="hidden")
    attend, norm, write = layers.MultiHeadAttention(2, 4), layers.LayerNormalization(), layers.Dense(4)
    attend.build((None, None, 8), (None, None, 8))
    norm.build((None, None, 8))
    write.build((None, None, 8))

    @tf.function
    def loss_fn(image: Any) -> Any:
        rows = tf.shape(image)[0]
        patches = tf.reshape(tf.transpose(tf.reshape(image, [-1, 4, 2, 4, 2]), [0, 1, 3, 2, 4]), [rows, 16, 4])
        order = tf.argsort(keras.random.uniform((rows, 16), seed=draws, dtype=image.dtype))
        kept, left_out = order[:, :4], order[:, 4:]
        seen = look(tf.gather(patches, kept, batch_dims=1)) + tf.gather(place, kept)
        seen = norm(seen + attend(seen, seen))
        asked = tf.tile(hidden, [rows, 12, 1]) + tf.gather(place, left_out)
        x = tf.concat([seen, asked], 1)
        guess = write(x + attend(x, x))[:, 4:]
        return tf.reduce_mean(tf.square(guess - tf.gather(patches, left_out, batch_dims=1)))

    trained = [place, hidden, *(v for part in (look, attend, norm, write) for v in part.trainable_variables)]
    return Training(loss_fn, keras.optimizers.AdamW(0.01), trained, batches(images()))


def perceiver() -> Fit:
    """A few learned vectors attend to many pixels, again and again with the same weights."""

    class Latents(layers.Layer):
        def build(self, shape: Any) -> None:
            self.array = self.add_weight(shape=(4, 8), initializer="random_normal", name="array")

        def call(self, x: Any) -> Any:
            return ops.repeat(ops.expand_dims(self.array, 0), ops.shape(x)[0], axis=0)

    entry = keras.Input((8, 8, 1))
    x = layers.Dense(8)(layers.Reshape((64, 1))(entry))
    z = Latents()(x)
    cross, inner, dense = layers.MultiHeadAttention(1, 8), layers.MultiHeadAttention(2, 4), layers.Dense(8, "gelu")
    for _ in range(2):
        z = layers.LayerNormalization()(z + cross(z, x))
        z = layers.LayerNormalization()(z + inner(z, z))
        z = z + layers.Dropout(0.2)(dense(z))
    model = keras.Model(entry, layers.Dense(4)(layers.GlobalAveragePooling1D()(z)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["acc"])
    return Fit(model, images(ROWS), np.arange(ROWS) % 4, {"batch_size": BATCH, "epochs": 2})


def questions_about_images() -> Fit:
    """Images and words: attention of a question's words over the picture, gated, with a missing sense left out."""
    image, words, present = keras.Input((8, 8, 1)), keras.Input((5,), dtype="int32"), keras.Input((1,))
    picture = layers.Reshape((9, 6))(layers.Conv2D(6, 3, 2, activation="relu")(image))
    question = layers.Embedding(20, 6, mask_zero=True)(words)
    x = layers.MultiHeadAttention(2, 3)(question, picture)
    x = layers.GlobalAveragePooling1D()(x) * present
    read = layers.LSTM(6)(question)
    x = layers.Dropout(0.2)(layers.Concatenate()([x, read, layers.GlobalMaxPooling1D()(picture)]))
    model = keras.Model([image, words, present], layers.Dense(3, "softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x = [images(ROWS), rng.integers(1, 20, (ROWS, 5)), (rng.random((ROWS, 1)) < 0.7) * 1.0]
    return Fit(model, x, np.arange(ROWS) % 3, {"batch_size": BATCH, "epochs": 2})


PROGRAMS = (
    Program(siamese_pairs, ranks=True),
    Program(siamese_triplets),
    Program(contrast_of_views, options=ONCE, ranks=True),
    Program(images_and_captions, options=ONCE, ranks=True),
    Program(softmax_over_classes),
    Program(hardest_triplets, options=ONCE, ranks=True),
    Program(teacher_and_student),
    Program(distillation_by_fit, ranks=True),
    Program(momentum_teacher, ranks=True),
    Program(masked_autoencoder),
    Program(perceiver),
    Program(questions_about_images, ranks=True),
)
