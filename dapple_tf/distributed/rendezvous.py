"""Connect pairs of ranks of a job. Both prove to each other that they belong to the job.

Of a pair the lower rank listens, only at the addresses over which the other one reaches it. It serves all connections
at once, each for a bounded time, so that strangers who connect and are silent, slow or talkative do not keep the ranks
waiting.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from dapple_tf.distributed.handshake import Guest, prove_rank
from dapple_tf.distributed.links import Link
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.places import Place, listen_for, open_connection, own_addresses, place_of
from dapple_tf.errors import JobError

ALL_RANKS_SECONDS = 30.0
"""The time in which all ranks must have connected."""

_CONNECT_SECONDS = 3.0  # for one connection
_RETRY_SECONDS = 0.2  # between two attempts at all addresses
_MOST_GUESTS = 256  # unproven connections; if there are more, the oldest ones are closed


def connect_pairs(
    job: Job, pairs: Collection[tuple[int, int]], purpose: str, seconds: float = ALL_RANKS_SECONDS
) -> list[Link]:
    """Return this rank's links to the other ranks of its ``pairs`` (the lower rank first), in the order of the ranks.

    Every rank must call this with the same pairs. ``purpose``: of the links, for error messages. A listening rank sends
    its addresses and a secret to the others through Horovod (see ``handshake``). Raises JobError on every rank if two
    of them have not connected in ``seconds``.
    """
    hosts = sorted(low for low, high in pairs if high == job.rank)
    guests = sorted(high for low, high in pairs if low == job.rank)
    addresses = job.gather(own_addresses())
    with contextlib.ExitStack() as opened:

        def listen() -> list[socket.socket]:
            made = listen_for(addresses[job.rank], [addresses[guest] for guest in guests], _MOST_GUESTS + len(guests))
            return [opened.enter_context(listener) for listener in made]

        listeners = job.run_on_all(listen)
        secret = secrets.token_hex()
        servers = job.gather(([place_of(listener) for listener in listeners], secret))

        def connect_all() -> list[Link]:
            with ThreadPoolExecutor(1) as pool:
                accepted = pool.submit(accept_ranks, listeners, secret, guests, job.rank, seconds)
                links = []
                for host in hosts:
                    places, its_secret = servers[host]
                    links.append(connect_to(host, places, its_secret, job.rank, purpose, seconds))
                return [*links, *accepted.result()]

        return job.run_on_all(connect_all)


def accept_ranks(
    listeners: Sequence[socket.socket], secret: str, ranks: Sequence[int], own_rank: int, seconds: float
) -> list[Link]:
    """Return links to these ``ranks``, once all have connected to ``own_rank`` and proven themselves.

    Raises JobError after ``seconds``; the message names the ranks that have not connected.
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
    """The listening end of all handshakes; ``links``: the links to the ``ranks`` that have proven themselves."""

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
        """Wait until data arrives, at most until ``end`` (monotonic seconds), and answer it."""
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
        if guest.rank in self.links:  # the rank has given up its earlier connection
            self.links[guest.rank].connection.close()
        self.links[guest.rank] = Link(guest.rank, guest.connection)


def connect_to(
    peer: int, places: Sequence[Place], secret: str, own_rank: int, purpose: str, seconds: float = ALL_RANKS_SECONDS
) -> Link:
    """Return a link of ``own_rank`` to ``peer``, which has proven itself at one of the ``places``, tried in turn.

    ``secret``: of the listening rank, which only ranks of the job know. Raises JobError, which names the ``purpose`` of
    the link, where no link is made in ``seconds``.
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
