"""Errors that all ranks of a job raise together, and texts about ranks whose values differ."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

from dapple_tf.errors import JobError

_REPORTING_RANK = "_dapple_reporting_rank"
_QUOTED = 300  # characters of a value that an error quotes

E = TypeVar("E", bound=Exception)


def share_error(error: E, rank: int) -> E:
    """Mark and return an error, for which every rank raises one; ``rank`` alone prints it in full."""
    setattr(error, _REPORTING_RANK, rank)
    return error


def reporting_rank(error: BaseException) -> int | None:
    """Return the rank that prints an error in full; None if only this rank raises the error."""
    return getattr(error, _REPORTING_RANK, None)


def make_picklable(error: Exception, rank: int) -> Exception:
    """Return the error of a rank, or a JobError with the same text if the error cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickling may run any code
        return JobError(f"rank {rank} failed with {type(error).__name__}: {error}")
    return error


SAME_SCRIPT = "Start the same script with the same packages and data shapes everywhere."
"""The advice that ends most messages about ranks with different values."""


def describe_difference(what: str, values: Sequence[str], advice: str = SAME_SCRIPT) -> str:
    """Return a text that says which ranks have which value; ``values[i]`` is the value of rank i."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    columns = zip(*groups, strict=False)
    first_difference = next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, groups)))
    found = ", ".join(f"{_subject(ranks)} {_quote(value, first_difference)}" for value, ranks in groups.items())
    return f"the ranks differ in their {what}: {found}. {advice}"


def _subject(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list(ranks)} have"


def _quote(value: str, position: int) -> str:
    """Return the value, or if it is long, the part of it around ``position``."""
    begin = max(0, min(position - _QUOTED // 2, len(value) - _QUOTED))
    end = begin + _QUOTED
    return ("... " if begin else "") + value[begin:end] + (" ..." if end < len(value) else "")
