"""Connect rank 0 of a job with every other rank over TCP.

Rank 0 listens only at the addresses over which the other ranks reach it. It serves all connections at once, each for
a bounded time, so that strangers who connect and are silent, slow or talkative do not keep the ranks waiting.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.distributed.handshake import Guest, prove_rank
from dapple_tf.distributed.links import Link
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.places import Place, choose_addresses, open_connection, own_addresses
from dapple_tf.errors import JobError

_CONNECT_SECONDS = 3.0  # for one connection
_ALL_RANKS_SECONDS = 30.0
_RETRY_SECONDS = 0.2  # between two attempts at all addresses
_MOST_GUESTS = 256  # connections that have not proven themselves; of more the oldest are closed


@dataclass(frozen=True)
class _Server:
    """The addresses and ports at which rank 0 listens, and the secret of the job."""

    places: Sequence[tuple[str, int]]
    secret: str


def connect_ranks(job: Job) -> list[Link]:
    """Return links to all other ranks on rank 0, and one to rank 0 elsewhere; every rank must call this.

    Raises JobError on every rank if one cannot reach rank 0.
    """
    own, *others = job.gather(own_addresses())
    with contextlib.ExitStack() as opened:
        listeners: list[socket.socket] = []

        def listen() -> _Server:
            for address in choose_addresses(own, others):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                made = socket.create_server((address, 0), family=family, backlog=job.size + _MOST_GUESTS)
                listeners.append(opened.enter_context(made))
            return _Server([listener.getsockname()[:2] for listener in listeners], secrets.token_hex())

        server = job.run_on_rank_0(listen)
        if job.rank == 0:
            return job.run_on_all(lambda: _accept_ranks(listeners, server.secret, job.size))
        return job.run_on_all(lambda: [_connect(job.rank, server)])


def _accept_ranks(
    listeners: Sequence[socket.socket], secret: str, size: int, seconds: float = _ALL_RANKS_SECONDS
) -> list[Link]:
    return accept_ranks(listeners, secret, range(1, size), 0, seconds)


def accept_ranks(
    listeners: Sequence[socket.socket],
    secret: str,
    ranks: Sequence[int],
    own_rank: int,
    seconds: float = _ALL_RANKS_SECONDS,
) -> list[Link]:
    """Return links to these ``ranks``, once all have connected to ``own_rank`` and proven themselves.

    Raises JobError naming the ranks that have not in ``seconds``.
    """
    end = time.monotonic() + seconds
    with _Reception(listeners, secret, ranks) as reception:
        while reception.missing:
            if time.monotonic() >= end:
                missing = reception.missing
                raise JobError(f"rank(s) {missing} have not connected to rank {own_rank} in {seconds:g} s")
            reception.serve(end)
        return [reception.links[rank] for rank in sorted(reception.links)]


class _Reception:
    """The listening end of all handshakes; ``links``: to those of the ``ranks`` that have proven themselves."""

    def __init__(self, listeners: Sequence[socket.socket], secret: str, ranks: Sequence[int]) -> None:
        self._secret = secret
        self._ranks = ranks
        self._guests: list[Guest] = []
        self.links: dict[int, Link] = {}
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for guest in self._guests:
            guest.connection.close()

    @property
    def missing(self) -> list[int]:
        """The ranks that have not proven themselves."""
        return [rank for rank in self._ranks if rank not in self.links]

    def serve(self, end: float) -> None:
        """Wait, no longer than to ``end`` (monotonic seconds), for something to arrive, and answer it."""
        wake = min([end, *(guest.deadline for guest in self._guests)])
        for key, _ in self._selector.select(max(0.0, wake - time.monotonic())):
            if isinstance(key.data, Guest):
                key.data.receive()
            elif isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
        now, spare = time.monotonic(), len(self._guests) - _MOST_GUESTS
        for place, guest in enumerate(list(self._guests)):
            if guest.rank is not None or guest.refused or now >= guest.deadline or place < spare:
                self._guests.remove(guest)
                self._selector.unregister(guest.connection)
                self._keep_or_close(guest)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has been closed meanwhile, or this process has too many open files
            connection, _ = listener.accept()
            connection.setblocking(False)
            guest = Guest(connection, self._secret, time.monotonic() + _CONNECT_SECONDS)
            guest.start()
            self._guests.append(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)

    def _keep_or_close(self, guest: Guest) -> None:
        if guest.refused or guest.rank is None or guest.rank not in self._ranks:
            guest.connection.close()
            return
        if guest.rank in self.links:  # it has given up its earlier connection
            self.links[guest.rank].connection.close()
        self.links[guest.rank] = Link(guest.rank, guest.connection)


def _connect(rank: int, server: _Server, seconds: float = _ALL_RANKS_SECONDS) -> Link:
    return connect_to(0, server.places, rank, server.secret, "ranks report failures to each other", seconds)


def connect_to(
    peer: int,
    places: Sequence[Place],
    own_rank: int,
    secret: str,
    purpose: str,
    seconds: float = _ALL_RANKS_SECONDS,
) -> Link:
    """Return a link of ``own_rank`` to ``peer``, tried at all its places in turn until one has proven itself.

    ``secret``: of the listening end, which only ranks of the job know. Raises JobError where none has, with the
    ``purpose`` of the link, in ``seconds``.
    """
    failures: dict[str, str] = {}
    end = time.monotonic() + seconds - _CONNECT_SECONDS
    while True:
        for address, port in places:
            deadline = time.monotonic() + _CONNECT_SECONDS
            with contextlib.ExitStack() as failed:
                try:
                    connection = open_connection((address, port), _CONNECT_SECONDS)
                    failed.callback(connection.close)
                    if prove_rank(connection, own_rank, secret, deadline):
                        failed.pop_all()
                        return Link(peer, connection)
                    failures[address] = f"port {port}: not rank {peer}"
                except OSError as error:
                    failures[address] = f"port {port}: {error}"
        if time.monotonic() >= end:
            break
        time.sleep(_RETRY_SECONDS)  # the other rank may not listen yet
    found = "; ".join(f"{address} {failure}" for address, failure in failures.items())
    raise JobError(
        f"rank {own_rank} cannot connect to rank {peer} at any of its addresses ({found}): {purpose} over TCP, so "
        "allow it between the hosts"
    )
