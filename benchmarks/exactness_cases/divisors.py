"""Sums, divisors, conditions, state and further outputs of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.exactness_cases.builders import (
    FEATURES,
    batches,
    cross_entropy,
    integers,
    mask,
    mlp,
    normal,
    train,
)
from benchmarks.exactness_cases.case import Case, Training, refused_and_exact

CLASSES = 3


def reduced(reduce: Callable[[Any, Any], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a classifier; ``reduce(losses, keep)``, of each sample [batch], returns loss, or aux."""

    def make(seed: int) -> Training:
        model = mlp(CLASSES)
        loss_fn = tf.function(lambda x, y, keep: reduce(cross_entropy(y, model(x)), keep))
        return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), mask()))

    return make


# --- sums and divisors


def explicit_size(losses: Any, keep: Any) -> Any:
    return tf.reduce_sum(losses) / tf.cast(tf.shape(losses)[0], losses.dtype)


def tf_size(losses: Any, keep: Any) -> Any:
    return tf.reduce_sum(losses) / tf.cast(tf.size(losses), losses.dtype)


def inverse_of_size(losses: Any, keep: Any) -> Any:
    return tf.reduce_sum(losses * (1.0 / tf.cast(tf.shape(keep)[0], losses.dtype)))


def by_less_than_size(losses: Any, keep: Any) -> Any:
    return tf.reduce_sum(losses) / (tf.cast(tf.shape(losses)[0], losses.dtype) - 1.0)


def root_of_size(losses: Any, keep: Any) -> Any:
    return tf.reduce_sum(losses) / tf.sqrt(tf.cast(tf.shape(losses)[0], losses.dtype))


def unreduced_mean(losses: Any, keep: Any) -> Any:
    return tf.tensordot(losses, keep, 1) / tf.reduce_sum(keep)


def einsum_mean(losses: Any, keep: Any) -> Any:
    return tf.einsum("b,b->", losses, keep) / tf.reduce_sum(keep)


def sum_of_terms(losses: Any, keep: Any) -> Any:
    return tf.reduce_mean(losses) + tf.reduce_sum(losses * keep) / tf.reduce_sum(keep) + tf.reduce_sum(losses) / 50.0


def product_of_counts(losses: Any, keep: Any) -> Any:
    share = tf.reduce_mean(keep)
    return tf.reduce_mean(losses * keep) / (share + 0.1) * tf.sqrt(share)


# --- conditions


def cond_on_statistic(losses: Any, keep: Any) -> Any:
    kept = tf.reduce_sum(keep)
    return tf.cond(kept > 0.0, lambda: tf.reduce_sum(losses * keep) / kept, lambda: 0.0 * tf.reduce_sum(losses))


def cond_on_count(losses: Any, keep: Any) -> Any:
    many = tf.reduce_sum(tf.cast(keep > 0.0, tf.int32)) > 4
    return tf.cond(many, lambda: tf.reduce_mean(losses), lambda: 2.0 * tf.reduce_mean(tf.square(losses)))


def loop_by_count(losses: Any, keep: Any) -> Any:
    scale = tf.while_loop(lambda v: v < tf.reduce_sum(keep), lambda v: (2.0 * v,), (tf.constant(1.0, losses.dtype),))[0]
    return tf.reduce_mean(losses) / scale


def where_of_rows(losses: Any, keep: Any) -> Any:
    return tf.reduce_mean(tf.where(losses > 1.0, losses, 0.5 * tf.square(losses)))


def where_of_statistic(losses: Any, keep: Any) -> Any:
    mean = tf.reduce_mean(losses)
    return tf.where(tf.reduce_sum(keep) > 4.0, mean, 2.0 * mean)


# --- state


def counted(kind: str) -> Callable[[int], Training]:
    """Return the ``make`` of a loss that assigns a variable: a number of steps or tokens, its own mean ..."""

    def make(seed: int) -> Training:
        model = mlp(CLASSES)
        dtype = keras.config.floatx()
        steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps")
        seen = tf.Variable(0.0, dtype=dtype, trainable=False, name="seen")

        @tf.function
        def loss_fn(x: Any, y: Any, keep: Any) -> Any:
            losses = cross_entropy(y, model(x))
            loss = tf.reduce_sum(losses * keep) / tf.reduce_sum(keep)
            if kind == "steps":
                steps.assign_add(1)
            if kind == "tokens":
                seen.assign_add(tf.reduce_sum(keep))
            if kind == "samples":
                steps.assign_add(tf.shape(x, tf.int64)[0])
            if kind == "loss":
                seen.assign(0.9 * seen + 0.1 * loss)
            if kind == "warm up":
                loss *= tf.minimum(tf.cast(steps.assign_add(1), loss.dtype) / 2.0, 1.0)
            if kind == "balance":  # PID control by a statistic of the batch
                seen.assign(0.5 * seen + 0.5 * tf.reduce_mean(keep))
                loss *= 1.0 + seen
            return loss

        return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES), mask()))

    return make


