"""Errors of the middle end; every message names the node, the pass, and what to do."""

from __future__ import annotations


class GraphError(ValueError):
    """A graph that breaks an invariant of the IR."""


class TextError(ValueError):
    """A text that is not a graph; names the line."""


class PartitionError(ValueError):
    """A cut that cannot be made; names the layer or the tensor in the way."""


class ScheduleError(ValueError):
    """A schedule that is unknown, does not parse or cannot run."""
