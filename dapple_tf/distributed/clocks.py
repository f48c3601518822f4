"""How far the clocks of a job's processes are apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapple_tf.distributed.membership import Job

_ROUNDS = 9


class Clocks:
    """The clocks of the ranks of ``job``; every rank must make the same calls of it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._hosts: tuple[str, ...] = ()

    def gather(self, times: Any) -> list[Any]:
        """Every rank's ``times`` (an array of seconds, by its own clock), by rank 0's clock, on every rank."""
        return self._job.gather(times - self.offsets()[self._job.rank])

    def offsets(self) -> tuple[float, ...]:
        """Seconds that each rank's clock is ahead of rank 0's.

        Ranks of one host read the same clock. The others meet a few times and look at their clocks when they part,
        which they do at the same time but for the network's latency: that is how exact it is (the median of nine).
        """
        if not self._hosts:
            self._hosts = tuple(self._job.gather(_running_system()))
        if len(set(self._hosts)) == 1:
            return (0.0,) * self._job.size
        parted = []
        for _ in range(_ROUNDS):
            self._job.gather(None)
            parted.append(time.time())
        return compare_clocks(self._hosts, self._job.gather(parted))


def compare_clocks(hosts: Sequence[str], times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Seconds that each rank is ahead of rank 0; ``times``: what each read at the same moments, of its host's clock."""
    ahead = [statistics.median(a - b for a, b in zip(mine, times[0], strict=True)) for mine in times]
    # Of one host all take the offset of its first rank: they read one clock.
    return tuple(0.0 if host == hosts[0] else ahead[hosts.index(host)] for host in hosts)


def _running_system() -> str:
    """What only processes under the same kernel read."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
