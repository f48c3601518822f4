"""Estimate how far the clocks of a job's processes differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapple_tf.distributed.membership import Job

_ROUNDS = 9


class Clocks:
    """The clocks of the ranks of ``job``; every rank must make the same calls."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._boot_ids: tuple[str, ...] = ()

    def gather(self, times: Any) -> list[Any]:
        """Return every rank's ``times`` (an array of seconds, by its own clock), by rank 0's clock, on every rank."""
        return self._job.gather(times - self.offsets()[self._job.rank])

    def offsets(self) -> tuple[float, ...]:
        """Return by how many seconds each rank's clock is ahead of rank 0's.

        Ranks of one host read the same clock. Others read theirs right after a barrier, which all leave at the same
        time except for the network's latency; that limits the accuracy. The result is the median of nine rounds.
        """
        if not self._boot_ids:
            self._boot_ids = tuple(self._job.gather(_boot_id()))
        if len(set(self._boot_ids)) == 1:
            return (0.0,) * self._job.size
        times = []
        for _ in range(_ROUNDS):
            self._job.gather(None)
            times.append(time.time())
        return clock_offsets(self._boot_ids, self._job.gather(times))


def clock_offsets(hosts: Sequence[str], times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return by how many seconds each rank's clock is ahead of rank 0's.

    ``times[i]``: what rank i read, in seconds, at the same moments as the others. ``hosts[i]``: a name of its host.
    """
    ahead = [statistics.median(a - b for a, b in zip(own, times[0], strict=True)) for own in times]
    # All ranks of a host have the offset of its first rank, for they read one clock.
    return tuple(0.0 if host == hosts[0] else ahead[hosts.index(host)] for host in hosts)


def _boot_id() -> str:
    """Return an identifier that all processes under the same kernel read, and no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
