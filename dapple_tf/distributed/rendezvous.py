"""Connect rank 0 of a job with every other rank over TCP.

A rank that connects must send the job's secret, which it has received through Horovod.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.distributed.links import Link
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import JobError

_CONNECT_SECONDS = 3.0  # for one address
_ALL_RANKS_SECONDS = 30.0
_LONGEST_LINE = 1024  # bytes


@dataclass(frozen=True)
class _Server:
    """The address at which rank 0 listens, and the secret of the job."""

    addresses: Sequence[str]
    port: int
    secret: str


def connect_ranks(job: Job) -> list[Link]:
    """Return links to all other ranks on rank 0, and one to rank 0 elsewhere; every rank must call this.

    Raises JobError on every rank if one cannot reach rank 0.
    """
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []

        def listen() -> _Server:
            sockets.append(opened.enter_context(_listen(job.size)))
            return _Server(_host_addresses(), sockets[0].getsockname()[1], secrets.token_hex())

        server = job.run_on_rank_0(listen)
        if job.rank == 0:
            return job.run_on_all(lambda: _accept_ranks(sockets[0], server.secret, job.size))
        return job.run_on_all(lambda: [_connect(job.rank, server)])


def _listen(size: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual)


def _accept_ranks(listener: socket.socket, secret: str, size: int) -> list[Link]:
    """Return links to ranks 1 to ``size - 1``, once all have connected."""
    links: dict[int, Link] = {}
    end = time.monotonic() + _ALL_RANKS_SECONDS
    while len(links) < size - 1:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - set(links))
            raise JobError(f"rank(s) {missing} have not connected to rank 0 in {_ALL_RANKS_SECONDS:g} s") from None
        rank = _identify(connection, secret)
        if rank is None:
            connection.close()
        else:
            links[rank] = Link(rank, connection)
    return list(links.values())


def _identify(connection: socket.socket, secret: str) -> int | None:
    """Return the rank at the other end; None if it does not belong to the job."""
    connection.settimeout(_CONNECT_SECONDS)
    try:
        hello = json.loads(_read_line(connection))
        if not hmac.compare_digest(str(hello["secret"]), secret):
            return None
        connection.sendall(b"{}\n")
        return int(hello["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _connect(rank: int, server: _Server) -> Link:
    failures = []
    for address in server.addresses:
        try:
            connection = socket.create_connection((address, server.port), timeout=_CONNECT_SECONDS)
            connection.sendall(json.dumps({"rank": rank, "secret": server.secret}).encode() + b"\n")
            if _read_line(connection) == b"{}\n":
                return Link(0, connection)
            connection.close()
            failures.append(f"{address}: not rank 0")
        except OSError as error:
            failures.append(f"{address}: {error}")
    raise JobError(
        f"rank {rank} cannot connect to rank 0 on port {server.port} of any of its addresses "
        f"({'; '.join(failures)}): ranks report failures to each other over TCP, so allow it between the hosts"
    )


def _read_line(connection: socket.socket) -> bytes:
    """Read one short line, byte by byte: what follows it stays unread."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _host_addresses() -> Sequence[str]:
    """Return this host's addresses, loopback last: ranks of other hosts cannot use it."""
    import psutil  # a dependency of Horovod, which is installed when this is called

    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
    ]
    return sorted(found, key=lambda address: (address.startswith("127.") or address == "::1", ":" in address))
