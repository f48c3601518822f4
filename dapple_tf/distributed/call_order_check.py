"""Check that all ranks make the same calls in the same order.

A rank that makes another call than the others, or the same call with another batch, would wait forever for data that
the others do not send, or sum gradients of different calls. The check does not synchronize the ranks: each rank numbers
its calls and sends them to rank 0, which compares them.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankCall:
    """A call that one rank makes; ``number`` counts the calls that every rank must make.

    ``what``: the call, as an imperative ("gather the variables"); the text must be the same on all ranks. ``detail``
    follows ``what`` in the error message and is not compared.
    """

    number: int
    what: str
    detail: str = ""


class CallComparison:
    """Compares on rank 0 the calls of ``size`` ranks; ``report_difference`` is called with the text of each difference.

    It keeps the calls that some ranks have announced, and others have not yet. Any thread may call ``add_own``; one
    thread must call all other methods.
    """

    def __init__(self, size: int, report_difference: Callable[[str], None]) -> None:
        self._size = size
        self._report_difference = report_difference
        self._open: dict[int, dict[int, RankCall]] = {}
        self._own_calls: queue.SimpleQueue[RankCall] = queue.SimpleQueue()

    def add_own(self, call: RankCall) -> None:
        """Note a call of rank 0; the next ``compare_own`` compares it."""
        self._own_calls.put(call)

    def compare_own(self) -> None:
        """Compare the calls of rank 0 that ``add_own`` has noted."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.compare(0, self._own_calls.get_nowait())

    def compare(self, rank: int, call: RankCall) -> None:
        """Compare a call of ``rank`` with those that other ranks have made under its number."""
        calls = self._open.setdefault(call.number, {})
        calls[rank] = call
        if len({other.what for other in calls.values()}) > 1:
            self._report_difference(_describe(calls))
        elif len(calls) == self._size:
            del self._open[call.number]

    def conclude(self) -> bool:
        """Return whether all ranks have made the same calls; call this once all ranks have left.

        A call that only some have made is a difference then: the others will not make it.
        """
        if missing := self.describe_missing():
            self._report_difference(missing)
        return not missing

    def describe_missing(self) -> str:
        """Return which ranks have made, and which not, the first call that only some have made; "" if there is none."""
        if not self._open:
            return ""
        calls = self._open[min(self._open)]
        others = [rank for rank in range(self._size) if rank not in calls]
        return f"{_describe(calls)}, and {_subject(others)} not"


def _describe(calls: dict[int, RankCall]) -> str:
    groups: dict[str, list[int]] = {}
    for rank in sorted(calls):
        groups.setdefault(calls[rank].what, []).append(rank)
    return ", ".join(f"{_subject(ranks)} about to {what}{calls[ranks[0]].detail}" for what, ranks in groups.items())


def _subject(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list(ranks)} are"
