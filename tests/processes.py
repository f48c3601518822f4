"""Several real processes under mpirun or horovodrun: started, watched, ended, and their output told apart.

A hang is reported, not waited for: the error names the ranks that still ran, and what Horovod says of the tensors that
wait and the ranks that they wait for.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import ROOT

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None or shutil.which("mpirun") is None,
    reason="Horovod and Open MPI are not installed: make horovod",
)

# In the environment of every process that one launch starts, on whatever host, and of no other.
_MARK = "DAPPLE_TEST_LAUNCH"
_RANKS = (b"OMPI_COMM_WORLD_RANK=", b"HOROVOD_RANK=")


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks: ``command`` gives its words from a folder of its own, and the number of ranks.

    Each rank's output must go to files under ``folder/out``, as ``rank.N/stdout`` and ``stderr``.
    """

    name: str
    command: Callable[[Path, int], Sequence[str]]


# Everything stays on this machine: `lo` needs no network, and TCP none of the rights that shared memory may lack in a
# container. A rank that waits gives its core to the others, of which there are more than cores.
def _mpirun(folder: Path, ranks: int) -> Sequence[str]:
    return (
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *("--mca", "mpi_yield_when_idle", "1"),
        *("--mca", "btl", "tcp,self"),
        *("--mca", "btl_tcp_if_include", "lo"),
        *("--mca", "oob_tcp_if_include", "lo"),
        *("--mca", "orte_tmpdir_base", str(folder), "--output-filename", f"{folder}/out", "-np", str(ranks)),
    )


def _horovodrun(folder: Path, ranks: int) -> Sequence[str]:
    """Horovod's own launcher, of the environment that runs the tests; it needs no MPI."""
    program = str(Path(sys.executable).with_name("horovodrun"))
    return (sys.executable, program, "--gloo", "-np", str(ranks), "--output-filename", f"{folder}/out")


MPIRUN = Launcher("mpirun", _mpirun)
HOROVODRUN = Launcher("horovodrun", _horovodrun)


@dataclass(frozen=True)
class Rank:
    """What one rank wrote."""

    stdout: str
    stderr: str


class RanksError(AssertionError):
    """A rank failed, or hung; ``ranks`` is what each had written by then, ``exit_code`` None after a hang.

    ``left``: processes that still ran when the launcher had ended.
    """

    def __init__(
        self, message: str, ranks: tuple[Rank, ...], exit_code: int | None, left: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.exit_code = exit_code
        self.left = left


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    *,
    timeout_seconds: float = 120,
    stall_seconds: int = 10,
    environment: Mapping[str, str] | None = None,
    launcher: Launcher = MPIRUN,
    during: Callable[[Path], None] | None = None,
    linger_seconds: float = 0,
) -> tuple[Rank, ...]:
    """Run ``python arguments`` as so many ranks, from the project's root; what each wrote, in the order of the ranks.

    Whatever still runs at the end, of the processes that were started here and no others, is killed. Horovod reports
    tensors that wait for longer than ``stall_seconds``. ``during`` is called first, with the folder
    under which their output grows; the time counts from its end. What the launcher has left on other hosts may take
    ``linger_seconds`` to end.

    Raises:
        RanksError: A rank ended with another code than 0, or some still ran after ``timeout_seconds``.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "HOROVOD_"))
    }
    settings = {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",  # what a killed rank had to say is not lost
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Open MPI gives a rank a pseudo-terminal, on which Numba would end the output with an escape sequence.
        "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(stall_seconds),
        _MARK: uuid.uuid4().hex,
    }
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        folder = Path(scratch)
        with (folder / "launcher.log").open("w+", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*launcher.command(folder, ranks), sys.executable, *arguments],
                cwd=ROOT,
                env=inherited | settings | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the files have it, rank by rank
                stderr=log,
                start_new_session=True,  # no terminal's signals
            )
            running: dict[int, int | None] = {}
            left: tuple[int, ...] = ()
            try:
                if during is not None:
                    during(folder / "out")
                process.wait(timeout_seconds)
                ended = time.monotonic()
                while time.monotonic() < ended + linger_seconds and _find_marked(settings[_MARK]):
                    time.sleep(0.1)
            except subprocess.TimeoutExpired:
                running = _find_marked(settings[_MARK])
            finally:
                left = _end_all(settings[_MARK])
                process.wait()
            log.seek(0)
            told_by_launcher = log.read()
        written = tuple(_read_rank(Path(scratch), rank) for rank in range(ranks))
    if running:
        raise RanksError(_describe_hang(running, written, timeout_seconds), written, None)
    if process.returncode:
        told = "".join(_tail(rank, output) for rank, output in enumerate(written)) or told_by_launcher
        raise RanksError(
            f"{launcher.name} ended with code {process.returncode}{told}", written, process.returncode, left
        )
    return written


def _describe_hang(running: Mapping[int, int | None], written: Sequence[Rank], timeout_seconds: float) -> str:
    still = ", ".join(str(rank) for rank in sorted({rank for rank in running.values() if rank is not None}))
    # Horovod's stall report has a line "1: [tensor, tensor]" for each rank that is waited for; the last report counts.
    report = "".join(rank.stderr for rank in written).rpartition("Missing ranks:")[2]
    missing = re.findall(r"^(\d+)!?: \[(.*)\]", report, re.MULTILINE)
    stuck = "; ".join(f"rank {rank} has not submitted {tensors}" for rank, tensors in missing)
    told = "".join(_tail(rank, output) for rank, output in enumerate(written))
    return (
        f"after {timeout_seconds:g} s rank(s) {still} still ran: "
        f"{stuck or 'Horovod reports no tensor that waits, so a rank hangs elsewhere'}{told}"
    )


def _tail(rank: int, output: Rank, lines: int = 20) -> str:
    text = "\n".join((output.stdout + output.stderr).splitlines()[-lines:])
    return f"\n--- rank {rank}:\n{text}" if text else ""


def _read_rank(scratch: Path, rank: int) -> Rank:
    """What the launcher has collected: rank.N/stdout, N padded with zeros to the width of the highest."""

    def read(stream: str) -> str:
        found = [path for path in scratch.glob(f"out/**/rank.*/{stream}") if int(path.parent.suffix[1:]) == rank]
        text = found[0].read_text(encoding="utf-8", errors="replace") if found else ""
        return re.sub(rf"^\[{rank}\]<{stream}>:", "", text, flags=re.MULTILINE)  # horovodrun begins every line so

    return Rank(read("stdout"), read("stderr"))


def _end_all(mark: str) -> tuple[int, ...]:
    """Kill all processes of a launch, with those that they start meanwhile; which there were at first."""
    left = tuple(_find_marked(mark))
    found = left
    while found:
        for pid in found:
            _kill(pid)
        time.sleep(0.01)
        found = tuple(_find_marked(mark))
    return left


def _find_marked(mark: str) -> dict[int, int | None]:
    """The live processes of a launch, each with its rank (None: the launcher, or a helper of its own).

    Launchers put what they start into sessions of their own; the environment is handed down everywhere.
    """
    wanted = f"{_MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            values = (entry / "environ").read_bytes().split(b"\0")  # empty when it has ended
        except OSError:  # it has ended meanwhile, or is another's
            continue
        if wanted in values:
            rank = next((re.fullmatch(rb"\w+_RANK=(\d+)", v) for v in values if v.startswith(_RANKS)), None)
            found[int(entry.name)] = int(rank[1]) if rank else None
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
