"""Join the Horovod job that a launcher (mpirun, horovodrun) started, and call functions on all of its ranks."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dapple_tf.distributed.progress import Progress
from dapple_tf.distributed.shared_errors import (
    SAME_SCRIPT,
    describe_difference,
    make_picklable,
    reporting_rank,
    share_error,
)
from dapple_tf.distributed.variable_locations import VariableLocations
from dapple_tf.distributed.watchdog import Watchdog
from dapple_tf.errors import DeviceError, JobError
from dapple_tf.profiler.detect import job_size

# HOROVOD_CYCLE_TIME: the interval in milliseconds at which Horovod starts collectives that are ready (default 1).
_CYCLE_MILLISECONDS = "0.2"
# HOROVOD_FUSION_THRESHOLD: the bytes of the buffer in which Horovod sums small tensors together (default 128 MiB). Each
# process has it from the start, and a limit on its memory counts it. Summing 16 MiB takes much longer than the latency
# that the buffer saves.
_FUSED_BYTES = str(16 * 2**20)
# The operations that Open MPI's TCP transport may use. By default "put" is one of them: it sends a large tensor as one
# message. The message that lets the peer send its own tensor then waits behind it in the same connection, so the two
# directions of an exchange or a sum often alternate. Without "put" tensors are sent in pieces of 128 KB.
_TCP_FLAGS = "send,inplace"

T = TypeVar("T")


class Network(Protocol):
    """The connections between ranks for native exchanges, which ``ExchangeNetwork`` makes."""

    @property
    def library(self) -> Any:
        """The library whose ops exchange tensors."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect the ranks of each of the ``pairs`` that is not connected; every rank must give the same pairs."""


