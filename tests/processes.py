"""Several real processes under mpirun: started, watched, ended, and their output told apart.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None or shutil.which("mpirun") is None,
    reason="Horovod and Open MPI are not installed: make horovod",
)

# Everything stays on this machine: `lo` needs no network, and TCP none of the rights that shared memory may lack in a
# container. A rank that waits gives its core to the others, of which there are more than cores.
MPIRUN = (
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    *("--mca", "mpi_yield_when_idle", "1"),
    *("--mca", "btl", "tcp,self"),
    *("--mca", "btl_tcp_if_include", "lo"),
    *("--mca", "oob_tcp_if_include", "lo"),
)


@dataclass(frozen=True)
class Rank:
    """What one rank wrote."""

    stdout: str
    stderr: str


class RanksError(AssertionError):
    """A rank failed, or hung; ``ranks`` is what each had written by then, ``exit_code`` None after a hang.

    ``left``: processes that still ran when mpirun had ended.
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
) -> tuple[Rank, ...]:
    """Run ``python arguments`` as so many ranks, from the project's root; what each wrote, in the order of the ranks.

    Whatever still runs at the end, of the processes that were started here and no others, is killed. Horovod reports
    tensors that wait for longer than ``stall_seconds``.

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
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(stall_seconds),
    }
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        command = [*MPIRUN, "--mca", "orte_tmpdir_base", scratch, "--output-filename", f"{scratch}/out"]
        with (Path(scratch) / "mpirun.log").open("w+", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*command, "-np", str(ranks), sys.executable, *arguments],
                cwd=ROOT,
                env=inherited | settings | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the files have it, rank by rank
                stderr=log,
                start_new_session=True,  # mpirun gives every rank a process group, but they share its session
            )
            running: dict[int, int | None] = {}
            left: tuple[int, ...] = ()
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                running = _find_session(process.pid)
            finally:
                # Before mpirun is waited for, so that its number cannot have become another's.
                left = tuple(_find_session(process.pid))
                for pid in left:
                    _kill(pid)
                process.wait()
            log.seek(0)
            launcher = log.read()
        written = tuple(_read_rank(Path(scratch), rank) for rank in range(ranks))
    if running:
        raise RanksError(_describe_hang(running, written, timeout_seconds), written, None)
    if process.returncode:
        told = "".join(_tail(rank, output) for rank, output in enumerate(written)) or launcher
        raise RanksError(f"mpirun ended with code {process.returncode}{told}", written, process.returncode, left)
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
    """What Open MPI has collected: out/JOB/rank.N/stdout, N padded with zeros to the width of the highest."""

    def read(stream: str) -> str:
        found = [path for path in scratch.glob(f"out/*/rank.*/{stream}") if int(path.parent.suffix[1:]) == rank]
        return found[0].read_text(encoding="utf-8", errors="replace") if found else ""

    return Rank(read("stdout"), read("stderr"))


def _find_session(session: int) -> dict[int, int | None]:
    """The live processes of a session, each with its rank (None: mpirun, or a rank's child without one)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command in parentheses may hold anything; after it: state, parent, group, session.
            state, _, _, of = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                rank = re.search(rb"(?:^|\0)OMPI_COMM_WORLD_RANK=(\d+)", (entry / "environ").read_bytes())
                found[int(entry.name)] = int(rank[1]) if rank else None
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
