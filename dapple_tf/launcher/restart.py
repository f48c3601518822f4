"""Pass messages between the launcher and the job that it has started, and start a rank again in the same process.

``dapple launch`` passes the number of the start in the job's environment. It writes to rank 0's standard input on which
hosts more ranks are possible. The job answers with its exit code.

Horovod's elastic driver (``horovodrun --host-discovery-script``) starts processes only in place of those that have
failed. The others must ask it for their new rank. So when a rank is lost, each other rank replaces its own program by
exec, in the same process and slot. It runs this file as a script, which asks the driver for the new rank; so this file
imports nothing of dapple_tf.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import secrets
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLE = "DAPPLE_LAUNCH"

_MORE_RANKS = "dapple: more ranks are possible: "
"""Begins a line on rank 0's standard input that asks an elastic job to save, and to end with the code ``CONTINUE``."""

CONTINUE = 75
"""Exit code of a job that has saved, and is to be started again with more ranks (EX_TEMPFAIL of sysexits.h)."""

REFUSED = 78
"""Exit code of a job that would fail in the same way at each start (EX_CONFIG of sysexits.h)."""


@dataclass(frozen=True)
class Start:
    """A start of a job: ``number`` 0 for the first, and when the previous start ``ended``, in seconds since 1970.

    ``launch``: a random text, the same for all starts by one launcher. ``began``: when this start was made.
    ``cause``: why the previous start ended, in words; "" for the first. ``lost``: the ranks of the previous start whose
    hosts were lost.
    """

    number: int
    ended: float = 0.0
    launch: str = "0"
    began: float = 0.0
    cause: str = ""
    lost: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(dataclasses.asdict(self))


def read_start(environment: Mapping[str, str] = os.environ) -> Start | None:
    """Return which start of its job this process belongs to; None if the launcher does not start failed jobs again."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    fields = json.loads(text)
    return Start(**{**fields, "lost": tuple(fields.get("lost", ()))})


def failure_code(lasts: bool, environment: Mapping[str, str] = os.environ) -> int:
    """Return the exit code of a failed process: ``REFUSED`` if the error ``lasts`` (see ``DappleError``), else 1.

    It is 1, too, where no launcher would start the job again.
    """
    return REFUSED if lasts and starts_again(environment) else 1


def starts_again(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process was started by a launcher that starts a failed job again."""
    return VARIABLE in environment or is_driven(environment)


def offer_ranks(hosts: Sequence[tuple[str, int]]) -> str:
    """Return the line that tells a job on which hosts it could run, each with its number of ranks.

    A line with no more ranks than the job has withdraws an earlier one.
    """
    return f"{_MORE_RANKS}{','.join(f'{name}:{ranks}' for name, ranks in hosts)}\n"


class Offers:
    """Reads, on rank 0, the offers of the launcher from standard input: hosts on which the job could run."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        # Else what comes on standard input is the user's.
        self._launched = VARIABLE in environment and not is_driven(environment)
        self._unread = ""

    def read(self) -> list[tuple[str, int]]:
        """Return the hosts, with their ranks, of the newest offer since the last call; none if there was no offer.

        A long line may arrive in parts: the part of an incomplete line is kept for the next call.
        """
        while self._launched and select.select([sys.stdin], [], [], 0)[0]:
            data = os.read(sys.stdin.fileno(), 65536)
            if not data:
                break
            self._unread += data.decode(errors="replace")
        *lines, self._unread = self._unread.split("\n")
        offers = [line.removeprefix(_MORE_RANKS) for line in lines if line.startswith(_MORE_RANKS)]
        words = offers[-1].split(",") if offers and offers[-1] else []
        return [(name, int(ranks)) for name, _, ranks in (word.rpartition(":") for word in words)]


# --- Under Horovod's elastic driver


_RANK = "HOROVOD_RANK"
# The variables of a rank, in the order of the driver's answer.
_SLOT = (_RANK, *(f"HOROVOD_{name}" for name in ("SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")))


def is_driven(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether Horovod's elastic driver has started this process."""
    return environment.get("HOROVOD_ELASTIC") == "1" and "HOROVOD_GLOO_RENDEZVOUS_PORT" in environment


class HostChanges:
    """Notes, on rank 0, that Horovod's driver has reported a change of its hosts."""

    def __init__(self) -> None:
        from horovod.runner.elastic.worker import WorkerNotificationManager

        self.noted = False
        manager = WorkerNotificationManager()
        manager.init()
        manager.register_listener(self)

    def on_hosts_updated(self, timestamp: int, update: object) -> None:
        """Note a message, in the thread that receives it."""
        self.noted = True


def first_start() -> Start:
    """Return the first start of a job by Horovod's driver, which does not count them."""
    return Start(0, launch=secrets.token_hex(8), began=time.time())


def begin_again(cause: str, lost: tuple[int, ...] = ()) -> None:
    """Run the program of this process again from its start, as a rank of the next start, under Horovod's driver.

    Returns if there is no such driver: then the process must end, and its launcher starts all ranks again.
    ``cause`` and ``lost``: see ``Start``. Any thread may call this; all other threads end at once.
    """
    if not is_driven():
        return
    now = time.time()
    start = dataclasses.replace(read_start() or first_start(), ended=now, began=now, cause=cause, lost=lost)
    start = dataclasses.replace(start, number=start.number + 1)
    # Without this variable, other ranks do not take this process for the one that gets its old rank.
    environment = {name: value for name, value in os.environ.items() if name != _RANK}
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be a stream without a descriptor
        os.dup2(sys.stderr.fileno(), 2)  # descriptor 2 may be redirected, to hide what libraries write when they start
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the descriptor by which the folder was listed is closed
            os.set_inheritable(descriptor, descriptor <= 2)
    words = [sys.executable, "-I", __file__, sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, words, {**environment, VARIABLE: start.to_text()})


def _run_with_new_rank(words: list[str]) -> None:
    """Replace this process by the command ``words``, with the rank that the driver gives once all ranks are known.

    Returns, which ends the process, if the driver has no rank for it: its host has been left out.
    """
    address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    connection = http.client.HTTPConnection(address, int(port))
    connection.request("GET", f"/rank_and_size/{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}")
    values = connection.getresponse().read().decode().split(",")
    if int(values[0]) >= 0:
        os.execve(words[0], words, {**os.environ, **dict(zip(_SLOT, values, strict=True))})


if __name__ == "__main__":
    _run_with_new_rank(sys.argv[1:])
