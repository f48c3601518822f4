"""Find the processes of a job's ranks on this host, and what they do, in /proc.

The launcher gives every process the name of the job and its rank in the environment that it starts with. So this needs
no connection, and knows a rank before it has run a line of Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

# The variables that name the job, and the one of the rank: of Open MPI, and of horovodrun with Gloo.
_LAUNCHERS = (
    (("OMPI_MCA_orte_jobfam_session_dir", "OMPI_MCA_ess_base_jobid"), "OMPI_COMM_WORLD_RANK"),
    (("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), "HOROVOD_RANK"),
)


class State(Enum):
    """The state of a process: it runs (or waits for something), is stopped by a signal, or has ended."""

    RUNS = "runs"
    STOPPED = "stopped"
    ENDED = "ended"


def find_rank_processes(environment: Mapping[str, str]) -> Mapping[int, Sequence[int]]:
    """Return the numbers of the live processes of each rank that runs on this host, helpers of a rank included.

    ``environment``: of one of them. Empty for launchers that do not name their jobs, and on systems without /proc.
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


def state_of(processes: Sequence[int]) -> State:
    """Return what a rank of these processes does: one that is stopped keeps the others waiting."""
    letters = [letter for letter in map(_state_letter, processes) if letter not in "ZX"]
    if not letters:
        return State.ENDED
    return State.STOPPED if any(letter in "Tt" for letter in letters) else State.RUNS


def _environments() -> list[tuple[int, set[bytes]]]:
    """Return the number and the variables of each process that this one may examine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(entry.name), set((entry / "environ").read_bytes().split(b"\0"))))
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
    return found


def _state_letter(number: int) -> str:
    """Return the state of a process as proc(5) writes it; "X" for one that has ended."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]
