"""Random losses as data: terms of rows, masks, draws, reductions, divisors and conditions on a small model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from benchmarks.exactness_cases.builders import batches, integers, mask, normal
from benchmarks.exactness_cases.case import Case, Training

WIDTH = 4


@dataclass(frozen=True)
class Arguments:
    """The arguments of a loss: ``x`` and ``y`` [batch, WIDTH], ``keep`` [batch] of 0 and 1, ``ids`` [batch]."""

    x: Any
    y: Any
    keep: Any
    ids: Any


# --- what a loss is made of. The tables hold functions of tensors; the names in COUPLED do not add up over a batch.

# Rows [batch, WIDTH] of the model's output z.
ROWS: Mapping[str, Callable[[Any, Arguments], Any]] = {
    "square": lambda z, a: tf.square(z - a.y),
    "absolute": lambda z, a: tf.abs(z - a.y),
    "softplus": lambda z, a: tf.math.softplus(z * a.y),
    "cross entropy": lambda z, a: -tf.nn.log_softmax(z) * tf.one_hot(a.ids, WIDTH, dtype=z.dtype),
    "where": lambda z, a: tf.where(a.y > 0.0, tf.square(z), tf.abs(z)),
    "huber": lambda z, a: tf.where(tf.abs(z - a.y) > 1.0, tf.abs(z - a.y), tf.square(z - a.y)),
    "cumulative": lambda z, a: tf.square(tf.cumsum(z - a.y, 1)),
    "noise": lambda z, a: tf.square(z + tf.random.stateless_normal(tf.shape(z), [1, 2], dtype=z.dtype) - a.y),
    "dropout": lambda z, a: tf.square(tf.nn.experimental.stateless_dropout(z, 0.4, seed=[3, 4]) - a.y),
    "centred targets": lambda z, a: tf.square(z - (a.y - tf.reduce_mean(a.y, 0))),
    "centred": lambda z, a: tf.square(z - tf.reduce_mean(z, 0) - a.y),
    "softmax of batch": lambda z, a: tf.nn.softmax(z, 0) * tf.square(a.y),
    "neighbour": lambda z, a: tf.square(z - tf.roll(z, 1, 0)),
    "similarity": lambda z, a: tf.square(tf.matmul(z, z, transpose_b=True) @ a.y),
}

# Rows [batch] from rows [batch, WIDTH].
FEATURES: Mapping[str, Callable[[Any], Any]] = {
    "sum": lambda rows: tf.reduce_sum(rows, 1),
    "mean": lambda rows: tf.reduce_mean(rows, 1),
    "max": lambda rows: tf.reduce_max(rows, 1),
    "root": lambda rows: tf.sqrt(tf.reduce_mean(tf.square(rows), 1) + 0.1),
}

# Weights [batch].
WEIGHTS: Mapping[str, Callable[[Arguments], Any]] = {
    "none": lambda a: tf.ones_like(a.keep),
    "mask": lambda a: a.keep,
    "share of mask": lambda a: a.keep / tf.reduce_sum(a.keep),
    "class counts": lambda a: (
        1.0 / tf.gather(1.0 + tf.reduce_sum(tf.one_hot(a.ids, WIDTH, dtype=a.keep.dtype), 0), a.ids)
    ),
    "by largest": lambda a: tf.abs(a.y[:, 0]) / tf.reduce_max(tf.abs(a.y)),
}

# Reductions over the batch.
REDUCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "max": tf.reduce_max,
    "log sum exp": tf.reduce_logsumexp,
    "root": lambda rows: tf.sqrt(tf.reduce_mean(rows) ** 2 + 0.1),
    "largest half": lambda rows: tf.reduce_mean(tf.math.top_k(rows, (tf.shape(rows)[0] + 1) // 2).values),
}

DIVISORS: Mapping[str, Callable[[Any, Arguments], Any]] = {
    "none": lambda rows, a: tf.ones((), rows.dtype),
    "constant": lambda rows, a: tf.constant(12.0, rows.dtype),
    "batch size": lambda rows, a: tf.cast(tf.shape(a.x)[0], rows.dtype),
    "tf.size": lambda rows, a: tf.cast(tf.size(rows), rows.dtype),
    "size + 1": lambda rows, a: tf.cast(tf.shape(rows)[0] + 1, rows.dtype),
    "count": lambda rows, a: tf.reduce_sum(a.keep),
    "mean of mask": lambda rows, a: tf.reduce_mean(a.keep),
    "deviation": lambda rows, a: tf.math.reduce_std(a.y) + 0.1,
    "classes": lambda rows, a: tf.cast(tf.reduce_max(a.ids) + 1, rows.dtype),
    "own value": lambda rows, a: tf.stop_gradient(tf.abs(tf.reduce_mean(rows))) + 0.1,
}

CONDITIONS: Mapping[str, Callable[[Any, Arguments], Any]] = {
    "none": lambda term, a: term,
    "cond on count": lambda term, a: tf.cond(tf.reduce_sum(a.keep) > 7.0, lambda: term, lambda: 2.0 * term),
    "cond on mean": lambda term, a: tf.cond(tf.reduce_mean(a.y) > 0.0, lambda: 0.5 * term, lambda: term),
    "where on largest": lambda term, a: tf.where(tf.reduce_max(a.y) > 2.0, 3.0 * term, term),
    "cond on size": lambda term, a: tf.cond(tf.shape(a.x)[0] > 8, lambda: 2.0 * term, lambda: term),
    "cond on term": lambda term, a: tf.cond(term > 1.0, lambda: tf.math.log(term), lambda: term - 1.0),
}

REGULARISERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "none": lambda w: 0.0,
    "l2": lambda w: 0.1 * tf.add_n([tf.nn.l2_loss(matrix) for matrix in w]),
    "l1": lambda w: 0.01 * tf.reduce_sum(tf.abs(w[1])),
    "norm": lambda w: 0.1 * tf.norm(tf.convert_to_tensor(w[0])),
}

AUX: Mapping[str, Callable[[Any, Arguments], Any]] = {
    "rows": lambda z, a: z,
    "mean": lambda z, a: tf.reduce_mean(z),
    "count": lambda z, a: tf.reduce_sum(tf.cast(z[:, 0] > a.y[:, 0], tf.int32)),
    "constant": lambda z, a: tf.constant(5),
    "size": lambda z, a: tf.shape(z)[0],
}

COUPLED = frozenset(
    {
        *("centred", "softmax of batch", "neighbour", "similarity"),
        *("own value", "cond on term"),
    }
)


@dataclass(frozen=True)
class Term:
    """One term: names of the tables above."""

    rows: str
    features: str
    weights: str
    reduction: str
    divisor: str
    condition: str

    @property
    def adds_up(self) -> bool:
        """Whether the sum over the samples of a batch is exact, once all statistics of the arguments are known."""
        coupled = {self.rows, self.divisor, self.condition} & COUPLED
        return not coupled and self.reduction in ("sum", "mean")

    def compute(self, z: Any, a: Arguments) -> Any:
        rows = FEATURES[self.features](ROWS[self.rows](z, a)) * WEIGHTS[self.weights](a)
        return CONDITIONS[self.condition](REDUCTIONS[self.reduction](rows) / DIVISORS[self.divisor](rows, a), a)


@dataclass(frozen=True)
class Loss:
    """A sum of terms. ``aux``: names of further outputs; ``counts``: the loss counts its steps in a variable."""

    terms: tuple[Term, ...]
    regulariser: str
    aux: tuple[str, ...]
    counts: bool

    @property
    def adds_up(self) -> bool:
        return all(term.adds_up for term in self.terms)


def losses() -> st.SearchStrategy[Loss]:
    """Draw losses; those that add up are about as many as the others."""
    exact = st.builds(
        Term,
        *(_names(ROWS), _names(FEATURES), _names(WEIGHTS), st.sampled_from(["mean", "sum"])),
        *(_names(DIVISORS), _names(CONDITIONS)),
    )
    any_term = st.builds(Term, *(st.sampled_from([*t]) for t in (ROWS, FEATURES, WEIGHTS, REDUCTIONS)), *_any_ends())
    terms = st.one_of(st.lists(exact, min_size=1, max_size=3), st.lists(any_term, min_size=1, max_size=2))
    aux = st.lists(st.sampled_from([*AUX]), max_size=2, unique=True).map(tuple)
    return st.builds(Loss, terms.map(tuple), st.sampled_from([*REGULARISERS]), aux, st.booleans())


def _names(table: Mapping[str, Any]) -> st.SearchStrategy[str]:
    return st.sampled_from([name for name in table if name not in COUPLED])


def _any_ends() -> tuple[st.SearchStrategy[str], st.SearchStrategy[str]]:
    return st.sampled_from([*DIVISORS]), st.sampled_from([*CONDITIONS])


def as_case(loss: Loss, options: Mapping[str, Any]) -> Case:
    """Return a case that trains three matrices with this loss."""

    def make(seed: int) -> Training:
        random = np.random.default_rng(seed)
        values = [random.normal(size=(WIDTH, WIDTH)) * 0.6 for _ in range(3)]
        w = [tf.Variable(tf.constant(value, tf.float64), name=f"w{i}") for i, value in enumerate(values)]
        steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="steps")

        def loss_fn(x: Any, y: Any, keep: Any, ids: Any) -> Any:
            a = Arguments(x, y, keep, ids)
            z = tf.tanh(tf.tanh(x @ w[0]) @ w[1]) @ w[2]
            total = tf.add_n([term.compute(z, a) for term in loss.terms]) + REGULARISERS[loss.regulariser](w)
            if loss.counts:
                steps.assign_add(1)
            return (total, {name: AUX[name](z, a) for name in loss.aux}) if loss.aux else total

        columns = (normal(WIDTH), normal(WIDTH), mask(), integers(WIDTH))
        return Training(tf.function(loss_fn), keras.optimizers.SGD(0.05, momentum=0.9), w, batches(seed, *columns))

    return Case("random", "random", make, options=options)
