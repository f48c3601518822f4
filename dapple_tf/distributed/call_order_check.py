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


class CallOrderCheck:
    """Keeps the calls that some of the ``size`` ranks of a job have announced, and others have not yet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: dict[int, dict[int, RankCall]] = {}

    def add(self, rank: int, call: RankCall) -> str:
        """Note a call of ``rank``; return how the calls of this number differ so far, or "" where they do not."""
        calls = self._open.setdefault(call.number, {})
        calls[rank] = call
        if len({other.what for other in calls.values()}) > 1:
            return _describe(calls)
        if len(calls) == self._size:
            del self._open[call.number]
        return ""

    def describe_unanswered(self) -> str:
        """Return which ranks have made a call that others have not made, or "" if there is no such call.

        It is an error once all ranks have left: then the others will not make the call.
        """
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


# --- Compare the calls of all ranks on rank 0, from the first call to the end of the job


class CallComparison:
    """Compares the calls of ``size`` ranks; ``report_difference`` is called with a description of each difference.

    Any thread may call ``add_own``; one thread must call all other methods.
    """

    def __init__(self, size: int, report_difference: Callable[[str], None]) -> None:
        self._check = CallOrderCheck(size)
        self._own_calls: queue.SimpleQueue[RankCall] = queue.SimpleQueue()
        self._report_difference = report_difference

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
        difference = self._check.add(rank, call)
        if difference:
            self._report_difference(difference)

    def conclude(self) -> bool:
        """Return whether all ranks have made the same calls; call this once all ranks have left."""
        unanswered = self._check.describe_unanswered()
        if unanswered:
            self._report_difference(unanswered)
        return not unanswered