# --- further outputs


def with_aux(make_aux: Callable[[Any, Any, Any], Any]) -> Callable[[int], Training]:
    """Return the ``make`` of a classifier with the outputs ``make_aux(losses, logits, y)``."""

    def make(seed: int) -> Training:
        model = mlp(CLASSES)

        @tf.function
        def loss_fn(x: Any, y: Any) -> Any:
            logits = model(x)
            losses = cross_entropy(y, logits)
            return tf.reduce_mean(losses), make_aux(losses, logits, y)

        return train(model, loss_fn, batches(seed, normal(FEATURES), integers(CLASSES)))

    return make


def right(logits: Any, y: Any) -> Any:
    return tf.equal(tf.argmax(logits, 1, output_type=tf.int32), y)


def masked_accuracy(losses: Any, logits: Any, y: Any) -> Any:
    keep = tf.cast(y > 0, losses.dtype)
    return {"accuracy": tf.reduce_sum(tf.cast(right(logits, y), losses.dtype) * keep) / tf.reduce_sum(keep)}


def several(losses: Any, logits: Any, y: Any) -> Any:
    return {
        "of samples": {"losses": losses, "right": right(logits, y)},
        "count": tf.reduce_sum(tf.cast(right(logits, y), tf.int32)),
        "mean": tf.reduce_mean(logits),
        "version": tf.constant(3),
    }


CASES = (
    *(
        Case(name, "divisors", reduced(reduce))
        for name, reduce in {
            "sum": lambda losses, keep: tf.reduce_sum(losses),
            "sum_by_constant": lambda losses, keep: tf.reduce_sum(losses) / 12.0,
            "sum_times_constant": lambda losses, keep: 0.05 * tf.reduce_sum(losses * keep),
            "sum_by_batch_size": explicit_size,
            "sum_by_tf_size": tf_size,
            "sum_by_inverse_of_size": inverse_of_size,
            "sum_by_size_less_one": by_less_than_size,
            "sum_by_root_of_size": root_of_size,
            "dot_product_with_mask": unreduced_mean,
            "einsum_with_mask": einsum_mean,
            "sum_of_terms": sum_of_terms,
            "product_of_statistics": product_of_counts,
            "cond_on_statistic": cond_on_statistic,
            "cond_on_count": cond_on_count,
            "loop_by_count": loop_by_count,
            "where_of_rows": where_of_rows,
            "where_of_statistic": where_of_statistic,
        }.items()
    ),
    *(
        Case(f"state_{kind.replace(' ', '_')}", "state", counted(kind))
        for kind in ("steps", "tokens", "samples", "warm up", "balance")
    ),
    *refused_and_exact("state_running_mean_of_loss", "state", counted("loss")),
    *(
        Case(name, "aux", with_aux(make_aux))
        for name, make_aux in {
            "aux_of_samples": lambda losses, logits, y: {"losses": losses, "logits": logits},
            "aux_mean": lambda losses, logits, y: tf.reduce_mean(logits),
            "aux_integer_constant": lambda losses, logits, y: {"version": tf.constant(3)},
            "aux_float_constant": lambda losses, logits, y: {"rate": tf.constant(0.5, losses.dtype)},
            "aux_count": lambda losses, logits, y: {"right": tf.reduce_sum(tf.cast(right(logits, y), tf.int32))},
            "aux_batch_size": lambda losses, logits, y: {"samples": tf.shape(y)[0]},
            "aux_accuracy": lambda losses, logits, y: tf.reduce_mean(tf.cast(right(logits, y), losses.dtype)),
            "aux_masked_accuracy": masked_accuracy,
            "aux_sum": lambda losses, logits, y: {"total": tf.reduce_sum(losses)},
            "aux_several": several,
        }.items()
    ),
)
