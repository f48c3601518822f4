"""Losses that are no sum over samples: overlaps, correlations, the worst part of a batch, conditions on a loss."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    integers,
    mlp,
    normal,
    trained_with,
    uniform,
)
from benchmarks.exactness_cases.case import Case, refused_and_exact

OUTPUTS = 3


def model() -> Any:
    return mlp(OUTPUTS)


# --- overlaps: losses of (0 or 1 [batch, OUTPUTS], logits)


def overlaps(y: Any, z: Any, axis: Any) -> tuple[Any, Any, Any, Any]:
    """Return the labels as floats, and true positives, false positives and false negatives over ``axis``."""
    y, p = tf.cast(y, z.dtype), tf.sigmoid(z)
    return y, *(tf.reduce_sum(product, axis) for product in (y * p, (1.0 - y) * p, y * (1.0 - p)))


def dice(y: Any, z: Any) -> Any:
    _, tp, fp, fn = overlaps(y, z, None)
    return 1.0 - (2.0 * tp + 1.0) / (2.0 * tp + fp + fn + 1.0)


def dice_of_each_row(y: Any, z: Any) -> Any:
    _, tp, fp, fn = overlaps(y, z, 1)
    return tf.reduce_mean(1.0 - (2.0 * tp + 1.0) / (2.0 * tp + fp + fn + 1.0))


def dice_and_cross_entropy(y: Any, z: Any) -> Any:
    labels = tf.cast(y, z.dtype)
    return dice(y, z) + tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, z))


def tversky(y: Any, z: Any) -> Any:
    _, tp, fp, fn = overlaps(y, z, None)
    return 1.0 - (tp + 1.0) / (tp + 0.3 * fp + 0.7 * fn + 1.0)


def focal_tversky(y: Any, z: Any) -> Any:
    return tf.pow(tversky(y, z), 0.75)


def jaccard(y: Any, z: Any) -> Any:
    _, tp, fp, fn = overlaps(y, z, 0)
    return 1.0 - tf.reduce_mean(tp / (tp + fp + fn + 1e-6))


def soft_f1(y: Any, z: Any) -> Any:
    _, tp, fp, fn = overlaps(y, z, 0)
    return 1.0 - tf.reduce_mean(2.0 * tp / (2.0 * tp + fp + fn + 1e-6))


# --- statistics: losses of (targets [batch, OUTPUTS], predictions)


def pearson(y: Any, z: Any) -> Any:
    y, z = y - tf.reduce_mean(y, 0), z - tf.reduce_mean(z, 0)
    norms = tf.sqrt(tf.reduce_sum(tf.square(y), 0) * tf.reduce_sum(tf.square(z), 0))
    return 1.0 - tf.reduce_mean(tf.reduce_sum(y * z, 0) / norms)


def concordance(y: Any, z: Any) -> Any:
    y_mean, y_variance = tf.nn.moments(y, 0)
    z_mean, z_variance = tf.nn.moments(z, 0)
    covariance = tf.reduce_mean((y - y_mean) * (z - z_mean), 0)
    return tf.reduce_mean(1.0 - 2.0 * covariance / (y_variance + z_variance + tf.square(y_mean - z_mean)))


def root_mean_square(y: Any, z: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(tf.square(y - z)))


def log_of_mean(y: Any, z: Any) -> Any:
    return tf.math.log(tf.reduce_mean(tf.square(y - z)))


def r_squared(y: Any, z: Any) -> Any:
    """The residual sum of squares by the targets' own: a divisor that only depends on the batch."""
    return tf.reduce_sum(tf.square(y - z)) / tf.reduce_sum(tf.square(y - tf.reduce_mean(y, 0)))


def relative_to_loss(y: Any, z: Any) -> Any:
    """Two losses, each divided by its own value, which is taken as a constant."""
    first, second = tf.reduce_mean(tf.square(y - z)), tf.reduce_mean(tf.abs(y - z))
    return first / tf.stop_gradient(first) + second / tf.stop_gradient(second)


def largest_error(y: Any, z: Any) -> Any:
    return tf.reduce_max(tf.square(y - z))


def log_sum_exp(y: Any, z: Any) -> Any:
    """Tilted empirical risk."""
    losses = tf.reduce_mean(tf.square(y - z), 1)
    return tf.reduce_logsumexp(0.5 * losses) / 0.5


