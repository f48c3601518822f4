"""Rank 0 of a job prints and writes files; an error on one rank fails the others too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dapple_tf.commands.output import print_result, print_warning
from dapple_tf.distributed.membership import Job

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of ``job``. The first prints and writes."""

    job: Job

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files: rank 0."""
        return self.job.rank == 0

    def print_result(self, text: str) -> None:
        """Print a result on stdout, on rank 0 only."""
        if self.is_first:
            print_result(text)

    def print_warning(self, text: str) -> None:
        """Print what the user should know or act on, on stderr, on rank 0 only."""
        if self.is_first:
            print_warning(text)

    def run_on_first(self, work: Callable[[], T]) -> T | None:
        """Return what ``work`` returns on rank 0, and None on the others; an error there fails every rank."""
        return self.job.run_on_all(lambda: work() if self.is_first else None)
