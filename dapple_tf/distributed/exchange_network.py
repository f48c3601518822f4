"""The connections over which ranks send each other tensors, sums and barrier messages natively; others have none."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from dapple_tf.distributed.host_addresses import choose_addresses, own_addresses
from dapple_tf.distributed.links import Link
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.native.library import ExchangeLibrary
from dapple_tf.distributed.places import listen_on_host, place_of, prepare_for_tensors
from dapple_tf.distributed.rendezvous import accept_ranks, connect_to
from dapple_tf.distributed.ring_all_reduce import has_known_shapes
from dapple_tf.distributed.ring_chunks import ring_neighbours
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.messages import LOGGER

_PURPOSE = "ranks exchange tensors"
_MOST_WAITING = 512  # connections that the system keeps until they are served

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


class ExchangeNetwork:
    """The connections of this rank of ``job``, which the ops of the ``library`` use.

    Both ends of a connection prove that they belong to the job: each listening rank has a secret that it gives to the
    others through Horovod (see ``handshake``). ``seconds``: in which two ranks must have connected.
    """

    def __init__(self, job: Job, library: ExchangeLibrary, seconds: float = 30.0) -> None:
        self.library = library
        self._job = job
        self._seconds = seconds
        self._connected: set[Pair] = set()
        self._addresses: Sequence[Sequence[str]] = ()
        os.register_at_fork(after_in_child=library.close_in_child)
        job.progress.exchanges = library
        report_stalls(job.rank, library)

    def connect(self, pairs: Iterable[Pair]) -> None:
        """Connect those of the ``pairs`` that are not; every rank must call this with the same pairs.

        Raises JobError on every rank if two of them cannot connect.
        """
        missing = sorted(set(pairs) - self._connected)
        if not missing:
            return
        rank, job = self._job.rank, self._job
        hosts = [low for low, high in missing if high == rank]
        guests = [high for low, high in missing if low == rank]
        self._addresses = self._addresses or job.gather(own_addresses())
        with contextlib.ExitStack() as opened:
            listeners = job.run_on_all(lambda: self._listen(guests, opened))
            secret = secrets.token_hex()
            servers = job.gather(([place_of(listener) for listener in listeners], secret))

            def connect_all() -> list[Link]:
                with ThreadPoolExecutor(1) as pool:
                    accepted = pool.submit(accept_ranks, listeners, secret, guests, rank, self._seconds)
                    links = []
                    for host in hosts:
                        places, its_secret = servers[host]
                        links.append(connect_to(host, places, rank, its_secret, _PURPOSE, self._seconds))
                    return [*links, *accepted.result()]

            for link in job.run_on_all(connect_all):
                self._hand_over(link)
        self._connected |= set(missing)

    def _listen(self, guests: Sequence[int], opened: contextlib.ExitStack) -> list[socket.socket]:
        """Return sockets that listen where the ranks ``guests`` reach this one: a Unix socket on its own host."""
        own = self._addresses[self._job.rank]
        others = [self._addresses[rank] for rank in guests]
        distant = [addresses for addresses in others if set(addresses) != set(own)]
        made = []
        if len(distant) < len(others):
            made.append(opened.enter_context(listen_on_host(_MOST_WAITING)))
        for address in choose_addresses(own, distant) if distant else ():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            made.append(opened.enter_context(socket.create_server((address, 0), family=family, backlog=_MOST_WAITING)))
        return made

    def _hand_over(self, link: Link) -> None:
        prepare_for_tensors(link.connection)
        self.library.connect(link.rank, link.connection.detach())


def exchanging_pairs(graphs: Iterable[Graph]) -> set[Pair]:
    """Return the pairs of ranks that send each other messages; ``graphs``: of ranks 0, 1, ..."""
    found = set()
    for rank, graph in enumerate(graphs):
        for node in graph.nodes:
            if node.op == OpName.EXCHANGE:
                found |= {(min(rank, to), max(rank, to)) for to in node.integers("to")}
            elif node.op == OpName.ALLREDUCE and node.has("ranks") and has_known_shapes(node):
                after, _ = ring_neighbours(node.integers("ranks"), rank)
                found.add((min(rank, after), max(rank, after)))
            elif node.op == OpName.BARRIER and node.has("ranks"):
                rounds = barrier_rounds(node.integers("ranks"), rank)
                found |= {(min(rank, after), max(rank, after)) for after, _ in rounds}
    return found


def barrier_rounds(ranks: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return to whom ``rank`` sends, and from whom it receives, in each round of a barrier of ``ranks``.

    In round k each rank sends to the one 2^k places after it in ``ranks``, cyclically, once it has received the message
    of round k - 1. After the last of ceil(log2 n) rounds each knows that all have arrived (dissemination barrier;
    Hensgen, Finkel and Manber, 1988).
    """
    place, count = ranks.index(rank), len(ranks)
    distances = [2**k for k in range((count - 1).bit_length())]
    return [(ranks[(place + distance) % count], ranks[(place - distance) % count]) for distance in distances]


# --- Say which tensors a rank has waited for too long, and from which ranks, as Horovod does for its own
# A rank that hangs sends heartbeats as long as its process lives: the report tells where to look.


_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"  # Horovod's own option, and its default
_DEFAULT_SECONDS = 60.0


class Waits(Protocol):
    """An object that lists the messages for which this process waits."""

    def find_waits(self, seconds: float) -> Mapping[int, list[str]]:
        """Return what has been waited for longer than ``seconds``: names of exchanges, by rank."""


def report_stalls(rank: int, waits: Waits, environment: Mapping[str, str] = os.environ) -> None:
    """Start a thread that reports stalls of this ``rank``; HOROVOD_STALL_CHECK_TIME_SECONDS (default 60; 0: never)."""
    try:
        seconds = float(environment.get(_SECONDS) or _DEFAULT_SECONDS)
    except ValueError:
        seconds = _DEFAULT_SECONDS
    if seconds > 0:
        threading.Thread(target=_run, args=(rank, waits, seconds), name="dapple-stalls", daemon=True).start()


def _run(rank: int, waits: Waits, seconds: float) -> None:
    known: Mapping[int, list[str]] = {}
    pause = threading.Event()
    while not pause.wait(seconds):
        found = waits.find_waits(seconds)
        if found and found != known:
            LOGGER.warning(describe_stall(rank, found, seconds))
        known = found


def describe_stall(rank: int, found: Mapping[int, list[str]], seconds: float) -> str:
    """Return the report, in Horovod's form: ``found`` are names of exchanges by the ranks that have not sent them."""
    lines = [f"{other}: [{', '.join(names)}]" for other, names in sorted(found.items())]
    return "\n".join([f"rank {rank} has waited for tensors for {seconds:g} s. Missing ranks:", *lines])
