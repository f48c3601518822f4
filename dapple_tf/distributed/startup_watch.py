"""End this rank if another one fails while ``dapple.init`` waits for all ranks, and print which rank has failed.

The watchdog needs connections between the ranks, and to make these, Horovod waits for all of them. Until then the ranks
of one host observe each other's processes: the others name a rank whose process has ended or stays stopped within the
timeout. A rank whose process runs is waited for, however slow it is. Of ranks on other hosts only their numbers are
known; they are given up after ten timeouts.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path

from dapple_tf.distributed.failure_detector import DEFAULT_TIMEOUT, TIMEOUT, read_timeout
from dapple_tf.distributed.process_exit import print_line
from dapple_tf.errors import ClusterError, JobError
from dapple_tf.profiler.detect import job_rank, job_size

_ADVICE = f"All processes end. {TIMEOUT} sets how long a rank may be away."
_ENDED_SECONDS = 2.0  # launchers end the job by themselves when a process has failed
_OTHER_HOSTS = 10  # a rank of another host that has not connected within this number of timeouts has failed


@contextlib.contextmanager
def watching_start(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Watch the other ranks while the block waits for all of them; does nothing outside of a job."""
    try:
        rank, size = job_rank(environment), job_size(environment)
        timeout = read_timeout(environment)
    except ClusterError:  # the block raises this error itself
        size = 1
    except JobError:  # later rank 0 raises this error on all ranks
        timeout = DEFAULT_TIMEOUT
    if size < 2 or rank not in find_rank_processes(environment):
        yield
        return
    done = threading.Event()
    watch = StartupWatch(rank, size, timeout, lambda: find_rank_processes(environment))
    thread = threading.Thread(target=watch.run, args=(done,), name="dapple-startup-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class StartupWatch:
    """Examines the other ranks again and again, for ``rank`` of ``size``; ``exit_process`` ends this one.

    ``find_processes`` returns the processes of the ranks on this host.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        find_processes: Callable[[], Mapping[int, Sequence[int]]],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._interval = min(1.0, timeout / 10)
        self._find_processes = find_processes
        self._exit_process = exit_process
        self._known: dict[int, Sequence[int]] = {}
        self._states: dict[int, tuple[ProcessState, float]] = {}  # and since when, by rank
        self._began = time.monotonic()
        self._has_printed = False

    def run(self, done: threading.Event) -> None:
        """Examine the others until ``done`` is set, or one has failed."""
        last = time.monotonic()
        while not done.wait(self._interval):
            now = time.monotonic()
            if now - last > 5 * self._interval:  # this process itself was stopped
                self.note_pause(now - last)
            last = now
            problem = self.examine(now)
            if problem:
                print_line(f"rank {self._rank} stops in dapple.init: {problem}. {_ADVICE}")
                if not done.wait(2 * self._interval):  # the others detect it too, and must not be ended before
                    self._exit_process(1)
                return

    def note_pause(self, seconds: float) -> None:
        """Exclude ``seconds`` for which this process itself was suspended from what others have taken."""
        self._began += seconds
        self._states = {rank: (state, since + seconds) for rank, (state, since) in self._states.items()}

    def examine(self, now: float) -> str:
        """Return which rank has failed and how, or "", as of ``now``; print once that this rank waits."""
        self._known |= self._find_processes()
        here = sorted(rank for rank in self._known if rank != self._rank)
        for rank in here:
            processes = self._known[rank]
            if problem := self._find_problem(rank, state_of(processes), now):
                return f"rank {rank} (process {processes[0]}) {problem}"
        waited, elsewhere = now - self._began, [rank for rank in range(self._size) if rank not in self._known]
        if elsewhere and waited >= _OTHER_HOSTS * self._timeout:
            return f"after {waited:.0f} s not all of the ranks {elsewhere} have joined, which are not on this host"
        if waited >= self._timeout and not self._has_printed:
            self._has_printed = True
            print_line(
                f"rank {self._rank} has waited in dapple.init for {waited:.0f} s: not all ranks have called it. Ranks "
                f"{here} run on this host; ranks {elsewhere} are on other hosts."
            )
        return ""

    def _find_problem(self, rank: int, state: ProcessState, now: float) -> str:
        """Note the present ``state`` of a rank; return why it has failed, or ""."""
        before, since = self._states.get(rank, (None, now))
        self._states[rank] = state, since if state == before else now
        lasted, patience = now - self._states[rank][1], self._timeout - 2 * self._interval
        if state == ProcessState.ENDED and lasted >= min(_ENDED_SECONDS, patience):
            return "was killed or has ended before all ranks had joined"
        if state == ProcessState.STOPPED and lasted >= patience:
            return f"has been stopped for {lasted:.1f} s (SIGSTOP, Ctrl-Z or a debugger)"
        return ""


# --- Find the processes of a job's ranks on this host, and their states, in /proc
# The launcher gives every process the name of the job and its rank in the environment that it starts with. So this
# needs no connection, and finds a rank before it has run a line of Python.


# The variables that name the job, and the variable that holds the rank: of Open MPI, and of horovodrun with Gloo.
_LAUNCHERS = (
    (("OMPI_MCA_orte_jobfam_session_dir", "OMPI_MCA_ess_base_jobid"), "OMPI_COMM_WORLD_RANK"),
    (("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), "HOROVOD_RANK"),
)


class ProcessState(Enum):
    """The state of a rank's process: it runs (or waits for something), is stopped by a signal, or has ended."""

    RUNS = "runs"
    STOPPED = "stopped"
    ENDED = "ended"


def find_rank_processes(environment: Mapping[str, str]) -> Mapping[int, Sequence[int]]:
    """Return the process numbers of each rank that runs on this host, including the helper processes of a rank.

    ``environment``: the environment of one of the ranks. The result is empty if the launcher does not name the job, and
    on systems without /proc.
    """
    found: dict[int, list[int]] = {}
    for names, rank_name in _LAUNCHERS:
        if all(environment.get(name) for name in names):
            job = {f"{name}={environment[name]}".encode() for name in names}
            prefix = f"{rank_name}=".encode()
            for number, variables in _environments():
                rank = next((value.removeprefix(prefix) for value in variables if value.startswith(prefix)), b"")
                if rank.isdigit() and job <= variables:
                    found.setdefault(int(rank), []).append(number)
            break
    return found


def state_of(processes: Sequence[int]) -> ProcessState:
    """Return the state of a rank with these processes: it is stopped if one of them is stopped."""
    letters = [letter for letter in map(_state_letter, processes) if letter not in "ZX"]
    if not letters:
        return ProcessState.ENDED
    return ProcessState.STOPPED if any(letter in "Tt" for letter in letters) else ProcessState.RUNS


def _environments() -> list[tuple[int, set[bytes]]]:
    """Return the number and the variables of each process that this one may examine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(entry.name), set((entry / "environ").read_bytes().split(b"\0"))))
        except OSError:  # the process has ended meanwhile, or belongs to another user
            continue
    return found


def _state_letter(number: int) -> str:
    """Return the letter for the state of a process in proc(5); "X" if the process has ended."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]
