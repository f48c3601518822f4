"""Losses that compare the samples of a batch with each other: refused by default, equal with ``batch_loss=True``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    WIDTH,
    batches,
    integers,
    mlp,
    normal,
    train,
    trained_with,
)
from benchmarks.exactness_cases.case import BATCH_LOSS, Case, Expected, Training, refused_and_exact

EMBEDDING = 4


def encoder() -> Any:
    return mlp(EMBEDDING)


def unit(z: Any) -> Any:
    return tf.math.l2_normalize(z, 1)


def cross_entropy(labels: Any, logits: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def two_views(loss: Callable[..., Any]) -> Callable[[int], Training]:
    """Return the ``make`` of one encoder of two views of each sample: ``loss(first, second)``."""

    def make(seed: int) -> Training:
        model = encoder()
        loss_fn = tf.function(lambda a, b: loss(model(a, training=True), model(b, training=True)))
        return train(model, loss_fn, batches(seed, normal(FEATURES), normal(FEATURES)))

    return make


# --- losses of two views


def nt_xent(a: Any, b: Any) -> Any:
    """SimCLR: each view must find the other among all 2 N - 1."""
    z = tf.concat([unit(a), unit(b)], 0)
    size = tf.shape(a)[0]
    scores = z @ tf.transpose(z) / 0.5 - 1e9 * tf.eye(2 * size, dtype=z.dtype)
    labels = tf.concat([tf.range(size, 2 * size), tf.range(size)], 0)
    return tf.reduce_mean(cross_entropy(labels, scores))


def barlow_twins(a: Any, b: Any) -> Any:
    def standardised(z: Any) -> Any:
        return (z - tf.reduce_mean(z, 0)) / (tf.math.reduce_std(z, 0) + 1e-6)

    size = tf.cast(tf.shape(a)[0], a.dtype)
    correlation = tf.transpose(standardised(a)) @ standardised(b) / size
    target = tf.eye(EMBEDDING, dtype=a.dtype)
    weights = target + 0.1 * (1.0 - target)
    return tf.reduce_sum(weights * tf.square(correlation - target))


def vicreg(a: Any, b: Any) -> Any:
    def spread(z: Any) -> Any:
        return tf.reduce_mean(tf.nn.relu(1.0 - tf.sqrt(tf.math.reduce_variance(z, 0) + 1e-4)))

    return tf.reduce_mean(tf.square(a - b)) + spread(a) + spread(b)


def uniformity(a: Any, b: Any) -> Any:
    """Alignment and uniformity: the log of a mean over pairs."""
    a, b = unit(a), unit(b)
    distances = tf.reduce_sum(tf.square(a[:, None] - a[None]), 2)
    return tf.reduce_mean(tf.reduce_sum(tf.square(a - b), 1)) + tf.math.log(tf.reduce_mean(tf.exp(-2.0 * distances)))


def maximum_mean_discrepancy(a: Any, b: Any) -> Any:
    def kernel(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.exp(-tf.reduce_sum(tf.square(x[:, None] - y[None]), 2)))

    return kernel(a, a) + kernel(b, b) - 2.0 * kernel(a, b)


def coral(a: Any, b: Any) -> Any:
    def covariance(z: Any) -> Any:
        z = z - tf.reduce_mean(z, 0, keepdims=True)
        return tf.matmul(z, z, transpose_a=True) / tf.cast(tf.shape(z)[0] - 1, z.dtype)

    return tf.reduce_sum(tf.square(covariance(a) - covariance(b)))


# --- CLIP and InfoNCE, with a trained temperature


def clip(seed: int) -> Training:
    """Two towers; the temperature is a variable that only the loss reads."""
    image, text = mlp(EMBEDDING), mlp(EMBEDDING, features=WIDTH)
    scale = tf.Variable(tf.constant(0.7, keras.config.floatx()), name="logit_scale")

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        scores = tf.exp(scale) * tf.matmul(unit(image(x)), unit(text(y)), transpose_b=True)
        labels = tf.range(tf.shape(x)[0])
        both = cross_entropy(labels, scores), cross_entropy(labels, tf.transpose(scores))
        return (tf.reduce_mean(both[0]) + tf.reduce_mean(both[1])) / 2.0

    return train(
        image, loss_fn, batches(seed, normal(FEATURES), normal(WIDTH)), extra=[*text.trainable_variables, scale]
    )


def info_nce(seed: int) -> Training:
    """Negatives from the batch, and an aux output that needs the whole batch too."""
    model = encoder()
    temperature = tf.Variable(tf.constant(0.5, keras.config.floatx()), name="temperature")

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        query, key = unit(model(x)), unit(model(y))
        scores = tf.matmul(query, key, transpose_b=True) / temperature
        labels = tf.range(tf.shape(x)[0])
        right = tf.equal(tf.argmax(scores, 1, output_type=tf.int32), labels)
        loss = tf.reduce_mean(cross_entropy(labels, scores))
        return loss, {"accuracy": tf.reduce_mean(tf.cast(right, x.dtype))}

    return train(model, loss_fn, batches(seed, normal(FEATURES), normal(FEATURES)), extra=[temperature])


def sigmoid_pairs(seed: int) -> Training:
    """SigLIP: every pair of the batch is a binary decision."""
    image, text = mlp(EMBEDDING), mlp(EMBEDDING)
    bias = tf.Variable(tf.constant(-1.0, keras.config.floatx()), name="bias")

    @tf.function
    def loss_fn(x: Any, y: Any) -> Any:
        scores = 2.0 * tf.matmul(unit(image(x)), unit(text(y)), transpose_b=True) + bias
        size = tf.shape(x)[0]
        signs = 2.0 * tf.eye(size, dtype=x.dtype) - 1.0
        return tf.reduce_sum(tf.math.softplus(-signs * scores)) / tf.cast(size, x.dtype)

    data = batches(seed, normal(FEATURES), normal(FEATURES))
    return train(image, loss_fn, data, extra=[*text.trainable_variables, bias])


# --- with labels


def supervised_contrastive(y: Any, z: Any) -> Any:
    z = unit(z)
    size = tf.shape(z)[0]
    others = 1.0 - tf.eye(size, dtype=z.dtype)
    same = tf.cast(y[:, None] == y[None], z.dtype) * others
    scores = z @ tf.transpose(z) / 0.5 - 1e9 * (1.0 - others)
    log = scores - tf.reduce_logsumexp(scores, 1, keepdims=True)
    return -tf.reduce_mean(tf.reduce_sum(same * log, 1) / tf.maximum(tf.reduce_sum(same, 1), 1.0))


def batch_hard(y: Any, z: Any) -> Any:
    """The farthest positive and the nearest negative in the batch."""
    distances = tf.reduce_sum(tf.square(z[:, None] - z[None]), 2)
    same = tf.cast(y[:, None] == y[None], z.dtype)
    positive = tf.reduce_max(distances * same, 1)
    negative = tf.reduce_min(distances + 1e3 * same, 1)
    return tf.reduce_mean(tf.nn.relu(positive - negative + 0.5))


def center(y: Any, z: Any) -> Any:
    """Distances to the mean of the class in this batch."""
    chosen = tf.one_hot(y, 3, dtype=z.dtype)
    centers = tf.matmul(chosen, z, transpose_a=True) / tf.maximum(tf.reduce_sum(chosen, 0), 1.0)[:, None]
    return tf.reduce_mean(tf.square(z - tf.gather(centers, y)))


# --- losses that look alike, but compare only what belongs to one sample


def given_triplets(seed: int) -> Training:
    model = encoder()

    @tf.function
    def loss_fn(anchor: Any, positive: Any, negative: Any) -> Any:
        a, p, n = (model(x) for x in (anchor, positive, negative))
        near, far = (tf.reduce_sum(tf.square(a - other), 1) for other in (p, n))
        return tf.reduce_mean(tf.nn.relu(near - far + 0.5))

    return train(model, loss_fn, batches(seed, *[normal(FEATURES)] * 3))


def given_negatives(seed: int) -> Training:
    """Each sample brings its own negatives."""
    model = encoder()

    @tf.function
    def loss_fn(x: Any, others: Any) -> Any:
        flat = model(tf.reshape(others, (-1, FEATURES)))
        keys = tf.reshape(flat, (-1, 5, EMBEDDING))
        scores = tf.einsum("be,bke->bk", unit(model(x)), tf.math.l2_normalize(keys, 2)) / 0.5
        return tf.reduce_mean(cross_entropy(tf.zeros(tf.shape(x)[0], tf.int32), scores))

    return train(model, loss_fn, batches(seed, normal(FEATURES), normal(5, FEATURES)))


def with_labels(loss: Any) -> Any:
    return trained_with(encoder, loss, normal(FEATURES), integers(3))


AUTO = {"batch_loss": "auto", "schedule": "auto"}
ONE_FORWARD_ONE_BACKWARD = {"batch_loss": True, "schedule": "dapple-a"}
"""The whole batch's rows are there once all forwards have run: a schedule that begins backwards before is refused."""