@dataclass(eq=False)
class Job:
    """A job of ``size`` processes; this process is ``rank``, and ``local_rank`` of the ``local_size`` on its server.

    A process that no launcher has started is a job of one rank, whose methods wait for nobody. The object holds the
    state of this process as a rank: its progress, the locations of variables, and the watchdog and the
    ``exchange_network``, which ``dapple.init`` starts. ``exchange_way``: "native", or "horovod", which needs no
    network. ``process``: the process id of this rank; a forked child is not a rank. ``base_bytes``: the resident set of
    the process at the end of ``dapple.init``, before any model; 0 where the system does not say.
    """

    size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    progress: Progress = field(default_factory=Progress, repr=False)
    variable_locations: VariableLocations = field(default_factory=VariableLocations, repr=False)
    watchdog: Watchdog | None = field(default=None, repr=False)
    exchange_way: str = field(default="", repr=False)
    exchange_network: Network | None = field(default=None, repr=False)
    process: int = field(default_factory=os.getpid, repr=False)
    base_bytes: int = field(default=0, repr=False)

    @property
    def is_alone(self) -> bool:
        """Whether this process is the only rank."""
        return self.size == 1

    def announce_call(self, what: str) -> None:
        """Announce a call that every rank must make, as an imperative ("gather the variables"); does not wait."""
        self.progress.announce_call(what)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the ``value`` (any object that pickles) of the rank ``source`` on every rank."""
        if self.is_alone:
            return value
        import horovod.tensorflow as hvd

        self.announce_call(f"receive a value from rank {source}")
        with self.progress.collective_call():
            return hvd.broadcast_object(value, root_rank=source)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank, on every rank."""
        if self.is_alone:
            return [value]
        import horovod.tensorflow as hvd

        self.announce_call("gather a value from every rank")
        with self.progress.collective_call():
            return list(hvd.allgather_object(value))

    def gather_integers(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's ``numbers``, by rank, on every rank; ``what``: the call, as an imperative.

        All ranks must give equally many. Unlike ``gather`` this takes one collective and no pickling, so a step may
        call it.
        """
        if self.is_alone:
            return [list(numbers)]
        import horovod.tensorflow as hvd
        import tensorflow as tf

        self.announce_call(what)
        with self.progress.collective_call(), tf.device("CPU:0"):
            gathered = hvd.allgather(tf.constant([list(numbers)], tf.int64), name="dapple.gather_integers")
        return [[int(number) for number in row] for row in gathered.numpy()]

    def run_on_rank_0(self, work: Callable[[], T]) -> T:
        """Call ``work`` on rank 0, and return its result, or raise its error, on every rank."""
        return self.run_on(0, work)

    def run_on(self, rank: int, work: Callable[[], T]) -> T:
        """Call ``work`` on this ``rank``, and return its result, or raise its error, on every rank."""
        if self.is_alone:
            return work()
        value: T
        answer = b""
        if self.rank == rank:
            try:
                answer = pickle.dumps((work(), None))
            except Exception as raised:  # an error of any type, also of pickling: the other ranks wait for an answer
                answer = pickle.dumps((None, make_picklable(raised, rank)))
        value, failure = pickle.loads(self.broadcast(answer, rank))
        if failure is not None:
            raise share_error(failure, rank)
        return value

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Call ``work`` on every rank, and return this rank's result once it has succeeded on all of them.

        Raises what ``work`` raised here, or JobError naming the rank where it failed and how. ``work`` may call
        ``agree``, ``run_on_rank_0`` and this method: there the other ranks learn that a rank has failed before it.
        """
        if self.is_alone:
            return work()
        failure: Exception | None = None
        try:
            value = work()
        except Exception as raised:  # an error of any type: the other ranks wait
            if reporting_rank(raised) is not None:
                raise
            failure = raised
        failures = self._exchange_results(failure)
        if failure is not None:
            raise share_error(failure, min(rank for rank, text in failures.items() if text == failures[self.rank]))
        return value

    def agree(self, name: str, value: T, advice: str = SAME_SCRIPT) -> T:
        """Return ``value``, once all ranks have called this with values of the same text; ``name``: of the value.

        Where the texts differ, raises JobError on every rank, with the name, each text with its ranks, and the
        ``advice``.
        """
        self._exchange_results(None, name, str(value), advice)
        return value

    def check_call_history(self) -> None:
        """Raise JobError on every rank if the ranks have not made the same calls until now (see ``announce_call``).

        The watchdog detects this too, but possibly after the next call.
        """
        self.agree("batches or calls until now", self.progress.call_history)

    def _exchange_results(
        self, failure: Exception | None, name: str = "", text: str = "", advice: str = SAME_SCRIPT
    ) -> dict[int, str]:
        """Exchange a failure, or the text of a value, with all ranks; raise JobError where a rank failed or two differ.

        Every method by which ranks wait for each other's work does this, so ranks that call different ones meet here. A
        rank that has failed itself does not raise an error, but returns the texts of all failures by rank.
        """
        failed = None if failure is None else (f"{type(failure).__name__}: {failure}", getattr(failure, "lasts", False))
        results = self.gather((failed, name, text))
        found = {rank: failed for rank, (failed, _, _) in enumerate(results) if failed is not None}
        failures = {rank: said for rank, (said, _) in found.items()}
        if failure is not None:
            return failures
        if failures:
            said = "; ".join(f"rank {rank} failed with {text}" for rank, text in failures.items())
            lasts = any(lasts for _, lasts in found.values())
            raise share_error(JobError(said, lasts=lasts), min(failures))
        for compared in dict.fromkeys(name for _, name, _ in results if name):
            values = [text if name == compared else "nothing" for _, name, text in results]
            if len(set(values)) > 1:
                raise share_error(JobError(describe_difference(compared, values, advice)), 0)
        return {}

    def make_process_sets(self, wanted: Iterable[Sequence[int]]) -> dict[tuple[int, ...], Any]:
        """Return a Horovod process set for each of the ``wanted`` sets of ranks; every rank must want the same sets."""
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


# The job of this process, made by the first call of ``current`` after Horovod has started. Horovod, too, has one global
# state per process.
_job: Job | None = None


def current() -> Job:
    """Return the job that this process has joined, always the same object; outside of one, a job of this process."""
    global _job
    if _job is None and "horovod.tensorflow" in sys.modules:
        import horovod.tensorflow as hvd

        if hvd.is_initialized() and hvd.size() > 1:
            _job = Job(hvd.size(), hvd.rank(), hvd.local_rank(), hvd.local_size())
    return _job if _job is not None and _job.process == os.getpid() else Job()


def describe_missing_init(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that says so if a launcher started this process as a rank that has not joined; else ""."""
    ranks = job_size(environment)
    if ranks < 2 or not current().is_alone:
        return ""
    return (
        f"this process was started as one of {ranks} ranks, but dapple.init() was not called before the pipeline was "
        "made, so it trains alone: call dapple.init() at the start of the script"
    )


def join(environment: Mapping[str, str] = os.environ) -> Job:
    """Join the job that the launcher's ``environment`` describes; return it, or without one a job of this process.

    Raises DeviceError if Horovod is not installed.
    """
    if job_size(environment) < 2:
        return Job()
    # Open MPI and Horovod read these variables when they start. Process sets are made later, once the plan is known.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_MILLISECONDS)
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", _FUSED_BYTES)
    # While MPI waits it yields the core to the threads that compute: a step took 0.61 s instead of 0.80 s.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("OMPI_MCA_btl_tcp_flags", _TCP_FLAGS)
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise DeviceError(
            f"the launcher started {job_size(environment)} processes, but Horovod is not installed here ({error}): run "
            "python -m dapple_tf.distributed.horovod"
        ) from error
    if not hvd.is_initialized():
        hvd.init()
    return current()
