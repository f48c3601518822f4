"""Take the next batch of a data set while a step runs on the one before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tensorflow as tf


class Prefetch:
    """Gives the batches of an iterator in their order, and has a thread take the one after.

    Only an iterator of tf.data is read ahead, by one batch: whatever else Keras passes holds no more batches, or reads
    ahead itself. The batch that was read is given when the same iterator is asked again, in the next epoch too.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[Iterator[Any], Future[Any]] | None = None

    def next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch; StopIteration where there is none."""
        if not isinstance(batches, tf.data.Iterator):
            return next(batches)
        ahead, self._ahead = self._ahead, None
        batch = ahead[1].result() if ahead is not None and ahead[0] is batches else next(batches)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="dapple-next-batch")
        self._ahead = batches, self._pool.submit(next, batches)
        return batch
