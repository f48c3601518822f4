"""Send files to the ranks on other hosts that keep copies of them, while training goes on.

A file goes over a TCP connection of its own between two ranks, from the sender's file to the receiver's, by threads
that wait in the kernel. Horovod's collectives would need all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO

from dapple_tf.distributed.links import Link
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.places import prepare_for_tensors
from dapple_tf.distributed.rendezvous import connect_pairs
from dapple_tf.errors import JobError
from dapple_tf.profiler.files import atomic_replacement

_BLOCK_BYTES = 2**20
_LONGEST_LINE = 1000  # bytes
_NAME = re.compile(r"[\w-][\w.-]{0,199}")  # of a file: a sender must not choose the folder


def choose_buddies(hosts: Sequence[str]) -> tuple[int | None, ...]:
    """Return for each rank the rank on the next host that keeps its copies; None where all are on one host.

    ``hosts``: the name of each rank's host. Ranks of a host are spread over those of the next one.
    """
    names = list(dict.fromkeys(hosts))
    members = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    if len(names) < 2:
        return (None,) * len(hosts)
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    return tuple(
        members[following[host]][members[host].index(rank) % len(members[following[host]])]
        for rank, host in enumerate(hosts)
    )


class Buddies:
    """The connections of this rank to its buddy, and to the ranks whose buddy it is; every rank must make it.

    Files that arrive are written to ``folder``, as a whole or not at all, and ``arrived`` is called with the sender's
    rank, the file's ``number`` and whether there is one, on another thread. ``failed`` is called with what went wrong,
    after which nothing arrives: "" where another rank has closed its connection, which the watchdog explains.
    """

    def __init__(
        self,
        job: Job,
        buddies: Sequence[int | None],
        folder: Path,
        arrived: Callable[[int, int, bool], None],
        failed: Callable[[str], None],
    ) -> None:
        self._folder, self._arrived, self._failed = folder, arrived, failed
        pairs = {(min(rank, one), max(rank, one)) for rank, one in enumerate(buddies) if one is not None}
        self._links = {link.rank: link for link in connect_pairs(job, pairs, "ranks keep copies for each other")}
        self._buddy = buddies[job.rank]
        self._closed = False
        self.senders = tuple(rank for rank, one in enumerate(buddies) if one == job.rank)
        self._threads = [
            threading.Thread(target=self._receive_all, args=(self._links[rank],), name=f"copies-of-{rank}", daemon=True)
            for rank in self.senders
        ]
        for link in self._links.values():
            link.connection.settimeout(None)
            prepare_for_tensors(link.connection)
        for thread in self._threads:
            thread.start()

    def send(self, path: Path | None, number: int) -> None:
        """Send the file at ``path``, or word that there is none with this ``number``; return when it is on its way.

        Raises OSError where the buddy cannot be reached. Does nothing for a rank without a buddy.
        """
        if self._buddy is None:
            return
        connection = self._links[self._buddy].connection
        size = 0 if path is None else path.stat().st_size
        head = {"name": "" if path is None else path.name, "number": number, "bytes": size}
        connection.sendall(f"{json.dumps(head)}\n".encode())
        if path is not None:
            with path.open("rb") as stream:
                connection.sendfile(stream)

    def stop(self) -> None:
        """Note that all ranks will close their connections now."""
        self._closed = True

    def close(self) -> None:
        """Close the connections, and wait for the threads; every rank must have called ``stop`` before."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the other end has closed it
                link.connection.shutdown(2)
            link.connection.close()
        for thread in self._threads:
            thread.join(2)

    def _receive_all(self, link: Link) -> None:
        try:
            with BufferedReader(FileIO(link.connection.fileno(), closefd=False), _BLOCK_BYTES) as stream:
                while line := stream.readline(_LONGEST_LINE):
                    self._receive(link.rank, json.loads(line), stream)
            problem = ""
        except ConnectionError:
            problem = ""
        except (OSError, ValueError, KeyError, TypeError, JobError) as error:
            problem = f"a file of rank {link.rank} cannot be kept: {error}"
        if not self._closed:
            self._failed(problem)

    def _receive(self, sender: int, head: dict[str, object], stream: BufferedReader[FileIO]) -> None:
        name, number, size = str(head["name"]), int(str(head["number"])), int(str(head["bytes"]))
        if name:
            if not _NAME.fullmatch(name):
                raise JobError(f"rank {sender} sends a file named {name!r}")
            with atomic_replacement(self._folder / name, follow_links=False) as part, part.open("r+b") as file:
                _copy(stream, file, size)
        self._arrived(sender, number, bool(name))


def _copy(source: BufferedReader[FileIO], target: BinaryIO, size: int) -> None:
    """Copy ``size`` bytes; raise OSError where the source ends before."""
    block = memoryview(bytearray(min(size, _BLOCK_BYTES)))
    while size:
        count = source.readinto(block[: min(size, len(block))])
        if not count:
            raise OSError(f"the connection closed {size} bytes before the end of a file")
        target.write(block[:count])
        size -= count
    os.fsync(target.fileno())
