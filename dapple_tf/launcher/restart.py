"""Pass messages between ``dapple launch`` and the job that it has started.

The launcher writes to the job's environment how often the job was started, and to rank 0's standard input that more
ranks are possible. The job answers with its exit code.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLE = "DAPPLE_LAUNCH"

_MORE_RANKS = "dapple: more ranks are possible: "
"""Begins a line on rank 0's standard input that asks an elastic job to save, and to end with the code ``CONTINUE``."""

CONTINUE = 75
"""Exit code of a job that has saved, and asks to be started again with more ranks (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True)
class Start:
    """A start of a job: ``number`` 0 for the first, and when the start before it ``ended``, in seconds since 1970.

    ``launch``: a random text, the same for all starts by one ``dapple launch``. ``began``: when this start was made.
    ``cause``: why the start before it has ended, in words; "" for the first. ``lost``: the ranks that it has lost with
    their hosts.
    """

    number: int
    ended: float = 0.0
    launch: str = "0"
    began: float = 0.0
    cause: str = ""
    lost: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(dataclasses.asdict(self))


def read_start(environment: Mapping[str, str] = os.environ) -> Start | None:
    """Return which start of its job this process belongs to; None outside of ``dapple launch``."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    fields = json.loads(text)
    return Start(**{**fields, "lost": tuple(fields.get("lost", ()))})


def offer_ranks(hosts: Sequence[tuple[str, int]]) -> str:
    """Return the line that tells a job on which hosts it could run, each with its number of ranks."""
    return f"{_MORE_RANKS}{','.join(f'{name}:{ranks}' for name, ranks in hosts)}\n"


def read_more_ranks(environment: Mapping[str, str] = os.environ) -> list[tuple[str, int]] | None:
    """Return the hosts, with their ranks, that the launcher has offered since the last call; call it on rank 0."""
    if VARIABLE not in environment:  # standard input is the user's
        return None
    text = ""
    while select.select([sys.stdin], [], [], 0)[0] and (data := os.read(sys.stdin.fileno(), 65536)):
        text += data.decode(errors="replace")
    offers = [line.removeprefix(_MORE_RANKS) for line in text.splitlines() if line.startswith(_MORE_RANKS)]
    if not offers:
        return None
    return [(name, int(ranks)) for name, _, ranks in (word.rpartition(":") for word in offers[-1].split(","))]
