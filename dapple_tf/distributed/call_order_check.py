"""Do all ranks begin the same, in the same order?

A rank that is called with another batch, or makes another call than the others, would wait for ever for what they do
not send, or sum gradients that do not belong together. Ranks do not wait for each other to find that out: each counts
what it begins, and tells rank 0, which compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Beginning:
    """The ``number``-th that a rank begins of what all ranks must begin: ``what``, equal on all.

    ``detail`` goes on from ``what`` where ranks differ, and is not compared. Both read on from "rank 0 begins".
    """

    number: int
    what: str
    detail: str = ""


class Beginnings:
    """What some of a job's ``size`` ranks have begun, and not yet all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: dict[int, dict[int, Beginning]] = {}

    def hear(self, rank: int, beginning: Beginning) -> str:
        """Note what a rank begins; how the ranks that have come so far differ in it, "" where they do not."""
        known = self._open.setdefault(beginning.number, {})
        known[rank] = beginning
        if len({one.what for one in known.values()}) > 1:
            return _describe(known)
        if len(known) == self._size:
            del self._open[beginning.number]
        return ""


def _describe(known: dict[int, Beginning]) -> str:
    groups: dict[str, list[int]] = {}
    for rank in sorted(known):
        groups.setdefault(known[rank].what, []).append(rank)
    return ", ".join(f"{_begin(ranks)} {what}{known[ranks[0]].detail}" for what, ranks in groups.items())


def _begin(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} begins" if len(ranks) == 1 else f"ranks {list(ranks)} begin"
