"""Which ranks hold the trained values of which variables.

Every rank knows this of all variables, for all ranks make the same steps. A value that some rank holds is the trained
one: a rank drops a value before it runs a step that would leave the value outdated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf  # the command line imports this module before TensorFlow

Ranks = frozenset[int]


@dataclass(frozen=True, eq=False)
class VariableNeeds:
    """The variables of a program, each with the ranks whose part reads or writes it (none: it stays where it is)."""

    ranks: Sequence[tuple[tf.Variable, Ranks]]


@dataclass
class VariableLocations:
    """The ranks that hold each variable's trained value.

    ``placed_for``: the needs that the locations meet; None after a gather, which gives all values to all ranks.
    ``release`` frees the values that the user has assigned since to variables that this rank does not hold.
    """

    placed_for: VariableNeeds | None = None
    release: Callable[[], None] | None = None
    _ranks: dict[int, tuple[weakref.ref[tf.Variable], Ranks]] = field(default_factory=dict)

    def ranks_of(self, variable: tf.Variable) -> Ranks | None:
        """Return the ranks that hold the variable; None if it was never placed: each may have a value of its own."""
        found = self._ranks.get(id(variable))
        return None if found is None else found[1]

    def set_ranks(self, variable: tf.Variable, ranks: Ranks) -> None:
        """Note that these ranks, and no others, hold the variable."""
        key = id(variable)
        self._ranks[key] = weakref.ref(variable, lambda _: self._ranks.pop(key, None)), ranks

    def source(self, variable: tf.Variable) -> int:
        """Return the rank that sends the value to others: the first that holds it."""
        return min(self.ranks_of(variable) or {0})
