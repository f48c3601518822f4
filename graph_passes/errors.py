"""Errors of the middle end. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class DappleError(Exception):
    """The base of all errors of dapple_tf."""


class GraphError(DappleError, ValueError):
    """A graph breaks an invariant of the intermediate representation, or a pass its contract."""


class TextError(DappleError, ValueError):
    """A text cannot be parsed as a graph; the message has the line number."""


class PartitionError(DappleError, ValueError):
    """A model cannot be cut as asked; the message names the layer or the tensor that prevents it."""


class ScheduleError(DappleError, ValueError):
    """A schedule is unknown, cannot be parsed or cannot run."""
