"""Emulate hosts that can be lost: processes of one machine under other host names, each with its own memory folder.

Only names differ (a UTS namespace each; needs root): links are those of one machine. ``emulated_hosts`` has networks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "DAPPLE_EMULATED"  # in the environment of every process of these hosts and their launcher: a random text
_HOST = "DAPPLE_EMULATED_HOST"
_MEMORY = "/dev/shm"


def find_missing_for_names() -> str | None:
    """Return why processes cannot have other host names here, or None if they can."""
    done = subprocess.run(["unshare", "--uts", "hostname", "other"], check=False, capture_output=True, text=True)
    return f"hosts with names of their own need root: {done.stderr.strip()}" if done.returncode else None


@dataclass(frozen=True)
class NamedHosts:
    """Hosts by their ``names``. ``folder``: of their list and agent. ``memory``: where each has a folder.

    ``mark``: what all processes of the hosts and of the launcher have in their environment.
    """

    names: tuple[str, ...]
    folder: Path
    memory: Path
    mark: str

    def write_list(self, slots: Mapping[str, int]) -> Path:
        """Write the list of hosts with their slots for ``dapple launch``; return its path."""
        path = self.folder / "hosts"
        path.write_text("".join(f"{name} slots={count}\n" for name, count in slots.items()))
        return path

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a launcher starts processes on the hosts."""
        return {
            "OMPI_MCA_plm_rsh_agent": str(self.folder / "agent"),
            "DAPPLE_SNAPSHOT_DIR": str(self.memory),
            _MARK: self.mark,
        }

    @property
    def mpirun_options(self) -> list[str]:
        """The options of mpirun, for ``dapple launch --mpirun``: only this machine takes part."""
        words = "--allow-run-as-root --oversubscribe --bind-to none --mca btl tcp,self --mca btl_tcp_if_include lo"
        return [*words.split(), "--mca", "oob_tcp_if_include", "lo", "-x", "TF_CPP_MIN_LOG_LEVEL"]

    def lose(self, *names: str) -> None:
        """Lose hosts at once: their processes end, their memory is gone, and they do not answer."""
        for name in names:
            (self.folder / f"{name}.down").touch()
        for name in names:
            for number in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            for place in self.memory.glob(f"dapple-*/{name}"):
                shutil.rmtree(place, ignore_errors=True)

    def return_host(self, name: str) -> None:
        """Let a host that was lost answer again; its memory is empty."""
        (self.folder / f"{name}.down").unlink(missing_ok=True)

    def processes(self, name: str | None = None) -> list[int]:
        """Return the ids of the processes on a host; without a name of all hosts and the launcher."""
        wanted = [f"{_MARK}={self.mark}".encode(), *([f"{_HOST}={name}".encode()] if name else [])]
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                values = (entry / "environ").read_bytes().split(b"\0")
                if all(value in values for value in wanted):
                    found.append(int(entry.name))
        return sorted(found)

    def rank_process(self, rank: int) -> int | None:
        """Return the process of a rank of the job that runs now; None while there is none."""
        for number in self.processes():
            with contextlib.suppress(OSError):
                values = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
                if f"OMPI_COMM_WORLD_RANK={rank}".encode() in values:
                    return number
        return None

    def snapshots(self, name: str) -> list[int]:
        """Return the steps of the parts in a host's memory, of the last start."""
        found = self.memory.glob(f"dapple-*/{name}/*/*/snapshot-*.st")
        return sorted({int(path.name.split("-")[1]) for path in found})


@contextlib.contextmanager
def named_hosts(names: Sequence[str]) -> Iterator[NamedHosts]:
    """Emulate hosts with these names in the block; at its end their processes are killed and their memory is freed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=_MEMORY) as memory:
        hosts = NamedHosts(tuple(names), Path(folder), Path(memory), uuid.uuid4().hex)
        agent = hosts.folder / "agent"
        agent.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            f'host=$1; shift; [ -e "{folder}/$host.down" ] && exit 255\n'
            f'exec env {_HOST}=$host unshare --uts sh -c "hostname $host; $*"\n'
        )
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        try:
            yield hosts
        finally:
            while found := hosts.processes():
                for number in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                time.sleep(0.02)  # until the kernel has ended them
