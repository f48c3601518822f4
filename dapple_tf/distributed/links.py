"""Connections between rank 0 and every other rank, beside Horovod's, for what is told while Horovod waits.

Messages are JSON objects, one a line. Who connects must know the job's secret, which travels through Horovod.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dapple_tf.distributed.membership import Job
from dapple_tf.errors import JobError

Message = dict[str, Any]

# Seconds for one try to reach an address, and for all ranks to come.
_ONE_TRY = 3.0
_EVERYBODY = 30.0
_LONGEST = 65536  # bytes of a message: nobody sends more
# What the system says of a connection when the network has failed, and not the process at its other end.
_CUT_OFF = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


@dataclass(frozen=True)
class _Invitation:
    """Where rank 0 listens, and the job's secret."""

    addresses: Sequence[str]
    port: int
    secret: str


@dataclass
class Link:
    """The connection to ``rank``; any thread may send, one may receive.

    ``cut_off``: what the system says of the network, where that has failed.
    """

    rank: int
    connection: socket.socket
    open: bool = True
    cut_off: str = ""
    _rest: bytes = field(default=b"", repr=False)
    _sending: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def send(self, message: Message) -> None:
        """Send a message; one that cannot be sent is lost: reading will tell that the other side has gone."""
        try:
            with self._sending:
                self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:  # the system tells it once, here or to ``receive``
            self._look_at(error)

    def receive(self) -> list[Message]:
        """The messages that have come; ``open`` is False afterwards where the other side has gone."""
        try:
            data = self.connection.recv(_LONGEST)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # our own: nothing has come yet
                return []
            self._look_at(error)
            data = b""
        self.open = bool(data) and len(self._rest) < _LONGEST
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _look_at(self, error: OSError) -> None:
        if error.errno in _CUT_OFF:
            self.cut_off = str(error.strerror)


def link_ranks(job: Job) -> list[Link]:
    """Links to all ranks on rank 0, elsewhere one to rank 0; every rank must call it.

    Raises JobError on every rank where one cannot reach rank 0.
    """
    with contextlib.ExitStack() as opened:
        servers: list[socket.socket] = []

        def invite() -> _Invitation:
            servers.append(opened.enter_context(_listen(job.size)))
            return _Invitation(_addresses(), servers[0].getsockname()[1], secrets.token_hex())

        invitation = job.run_on_rank_0(invite)
        if job.rank == 0:
            return job.run_on_all(lambda: _welcome(servers[0], invitation, job.size))
        return job.run_on_all(lambda: [_connect(job.rank, invitation)])


def _listen(size: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual)


def _welcome(server: socket.socket, invitation: _Invitation, size: int) -> list[Link]:
    """Links to ranks 1 to ``size - 1``, when they have come."""
    links: dict[int, Link] = {}
    end = time.monotonic() + _EVERYBODY
    while len(links) < size - 1:
        server.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - set(links))
            raise JobError(f"rank(s) {missing} have not connected to rank 0 in {_EVERYBODY:g} s") from None
        rank = _greet(connection, invitation.secret)
        if rank is None:
            connection.close()
        else:
            links[rank] = Link(rank, connection)
    return list(links.values())


def _greet(connection: socket.socket, secret: str) -> int | None:
    """The rank at the other end; None where it is none of ours."""
    connection.settimeout(_ONE_TRY)
    try:
        hello = json.loads(_read_line(connection))
        if not hmac.compare_digest(str(hello["secret"]), secret):
            return None
        connection.sendall(b"{}\n")
        return int(hello["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _connect(rank: int, invitation: _Invitation) -> Link:
    tried = []
    for address in invitation.addresses:
        try:
            connection = socket.create_connection((address, invitation.port), timeout=_ONE_TRY)
            connection.sendall(json.dumps({"rank": rank, "secret": invitation.secret}).encode() + b"\n")
            if _read_line(connection) == b"{}\n":
                return Link(0, connection)
            connection.close()
            tried.append(f"{address}: not rank 0")
        except OSError as error:
            tried.append(f"{address}: {error}")
    raise JobError(
        f"rank {rank} cannot connect to rank 0 on port {invitation.port} of any of its addresses "
        f"({'; '.join(tried)}): ranks tell each other of failures over TCP, let it through between the hosts"
    )


def _read_line(connection: socket.socket) -> bytes:
    """One short line, byte by byte: what follows it stays unread."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 1024:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _addresses() -> Sequence[str]:
    """This host's addresses, those of loopback last: they are right for ranks of the same host only."""
    import psutil  # Horovod needs it, and is there when this is called

    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
    ]
    return sorted(found, key=lambda address: (address.startswith("127.") or address == "::1", ":" in address))
