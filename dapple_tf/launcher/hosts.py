"""Read which hosts a job may use, and find those that answer."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.quote import quote

# "node1 slots=8" of an Open MPI hostfile, "node1:8" of Horovod's discovery scripts, or a name alone: one slot.
_LINE = re.compile(r"(?P<name>\w[\w.-]*)(?::(?P<count>\d{1,6})|(?:\s+slots\s*=\s*(?P<slots>\d{1,6}))?)")
_LOCAL = ("localhost", "127.0.0.1")
_LONGEST_BYTES = 2**20  # what a script may print
_LOOK_SECONDS = 0.02  # how often a running script is checked
_AGENT_VARIABLE = "OMPI_MCA_plm_rsh_agent"
_AGENT = "ssh -o BatchMode=yes -o ConnectTimeout=5"  # asks for no password: a host that wants one does not answer


@dataclass(frozen=True)
class Host:
    """A host by its name or address, and its ``slots``: how many ranks it may run, one for each device."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def read_hosts(path: str | os.PathLike[str], seconds: float = 30) -> tuple[Host, ...]:
    """Return the hosts that the file at ``path`` lists or, where it is executable, that it prints.

    Each line is ``name slots=n`` or ``name:n``; ``#`` begins a comment. Raises ClusterError for a file that cannot be
    read, a script that fails, prints more than 1 MiB or takes longer than ``seconds``, a line that names no host, a
    host that is named twice, or a list in which no host has a slot; the message names the line.
    """
    file = Path(path)
    source = f"the output of {file}" if os.access(file, os.X_OK) and file.is_file() else str(file)
    text = _run_script(file, seconds) if source != str(file) else _read_file(file)
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        found = _LINE.fullmatch(words)
        if found is None:
            raise ClusterError(f"{source}, line {number}: {quote(words)} names no host: write name slots=n, or name:n")
        host = Host(found["name"], int(found["count"] or found["slots"] or 1))
        if host.name in hosts:
            raise ClusterError(
                f"{source}, line {number}: host {host.name} is named twice: add up its slots in one line"
            )
        hosts[host.name] = host
    if not any(host.slots for host in hosts.values()):
        raise ClusterError(f"{source} names no host with a slot: write name slots=n, or name:n, on a line")
    return tuple(host for host in hosts.values() if host.slots)


def _read_file(file: Path) -> str:
    try:
        if file.exists() and not file.is_file():
            raise ClusterError(f"{file} is no regular file: the hosts are read from it again at each start")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ClusterError(f"the file of hosts {file} cannot be read: {reason}") from error


def _run_script(file: Path, seconds: float) -> str:
    """Return what a script prints until it ends; processes that it has started in the background may go on."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [str(file.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # a process group of its own, so that all its processes can be killed
            )
        except OSError as error:
            raise ClusterError(
                f"{file} is executable but cannot be run ({error.strerror}): begin a script with #!, or, if it is a "
                "list of hosts, make it not executable (chmod -x)"
            ) from error
        try:
            _wait_for_script(process, file, (output, errors), seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed, said = (_read_text(stream) for stream in (output, errors))
    if process.returncode:
        last = (said.strip().splitlines() or ["it printed no error"])[-1]
        raise ClusterError(f"{file} failed with exit code {process.returncode}: {quote(last)}")
    return printed


def _wait_for_script(
    process: subprocess.Popen[bytes], file: Path, streams: Sequence[IO[bytes]], seconds: float
) -> None:
    """Wait until a script has ended; raise ClusterError if it takes longer than ``seconds``, or prints too much."""
    end = time.monotonic() + seconds
    while process.poll() is None:
        if any(os.fstat(stream.fileno()).st_size > _LONGEST_BYTES for stream in streams):
            raise ClusterError(f"{file} prints more than 1 MiB: it must print the hosts and end")
        if time.monotonic() > end:
            raise ClusterError(f"{file} has not named the hosts after {seconds:g} s: it must print them and end")
        time.sleep(_LOOK_SECONDS)  # no event says that a file has grown


def _read_text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(_LONGEST_BYTES).decode(errors="replace")


def find_answering(
    hosts: Sequence[Host], environment: Mapping[str, str] = os.environ, seconds: float = 10
) -> tuple[Host, ...]:
    """Return those of the ``hosts`` on which a command can be run within ``seconds``, in their order.

    This host needs no connection. Others are reached as mpirun reaches them: by OMPI_MCA_plm_rsh_agent if it is set,
    else by ssh. Raises ClusterError where that variable is no command.
    """
    agent = _read_agent(environment)

    def answers(host: Host) -> bool:
        return is_local(host.name) or _runs_commands(agent, host.name, seconds)

    with ThreadPoolExecutor(max_workers=min(32, len(hosts)) or 1) as threads:
        return tuple(host for host, answered in zip(hosts, threads.map(answers, hosts), strict=True) if answered)


def _read_agent(environment: Mapping[str, str]) -> list[str]:
    """Return the words of the command that runs another one on a host: of several, as mpirun, the first on the PATH."""
    text = environment.get(_AGENT_VARIABLE, "")
    try:
        commands = [words for words in map(shlex.split, text.split(":")) if words]
    except ValueError as error:
        raise ClusterError(f"{_AGENT_VARIABLE}={quote(text)}: {error}") from error
    found = [words for words in commands if shutil.which(words[0])]
    return (found or commands or [shlex.split(_AGENT)])[0]


def is_local(name: str) -> bool:
    """Return whether ``name`` is one of this host's own names."""
    return name in (*_LOCAL, socket.gethostname())


def _runs_commands(agent: Sequence[str], name: str, seconds: float) -> bool:
    try:
        ran = subprocess.run(
            [*agent, name, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ran.returncode == 0
