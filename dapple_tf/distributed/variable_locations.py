"""Find for each variable which ranks hold its trained values.

Every rank knows this for all variables, since all ranks run the same steps. A value that a rank holds is the trained
one: before a step after which a value would be outdated, the rank drops it.
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
    """The variables of a program, each with the ranks whose part uses it; if no rank does, it stays where it is."""

    ranks: Sequence[tuple[tf.Variable, Ranks]]

    def joined(self, later: VariableNeeds) -> VariableNeeds:
        """Return the needs of a program that runs this one's part and a ``later`` one."""
        known = {id(variable): ranks for variable, ranks in self.ranks}
        added = {id(variable): ranks for variable, ranks in later.ranks}
        variables = {id(variable): variable for variable, _ in (*self.ranks, *later.ranks)}
        none = Ranks()
        return VariableNeeds([(v, known.get(key, none) | added.get(key, none)) for key, v in variables.items()])


@dataclass
class VariableLocations:
    """The ranks that hold each variable's trained value.

    ``placed_for``: the needs for which the variables were placed; None after a gather, which gives all values to all
    ranks. ``release`` frees values that the user has since assigned to variables that this rank does not hold.
    """

    placed_for: VariableNeeds | None = None
    release: Callable[[], None] | None = None
    _ranks: dict[int, tuple[weakref.ref[tf.Variable], Ranks]] = field(default_factory=dict)

    def ranks_of(self, variable: tf.Variable) -> Ranks | None:
        """Return the ranks that hold the variable; None if it was never placed: then each may have its own value."""
        found = self._ranks.get(id(variable))
        return None if found is None else found[1]

    def set_ranks(self, variable: tf.Variable, ranks: Ranks) -> None:
        """Note that these ranks, and no others, hold the variable."""
        key = id(variable)
        self._ranks[key] = weakref.ref(variable, lambda _: self._ranks.pop(key, None)), ranks

    def source(self, variable: tf.Variable) -> int:
        """Return the rank that sends the value to others: the first that holds it."""
        return min(self.ranks_of(variable) or {0})