CASES = (
    *refused_and_exact("simclr", "contrastive", two_views(nt_xent)),
    Case("simclr_batch_loss_auto", "contrastive", two_views(nt_xent), options=AUTO),
    Case("simclr_batch_loss_1f1b", "contrastive", two_views(nt_xent), Expected.REFUSED, ONE_FORWARD_ONE_BACKWARD),
    Case("triplets_given_batch_loss", "contrastive", given_triplets, options=BATCH_LOSS),
    *refused_and_exact("barlow_twins", "contrastive", two_views(barlow_twins)),
    *refused_and_exact("vicreg", "contrastive", two_views(vicreg)),
    *refused_and_exact("uniformity", "contrastive", two_views(uniformity)),
    *refused_and_exact("mmd", "contrastive", two_views(maximum_mean_discrepancy)),
    *refused_and_exact("coral", "contrastive", two_views(coral)),
    *refused_and_exact("clip", "contrastive", clip),
    *refused_and_exact("info_nce", "contrastive", info_nce),
    *refused_and_exact("sigmoid_pairs", "contrastive", sigmoid_pairs),
    *refused_and_exact("supervised_contrastive", "contrastive", with_labels(supervised_contrastive)),
    *refused_and_exact("triplets_batch_hard", "contrastive", with_labels(batch_hard)),
    *refused_and_exact("center_of_class", "contrastive", with_labels(center)),
    Case("triplets_given", "contrastive", given_triplets),
    Case("negatives_given", "contrastive", given_negatives),
)
