"""Rank 0's comparison of the calls of all ranks, from the first call to the end of the job."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable

from dapple_tf.distributed.call_order_check import CallOrderCheck, RankCall


class CallComparison:
    """Compares the calls of ``size`` ranks; ``report_difference`` is called with each difference, in words.

    ``add_own`` may be called by any thread, and all else by one thread.
    """

    def __init__(self, size: int, report_difference: Callable[[str], None]) -> None:
        self._check = CallOrderCheck(size)
        self._own_calls: queue.SimpleQueue[RankCall] = queue.SimpleQueue()
        self._report_difference = report_difference

    def add_own(self, call: RankCall) -> None:
        """Note a call of rank 0; it is compared by the next ``compare_own``."""
        self._own_calls.put(call)

    def compare_own(self) -> None:
        """Compare the calls of rank 0 that have been noted."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.compare(0, self._own_calls.get_nowait())

    def compare(self, rank: int, call: RankCall) -> None:
        """Compare a call of ``rank`` with those that other ranks have made under its number."""
        difference = self._check.add(rank, call)
        if difference:
            self._report_difference(difference)

    def conclude(self) -> bool:
        """Return whether all ranks, which have left, have made the same calls."""
        unanswered = self._check.describe_unanswered()
        if unanswered:
            self._report_difference(unanswered)
        return not unanswered
