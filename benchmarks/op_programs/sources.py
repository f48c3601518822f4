"""The tensors that random programs are made of: rows in several layouts, statistics, sizes, totals, constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

FEATURES = 24
SHAPES: Mapping[int, tuple[int, ...]] = {1: (), 2: (4,), 3: (3, 4), 4: (2, 3, 4), 5: (2, 3, 2, 2)}
"""The shape of a sample for each rank of a batch."""
SEED = (3, 5)


class Choices:
    """A stream of decisions, read from numbers; after the last one the first option is always taken."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)

    def number(self, below: int) -> int:
        """Return a number from 0 on that is less than ``below``."""
        return next(self._numbers, 0) % below

    def of(self, options: Sequence[Any]) -> Any:
        """Return one of the options."""
        return options[self.number(len(options))]


@dataclass
class Pool:
    """The tensors of one trace: arguments ``x`` [N, 24] and ``ids`` [N] below 4, and trained variables.

    ``w`` has an entry for each feature; ``earlier``: the results of the ops that were applied before.
    """

    x: Any
    ids: Any
    w: Any
    choices: Choices
    earlier: list[Any] = field(default_factory=list)

    @property
    def size(self) -> Any:
        """The number of samples."""
        return tf.shape(self.x)[0]

    def plain(self, rank: int, *, trained: bool = True) -> Any:
        """Return a batch of this rank with the samples on axis 0."""
        shape = SHAPES[rank]
        entries = self.x * self.w if trained else self.x
        return tf.reshape(entries[:, : _product(shape)], tf.stack([self.size, *shape]))

    def rows(self, rank: int | None = None) -> Any:
        """Return rows of samples in one of many layouts."""
        pick = self.choices
        rank = pick.of((2, 3, 1, 4, 5)) if rank is None else rank
        result = self.plain(rank, trained=pick.number(4) < 3)
        return pick.of(_LAYOUTS)(self, result)

    def floats(self, rank: int | None = None) -> Any:
        """Return a float tensor of any kind; mostly rows."""
        pick = self.choices
        found = [value for value in self.earlier if value.dtype == tf.float64]
        if found and pick.number(2):
            return pick.of(found)
        return self.rows(rank) if pick.number(3) < 2 else pick.of(_OTHERS)(self)

    def fitting(self, rank: int) -> Any:
        """Return a float tensor that is likely to fit others of the same rank."""
        pick = self.choices
        return pick.of(
            (
                lambda: self.plain(rank),
                lambda: self.plain(rank, trained=False),
                lambda: self.plain(rank) * 0.5,
                lambda: self.rows(rank),
                lambda: self.floats(rank),
                lambda: self.plain(rank)[..., :1] if rank > 1 else self.plain(1),
            )
        )()

    def ints(self) -> Any:
        """Return an integer tensor of any kind."""
        return self.choices.of(_INTEGERS)(self)

    def bools(self) -> Any:
        """Return a boolean tensor of any kind."""
        return self.floats() > self.choices.of((0.0, -0.5))

    def of_type(self, dtype: tf.DType) -> Any:
        """Return a tensor of this type. Raises TypeError for a type that no source has."""
        if dtype in (tf.float64, tf.float32):
            return tf.cast(self.fitting(2) if self.choices.number(3) else self.floats(), dtype)
        if dtype == tf.bool:
            return self.bools()
        if dtype in (tf.int32, tf.int64):
            return tf.cast(self.ints(), dtype)
        if dtype in (tf.complex64, tf.complex128):
            return tf.cast(tf.complex(value := self.floats(), tf.sin(value)), dtype)
        if dtype == tf.string:
            return tf.as_string(self.ints())
        raise TypeError(f"no source gives tensors of {dtype}")


Make = Callable[[Pool], Any]


def _product(shape: Sequence[int]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result


def _move(axis: int) -> Callable[[Pool, Any], Any]:
    def transpose(pool: Pool, value: Any) -> Any:
        rank = value.shape.rank
        at = min(axis, rank - 1)
        order = [*range(1, rank)]
        order.insert(at, 0)
        return tf.transpose(value, order)

    return transpose


_LAYOUTS: Sequence[Callable[[Pool, Any], Any]] = (
    lambda pool, value: value,
    lambda pool, value: value,
    _move(1),
    lambda pool, value: tf.concat([value, pool.plain(value.shape.rank, trained=False)], 0),
    _move(4),
    lambda pool, value: tf.repeat(value, 2, axis=0),
    lambda pool, value: tf.tile(value, [2] + [1] * (value.shape.rank - 1)),
    lambda pool, value: tf.reshape(value, [-1]),
    lambda pool, value: value[None],
    lambda pool, value: value[:, None],
    lambda pool, value: value[..., None],
    lambda pool, value: tf.boolean_mask(value, pool.ids > 0),
    _move(2),
    lambda pool, value: tf.boolean_mask(value, pool.x[:, 0] > 0),
    lambda pool, value: value[..., :1],
)
_OTHERS: Sequence[Make] = (
    lambda pool: tf.constant([0.5, -1.5, 2.0, 1.0], tf.float64),
    lambda pool: pool.w[:4],
    lambda pool: tf.reduce_sum(pool.x[:, :4], 0),
    lambda pool: tf.constant(0.75, tf.float64),
    lambda pool: tf.cast(pool.size, tf.float64),
    lambda pool: tf.ones(tf.stack([pool.size, 4]), tf.float64),
    lambda pool: tf.zeros([4, 3], tf.float64) + 0.5,
    lambda pool: tf.reduce_mean(pool.plain(2), 0),
    lambda pool: tf.reduce_sum(pool.plain(2)),
    lambda pool: tf.reduce_max(pool.x, keepdims=True),
    lambda pool: tf.random.stateless_normal(tf.stack([pool.size, 4]), SEED, dtype=tf.float64),
    lambda pool: tf.cast(tf.range(pool.size), tf.float64),
    lambda pool: tf.random.stateless_normal(
        tf.broadcast_dynamic_shape(tf.shape(pool.plain(3)), tf.constant([1, 4])), SEED, dtype=tf.float64
    ),
    lambda pool: tf.cast(tf.shape(pool.x[1:])[0], tf.float64),
    lambda pool: tf.squeeze(pool.plain(2)[:, None]),
)
_INTEGERS: Sequence[Make] = (
    lambda pool: pool.ids,
    lambda pool: pool.ids[:, None],
    lambda pool: tf.constant([2, 0, 1]),
    lambda pool: tf.constant(1),
    lambda pool: tf.range(pool.size),
    lambda pool: tf.stack([tf.range(pool.size), pool.ids], 1),
    lambda pool: pool.size,
    lambda pool: tf.cast(pool.plain(2) * 3.0, tf.int32),
    lambda pool: tf.reduce_max(pool.ids),
    lambda pool: tf.shape(pool.plain(2)),
    lambda pool: tf.cast(pool.plain(3, trained=False) * 2.0, tf.int32),
    lambda pool: tf.range(2 * pool.size),
    lambda pool: tf.math.bincount(pool.ids, minlength=4, maxlength=4),
)
