"""Which ranks hold which variables' values: each rank knows it of all, since all make the same steps.

A value that is held anywhere is the trained one. What a step would leave behind is dropped before it runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

Ranks = frozenset[int]


@dataclass(frozen=True, eq=False)
class Needs:
    """The variables that a program knows, each with the ranks that read or write it there (none: it is left alone)."""

    ranks: Sequence[tuple[tf.Variable, Ranks]]


@dataclass
class Holdings:
    """For each variable the ranks that hold it, and whose ``needs`` that is (None: since then all were gathered).

    ``release`` frees again what the user has assigned meanwhile to variables that this rank does not hold.
    """

    needs: Needs | None = None
    release: Callable[[], None] | None = None
    _held: dict[int, tuple[weakref.ref[tf.Variable], Ranks]] = field(default_factory=dict)

    def of(self, variable: tf.Variable) -> Ranks | None:
        """The ranks that hold the variable's value; None where nothing is known of it: each may have one of its own."""
        found = self._held.get(id(variable))
        return None if found is None else found[1]

    def put(self, variable: tf.Variable, ranks: Ranks) -> None:
        """Note that these ranks, and no others, hold the variable's value."""
        key = id(variable)
        self._held[key] = weakref.ref(variable, lambda _: self._held.pop(key, None)), ranks

    def source(self, variable: tf.Variable) -> int:
        """The rank to ask for the value: the first that holds it."""
        return min(self.of(variable) or {0})


@functools.cache
def holdings() -> Holdings:
    """The holdings of this process's job: there is one, and steps of the same model share it."""
    return Holdings()
