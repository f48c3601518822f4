"""Run several real processes with mpirun or horovodrun, end them, and separate their outputs.

A launch that hangs ends after a timeout: the error names the ranks that still run and, from Horovod's report, the
tensors that wait and the ranks that they wait for.
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

# A variable in the environment of every process that one launch starts, on any host, and of no other process.
_MARK = "DAPPLE_TEST_LAUNCH"
_RANKS = (b"OMPI_COMM_WORLD_RANK=", b"HOROVOD_RANK=")


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks; ``command`` returns its arguments, given a folder and the number of ranks.

    Each rank's output must go to the files ``rank.N/stdout`` and ``rank.N/stderr`` under ``folder/out``.
    """

    name: str
    command: Callable[[Path, int], Sequence[str]]


# Only this machine takes part: `lo` needs no network, and TCP no rights, which shared memory may lack in a container. A
# rank that waits yields its core to the others: there are more ranks than cores.
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
    """Return the arguments of Horovod's own launcher, from the environment of the tests; it needs no MPI."""
    program = str(Path(sys.executable).with_name("horovodrun"))
    return (sys.executable, program, "--gloo", "-np", str(ranks), "--output-filename", f"{folder}/out")


MPIRUN = Launcher("mpirun", _mpirun)
HOROVODRUN = Launcher("horovodrun", _horovodrun)


@dataclass(frozen=True)
class Rank:
    """The output of one rank."""

    stdout: str
    stderr: str


class RanksError(AssertionError):
    """A rank has failed or hung.

    ``ranks``: the output of each so far. ``exit_code``: of the launcher; None after a hang. ``left``: ids of processes
    that still ran when the launcher had ended.
    """

    def __init__(
        self, message: str, ranks: tuple[Rank, ...], exit_code: int | None, left: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.exit_code = exit_code
        self.left = left


def environment_without_launchers() -> dict[str, str]:
    """Return this process's environment without the variables by which a launcher describes a job."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "HOROVOD_"))}


def run_python(
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    exit_code: int = 0,
    timeout_seconds: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run ``python arguments`` as a new process in ``folder``, which must end with ``exit_code``; return its output.

    ``variables``: more for its environment.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment_without_launchers()
        | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


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
    """Run ``python arguments`` as the ranks of a job in the project's root; return their outputs, by rank.

    At the end the processes that were started here and still run are killed, and no others. Horovod reports tensors
    that wait for longer than ``stall_seconds``. ``during`` is called once the launcher has started, with the folder of
    the output files; the timeout counts from its end. Processes on other hosts may take ``linger_seconds`` longer than
    the launcher to end.

    Raises:
        RanksError: A rank ended with another code than 0, or some still ran after ``timeout_seconds``.
    """
    settings = {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",  # the output of a killed rank is not lost
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(stall_seconds),
        _MARK: uuid.uuid4().hex,
    }
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        folder = Path(scratch)
        with (folder / "launcher.log").open("w+", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*launcher.command(folder, ranks), sys.executable, *arguments],
                cwd=ROOT,
                env=environment_without_launchers() | settings | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # in the files, by rank
                stderr=log,
                start_new_session=True,  # not to receive the terminal's signals
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
            launcher_output = log.read()
        written = tuple(_read_rank(Path(scratch), rank) for rank in range(ranks))
    if running:
        raise RanksError(_describe_hang(running, written, timeout_seconds), written, None)
    if process.returncode:
        text = "".join(_tail(rank, output) for rank, output in enumerate(written)) or launcher_output
        raise RanksError(
            f"{launcher.name} ended with code {process.returncode}{text}", written, process.returncode, left
        )
    return written


def _describe_hang(running: Mapping[int, int | None], written: Sequence[Rank], timeout_seconds: float) -> str:
    still = ", ".join(str(rank) for rank in sorted({rank for rank in running.values() if rank is not None}))
    # Horovod's stall report has a line "1: [tensor, tensor]" for each rank that others wait for; the last one counts.
    report = "".join(rank.stderr for rank in written).rpartition("Missing ranks:")[2]
    missing = re.findall(r"^(\d+)!?: \[(.*)\]", report, re.MULTILINE)
    stuck = "; ".join(f"rank {rank} has not submitted {tensors}" for rank, tensors in missing)
    text = "".join(_tail(rank, output) for rank, output in enumerate(written))
    return (
        f"after {timeout_seconds:g} s rank(s) {still} still ran: "
        f"{stuck or 'Horovod reports no tensor that waits, so a rank hangs elsewhere'}{text}"
    )


def _tail(rank: int, output: Rank, lines: int = 20) -> str:
    text = "\n".join((output.stdout + output.stderr).splitlines()[-lines:])
    return f"\n--- rank {rank}:\n{text}" if text else ""


def _read_rank(scratch: Path, rank: int) -> Rank:
    """Read the output files of a rank: rank.N/stdout, with N padded with zeros to the width of the highest rank."""

    def read(stream: str) -> str:
        found = [path for path in scratch.glob(f"out/**/rank.*/{stream}") if int(path.parent.suffix[1:]) == rank]
        text = found[0].read_text(encoding="utf-8", errors="replace") if found else ""
        return re.sub(rf"^\[{rank}\]<{stream}>:", "", text, flags=re.MULTILINE)  # horovodrun's prefix of every line

    return Rank(read("stdout"), read("stderr"))


def _end_all(mark: str) -> tuple[int, ...]:
    """Kill all processes of a launch, also those that they start meanwhile; return those that ran at first."""
    left = tuple(_find_marked(mark))
    found = left
    while found:
        for pid in found:
            _kill(pid)
        time.sleep(0.01)
        found = tuple(_find_marked(mark))
    return left


def _find_marked(mark: str) -> dict[int, int | None]:
    """Return the live processes of a launch, each with its rank (None: the launcher, or a helper process of it).

    They are found by their environment, which children inherit; launchers start new sessions and process groups.
    """
    wanted = f"{_MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            values = (entry / "environ").read_bytes().split(b"\0")  # empty when it has ended
        except OSError:  # it has ended meanwhile, or belongs to another user
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
