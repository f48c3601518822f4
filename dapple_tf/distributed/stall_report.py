"""Say which tensors a rank has waited for too long, and from which ranks, as Horovod does for its own.

A rank that hangs sends heartbeats as long as its process lives: the report tells where to look.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Protocol

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
