"""The connections over which ranks send each other tensors, sums and barrier messages natively; others have none."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Protocol

from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.native.library import ExchangeLibrary
from dapple_tf.distributed.native_collectives import Pair
from dapple_tf.distributed.places import prepare_for_tensors
from dapple_tf.distributed.rendezvous import ALL_RANKS_SECONDS, connect_pairs


class ExchangeNetwork:
    """The connections of this rank of ``job``, which the ops of the ``library`` use.

    ``seconds``: the time in which two ranks must have connected.
    """

    def __init__(self, job: Job, library: ExchangeLibrary, seconds: float = ALL_RANKS_SECONDS) -> None:
        self.library = library
        self._job = job
        self._seconds = seconds
        self._connected: set[Pair] = set()
        os.register_at_fork(after_in_child=library.close_in_child)
        job.progress.exchanges = library
        report_stalls(job.rank, library)

    def connect(self, pairs: Iterable[Pair]) -> None:
        """Connect those of the ``pairs`` that are not; every rank must call this with the same pairs.

        Raises JobError on every rank if two of them cannot connect.
        """
        missing = set(pairs) - self._connected
        if not missing:
            return
        for link in connect_pairs(self._job, missing, "ranks exchange tensors", self._seconds):
            prepare_for_tensors(link.connection)
            self.library.connect(link.rank, link.connection.detach())
        self._connected |= missing


# --- Say which tensors a rank has waited for too long, and from which ranks, as Horovod does for its own
# A rank that hangs sends heartbeats as long as its process lives: the report tells where to look.


_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"  # Horovod's own option, and its default
_DEFAULT_SECONDS = 60.0


class Waits(Protocol):
    """An object that lists the messages for which this process waits."""

    def find_waits(self, seconds: float) -> Mapping[int, list[str]]:
        """Return what has been waited for longer than ``seconds``: names of exchanges, by rank."""


def report_stalls(rank: int, waits: Waits, environment: Mapping[str, str] = os.environ) -> None:
    """Start a thread that reports stalls of this ``rank``; HOROVOD_STALL_CHECK_TIME_SECONDS (default 60; 0: never)."""
    try:
        seconds = float(environment.get(_SECONDS) or _DEFAULT_SECONDS)
    except ValueError:
        seconds = _DEFAULT_SECONDS
    if seconds > 0:
        threading.Thread(target=_run, args=(rank, waits, seconds), name="dapple-stalls", daemon=True).start()


def _run(rank: int, waits: Waits, seconds: float) -> None:
    known: Mapping[int, list[str]] = {}
    pause = threading.Event()
    while not pause.wait(seconds):
        found = waits.find_waits(seconds)
        if found and found != known:
            print(describe_stall(rank, found, seconds), file=sys.stderr, flush=True)
        known = found


def describe_stall(rank: int, found: Mapping[int, list[str]], seconds: float) -> str:
    """Return the report, in Horovod's form: ``found`` are names of exchanges by the ranks that have not sent them."""
    lines = [f"{other}: [{', '.join(names)}]" for other, names in sorted(found.items())]
    return "\n".join([f"dapple: rank {rank} has waited for tensors for {seconds:g} s. Missing ranks:", *lines])
