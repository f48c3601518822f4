"""Rank 0 of a job prints and writes files; an error on one rank fails the others too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dapple_tf.commands.output import print_progress, print_result, print_warning
from dapple_tf.distributed.membership import Job

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of ``job``, or this process alone without a job."""

    job: Job | None

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files: rank 0, or the only process."""
        return self.job is None or self.job.rank == 0

    @property
    def size(self) -> int:
        """The number of ranks; 1 without a job."""
        return 1 if self.job is None else self.job.size

    def print_result(self, text: str) -> None:
        """Print a result on stdout, on rank 0 only."""
        if self.is_first:
            print_result(text)

    def print_progress(self, text: str) -> None:
        """Print a line of progress on stderr, on rank 0 only."""
        if self.is_first:
            print_progress(text)

    def print_warning(self, text: str) -> None:
        """Print what the user should know or act on, on stderr, on rank 0 only."""
        if self.is_first:
            print_warning(text)

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns here, once it has succeeded on every rank; see ``Job.run_on_all``."""
        return work() if self.job is None else self.job.run_on_all(work)

    def run_on_first(self, work: Callable[[], T]) -> T | None:
        """Return what ``work`` returns on rank 0, and None on the others; an error there fails every rank."""
        return self.run_on_all(lambda: work() if self.is_first else None)

    def all_of(self, value: bool) -> bool:
        """Return whether ``value`` is True on every rank; every rank must call this."""
        return value if self.job is None else all(self.job.gather(value))

    def wait_for_all(self) -> None:
        """Return once every rank has come here; raise JobError on every rank if they have made different calls."""
        if self.job is not None:
            self.job.check_call_history()
