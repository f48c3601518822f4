"""Pass messages between ``dapple launch`` and the job that it has started.

The launcher writes to the job's environment how often the job was started, and to rank 0's standard input that more
ranks are possible. The job answers with its exit code.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "DAPPLE_LAUNCH"

MORE_RANKS = "dapple: more ranks are possible\n"
"""The line on rank 0's standard input that asks an elastic job to save, and to end with the code ``CONTINUE``."""

CONTINUE = 75
"""Exit code of a job that has saved, and asks to be started again with more ranks (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True)
class Start:
    """A start of a job: ``number`` 0 for the first, and when the start before it ``ended``, in seconds since 1970.

    ``launch``: a random text, the same for all starts by one ``dapple launch``.
    """

    number: int
    ended: float = 0.0
    launch: str = "0"

    def to_text(self) -> str:
        """Return the value of the environment variable."""
        return f"{self.number} {self.ended} {self.launch}"


def read_start(environment: Mapping[str, str] = os.environ) -> Start | None:
    """Return which start of its job this process belongs to; None outside of ``dapple launch``."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    number, ended, launch = text.split()
    return Start(int(number), float(ended), launch)


def more_ranks_possible(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher has written since the last call that more ranks are possible; call it on rank 0."""
    if VARIABLE not in environment:  # standard input is the user's
        return False
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and sys.stdin.readline() == MORE_RANKS
