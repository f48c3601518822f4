"""Joining the Horovod job that a launcher (mpirun, horovodrun) started, and what its ranks tell each other."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dapple_tf.distributed.progress import progress
from dapple_tf.errors import DeviceError, JobError
from profiler.detect import job_size

# Horovod looks for work that all ranks have ready once in so many milliseconds (1 by default).
_CYCLE_MILLISECONDS = "0.2"
_REPORTING_RANK = "_dapple_told_by_rank"
_TOLD = 300  # characters of a fact that an error quotes

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Job:
    """The job of ``size`` processes; this one is ``rank``, and the ``local_rank``-th of its server."""

    size: int
    rank: int
    local_rank: int
    local_size: int

    def announce_call(self, what: str) -> None:
        """Tell that this rank begins ``what``, where every rank must begin the same; it does not wait for them."""
        progress().begin(what)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` (anything that pickles), on every rank."""
        import horovod.tensorflow as hvd

        self.announce_call("receive a value from rank 0")
        with progress().meeting():
            return hvd.broadcast_object(value, root_rank=0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank."""
        import horovod.tensorflow as hvd

        self.announce_call("gather a value from every rank")
        with progress().meeting():
            return list(hvd.allgather_object(value))

    def run_on_rank_0(self, choose: Callable[[], Any]) -> Any:
        """What ``choose`` gives on rank 0, on every rank; an error of ours there is raised everywhere."""
        answer: tuple[Any, Exception | None] = None, None
        if self.rank == 0:
            try:
                answer = choose(), None
            except Exception as raised:  # whatever it is: the other ranks wait for an answer
                answer = None, _that_travels(raised)
        value, failure = self.broadcast(answer)
        if failure is not None:
            raise _known_to_all(failure, 0)
        return value

    def run_on_all(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on this rank, when it has gone well on every rank; every rank must come here.

        Raises what ``work`` raised here, or JobError naming the rank where it failed and how. ``work`` may call
        ``compare``, ``decide`` and this method; a rank that fails first meets the others there.
        """
        failure: Exception | None = None
        try:
            value = work()
        except Exception as raised:  # whatever it is: the other ranks wait
            if reporting_rank(raised) is not None:
                raise
            failure = raised
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        failures = self._meet(told, {})
        if failure is not None:
            raise _known_to_all(failure, min(rank for rank, other in failures.items() if other == told))
        return value

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Raise JobError on every rank where the ranks' ``facts`` (by what they say) differ, naming fact and ranks."""
        self._meet(None, {what: str(fact) for what, fact in facts.items()})

    def check_call_history(self) -> None:
        """Raise JobError on every rank where not all have begun the same so far (see ``Progress.begin``).

        It is noticed without this, but may be so after the next call.
        """
        self.compare({"batches or calls until now": progress().history})

    def _meet(self, failure: str | None, facts: Mapping[str, str]) -> dict[int, str]:
        """The one way in which ranks wait for each other: each tells its failure, or its facts.

        Failures by rank, on the ranks that have failed; the others raise JobError.
        """
        every = self.gather((failure, facts))
        failures = {rank: told for rank, (told, _) in enumerate(every) if told is not None}
        if failure is not None:
            return failures
        if failures:
            told = "; ".join(f"rank {rank} failed with {told}" for rank, told in failures.items())
            raise _known_to_all(JobError(told), min(failures))
        for what in dict.fromkeys(what for _, known in every for what in known):
            values = [known.get(what, "nothing") for _, known in every]
            if len(set(values)) > 1:
                raise _known_to_all(JobError(_describe_difference(what, values)), 0)
        return {}

    def make_process_sets(self, wanted: Iterable[Sequence[int]]) -> dict[tuple[int, ...], Any]:
        """A Horovod process set for each set of ranks; every rank must ask for the same, in any order."""
        import horovod.tensorflow as hvd
        from horovod.common import process_sets

        sets: dict[tuple[int, ...], Any] = {tuple(range(self.size)): hvd.global_process_set}
        numbers = process_sets._basics._get_process_set_ids_and_ranks()  # a set cannot be made twice
        known = {tuple(ranks): number for number, ranks in numbers.items()}
        for ranks in sorted({tuple(sorted(ranks)) for ranks in wanted} - sets.keys()):
            made = hvd.ProcessSet(list(ranks))
            if ranks in known:
                made.process_set_id = known[ranks]
            else:
                hvd.add_process_set(made)
            sets[ranks] = made
        return sets


def _known_to_all(error: E, teller: int) -> E:
    """The error, marked as one that every rank raises, or another in its place; rank ``teller`` tells it in full."""
    setattr(error, _REPORTING_RANK, teller)
    return error


def reporting_rank(error: BaseException) -> int | None:
    """The rank that tells an error in full where all ranks know of it; None where this rank alone does."""
    return getattr(error, _REPORTING_RANK, None)


def _that_travels(error: Exception) -> Exception:
    """The error, or where it cannot be sent to other processes, one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickling runs any code
        return JobError(f"rank 0 failed with {type(error).__name__}: {error}")
    return error


def _describe_difference(what: str, values: Sequence[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    letters = zip(*groups, strict=False)
    same = next((i for i, found in enumerate(letters) if len(set(found)) > 1), min(map(len, groups)))
    told = ", ".join(f"{_ranks(ranks)} {_shorten(value, same)}" for value, ranks in groups.items())
    return (
        f"the ranks differ in their {what}: {told}. Start the same script with the same packages and data shapes "
        "everywhere."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list(ranks)} have"


def _shorten(value: str, same: int) -> str:
    """The value, or where it is long, what stands around the place up to which all are the ``same``."""
    begin = max(0, min(same - _TOLD // 2, len(value) - _TOLD))
    end = begin + _TOLD
    return ("... " if begin else "") + value[begin:end] + (" ..." if end < len(value) else "")


def join(environment: Mapping[str, str] = os.environ) -> Job | None:
    """The job that the launcher's ``environment`` tells of, joined if it was not yet; None outside of any.

    Raises DeviceError where Horovod is not installed.
    """
    if job_size(environment) < 2:
        return None
    # Stages make their sets when their plan is known; Open MPI and Horovod read these when they start.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_MILLISECONDS)
    # While MPI waits it lets others have the core, and the others compute (0.61 s a step in place of 0.80 s).
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise DeviceError(
            f"the launcher started {job_size(environment)} processes, but Horovod is not installed here ({error}): run "
            "scripts/install_horovod.sh"
        ) from error
    if not hvd.is_initialized():
        hvd.init()
    return current()


def current() -> Job | None:
    """The job that this process has joined, or None."""
    if "horovod.tensorflow" not in sys.modules:
        return None
    import horovod.tensorflow as hvd

    if not hvd.is_initialized() or hvd.size() < 2:
        return None
    return Job(hvd.size(), hvd.rank(), hvd.local_rank(), hvd.local_size())