def entropy_of_mean(y: Any, z: Any) -> Any:
    """Mutual information: the entropy of the mean prediction is to be large."""
    p = tf.nn.softmax(z)
    mean = tf.reduce_mean(p, 0)
    of_rows = -tf.reduce_mean(tf.reduce_sum(p * tf.math.log(p), 1))
    return of_rows + tf.reduce_sum(mean * tf.math.log(mean)) + tf.reduce_mean(tf.square(y - z))


def relativistic(y: Any, z: Any) -> Any:
    """A relativistic average GAN: real scores against the mean of fake ones."""
    real, fake = z[:, 0], z[:, 1]
    return tf.reduce_mean(tf.math.softplus(-(real - tf.reduce_mean(fake)))) + tf.reduce_mean(
        tf.math.softplus(fake - tf.reduce_mean(real))
    )


# --- the worst part


def hard_examples(y: Any, z: Any) -> Any:
    """The mean of the largest half of the losses (CVaR)."""
    losses = tf.reduce_mean(tf.square(y - z), 1)
    return tf.reduce_mean(tf.math.top_k(losses, tf.shape(losses)[0] // 2).values)


def quantile(y: Any, z: Any) -> Any:
    losses = tf.sort(tf.reduce_mean(tf.square(y - z), 1))
    return losses[tf.cast(tf.shape(losses)[0], tf.int32) * 3 // 4]


def trimmed(y: Any, z: Any) -> Any:
    losses = tf.reduce_mean(tf.square(y - z), 1)
    keep = tf.cast(losses < 2.0 * tf.reduce_mean(losses), z.dtype)
    return tf.reduce_sum(losses * keep) / tf.reduce_sum(keep)


def cond_on_loss(y: Any, z: Any) -> Any:
    loss = tf.reduce_mean(tf.square(y - z))
    return tf.cond(loss > 1.0, lambda: tf.reduce_mean(tf.abs(y - z)), lambda: loss)


def ranking_of_pairs(y: Any, z: Any) -> Any:
    """Every pair of samples that the targets order (an AUC surrogate)."""
    above = tf.cast(y[:, None, 0] > y[None, :, 0], z.dtype)
    losses = above * tf.math.softplus(z[None, :, 0] - z[:, None, 0])
    return tf.reduce_sum(losses) / tf.maximum(tf.reduce_sum(above), 1.0)


def partial_likelihood(y: Any, z: Any) -> Any:
    """Cox regression: risk sets are samples with a later time."""
    order = tf.argsort(y[:, 0], direction="DESCENDING")
    risk = tf.gather(z[:, 0], order)
    return -tf.reduce_mean(risk - tf.math.cumulative_logsumexp(risk))


def difference_to_neighbour(y: Any, z: Any) -> Any:
    return tf.reduce_mean(tf.square(y - z)) + tf.reduce_mean(tf.square(z - tf.roll(z, 1, 0)))


def reversed_targets(y: Any, z: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.reverse(y, [0]) - z))


LABELLED = {
    "dice": dice,
    "dice_and_cross_entropy": dice_and_cross_entropy,
    "tversky": tversky,
    "focal_tversky": focal_tversky,
    "jaccard": jaccard,
    "soft_f1": soft_f1,
}
MEASURED = {
    "pearson": pearson,
    "concordance": concordance,
    "root_mean_square": root_mean_square,
    "log_of_mean": log_of_mean,
    "relative_to_loss": relative_to_loss,
    "largest_error": largest_error,
    "log_sum_exp": log_sum_exp,
    "entropy_of_mean": entropy_of_mean,
    "relativistic_gan": relativistic,
    "hard_examples": hard_examples,
    "quantile_of_losses": quantile,
    "trimmed_mean": trimmed,
    "cond_on_loss": cond_on_loss,
    "ranking_of_pairs": ranking_of_pairs,
    "partial_likelihood": partial_likelihood,
    "difference_to_neighbour": difference_to_neighbour,
}
BITS, FLOATS = integers(2, OUTPUTS), uniform(OUTPUTS, low=-1.0)

CASES = (
    *(
        case
        for name, loss in LABELLED.items()
        for case in refused_and_exact(name, "whole batch", trained_with(model, loss, normal(FEATURES), BITS))
    ),
    *(
        case
        for name, loss in MEASURED.items()
        for case in refused_and_exact(name, "whole batch", trained_with(model, loss, normal(FEATURES), FLOATS))
    ),
    Case("dice_of_each_row", "whole batch", trained_with(model, dice_of_each_row, normal(FEATURES), BITS)),
    Case("r_squared", "whole batch", trained_with(model, r_squared, normal(FEATURES), FLOATS)),
    Case("reversed_targets", "whole batch", trained_with(model, reversed_targets, normal(FEATURES), FLOATS)),
)
