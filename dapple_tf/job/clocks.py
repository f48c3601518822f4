"""How far the clocks of a job's processes are apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dapple_tf.job.membership import Job
from dapple_tf.runtime.timeline import Stamp

_ROUNDS = 9


def clock_offsets(job: Job) -> tuple[float, ...]:
    """Seconds that each rank's clock is ahead of rank 0's; every rank must call it.

    Ranks of one host read the same clock. The others meet a few times and look at their clocks when they part, which
    they do at the same time but for the network's latency: that is how exact it is (the median of nine).
    """
    hosts = job.gather(_running_system())
    if len(set(hosts)) == 1:
        return (0.0,) * job.size
    parted = []
    for _ in range(_ROUNDS):
        job.gather(None)
        parted.append(time.time())
    return compare_clocks(hosts, job.gather(parted))


def compare_clocks(hosts: Sequence[str], times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Seconds that each rank is ahead of rank 0; ``times``: what each read at the same moments, of its host's clock."""
    ahead = [statistics.median(a - b for a, b in zip(mine, times[0], strict=True)) for mine in times]
    # Of one host all take the offset of its first rank: they read one clock.
    return tuple(0.0 if host == hosts[0] else ahead[hosts.index(host)] for host in hosts)


def _running_system() -> str:
    """What only processes under the same kernel read."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gather_stamps(job: Job, own: Sequence[Stamp]) -> tuple[Stamp, ...]:
    """The time stamps of all ranks, by rank 0's clock, on every rank."""
    ahead = clock_offsets(job)[job.rank]
    moved = [replace(stamp, start=stamp.start - ahead, end=stamp.end - ahead) for stamp in own]
    return tuple(stamp for stamps in job.gather(moved) for stamp in stamps)
