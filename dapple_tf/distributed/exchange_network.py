"""Choose how the ranks of a job exchange tensors, and connect those that exchange them by the native ops."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.native.library import ExchangeLibrary, find_obstacle, load_library, source_digest
from dapple_tf.distributed.native_collectives import Pair
from dapple_tf.distributed.places import prepare_for_tensors
from dapple_tf.distributed.rendezvous import ALL_RANKS_SECONDS, connect_pairs
from dapple_tf.distributed.shared_errors import describe_difference, share_error
from dapple_tf.errors import UsageError
from dapple_tf.messages import LOGGER


class ExchangeNetwork:
    """The connections of this rank of ``job`` to other ranks, which the ops of the ``library`` use.

    ``seconds``: the time in which two ranks must have connected.
    """

    def __init__(self, job: Job, library: ExchangeLibrary, seconds: float = ALL_RANKS_SECONDS) -> None:
        self.library = library
        self._job = job
        self._seconds = seconds
        self._connected: set[Pair] = set()
        os.register_at_fork(after_in_child=library.close_in_child)
        job.progress.exchanges = library
        report_stalls(job.rank, library.find_waits)

    def connect(self, pairs: Iterable[Pair]) -> None:
        """Connect the ranks of each of the ``pairs`` that is not connected; every rank must give the same pairs.

        Raises JobError on every rank if two of them cannot connect.
        """
        missing = set(pairs) - self._connected
        if not missing:
            return
        for link in connect_pairs(self._job, missing, "ranks exchange tensors", self._seconds):
            prepare_for_tensors(link.connection)
            self.library.connect(link.rank, link.connection.detach())
        self._connected |= missing


# --- Choose how the ranks of a job exchange tensors: by the native ops, or by Horovod's alltoall

_EXCHANGE = "DAPPLE_EXCHANGE"
_WAYS = ("auto", "native", "horovod")


@dataclass(frozen=True)
class Offer:
    """The answer of one rank to the question whether it can exchange natively.

    ``obstacle``: why it cannot, or should not, use the native library; "" if it can. ``digest``: of the library's
    source.
    """

    obstacle: str
    digest: str


def start_exchanges(job: Job, environment: Mapping[str, str] = os.environ) -> None:
    """Choose how ``job`` exchanges tensors, by DAPPLE_EXCHANGE (auto, native, horovod); every rank must call this.

    ``auto``: natively if that works on all ranks; if not, rank 0 prints why. A second call does nothing. Raises
    UsageError for another value, or if ``native`` is not possible; JobError if the ranks have different values.
    """
    if job.exchange_way:
        return
    way = job.agree(_EXCHANGE, job.run_on_all(lambda: read_way(environment)))
    library, offer = _offer(way)
    obstacle = "" if way == "horovod" else combine_offers(job.gather(offer))
    if obstacle and way == "native":
        raise share_error(UsageError(f"{_EXCHANGE}=native is not possible: {obstacle}"), 0)
    if obstacle and job.rank == 0:
        LOGGER.warning("the ranks exchange tensors by Horovod's alltoall: %s", obstacle)
    job.exchange_way = "horovod" if obstacle or library is None else "native"
    if library is not None and not obstacle:
        job.exchange_network = ExchangeNetwork(job, library)


def read_way(environment: Mapping[str, str]) -> str:
    """Return the value of DAPPLE_EXCHANGE, "auto" by default; raises UsageError for an unknown value."""
    way = environment.get(_EXCHANGE) or _WAYS[0]
    if way not in _WAYS:
        raise UsageError(f"{_EXCHANGE}={way!r}: give one of {', '.join(_WAYS)}")
    return way


def combine_offers(offers: Sequence[Offer]) -> str:
    """Return why the ranks with these ``offers`` cannot exchange natively; "" if they can."""
    for obstacle in dict.fromkeys(offer.obstacle for offer in offers if offer.obstacle):
        ranks = [rank for rank, offer in enumerate(offers) if offer.obstacle == obstacle]
        return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {obstacle}"
    digests = [offer.digest for offer in offers]
    return describe_difference("library of native exchanges", digests) if len(set(digests)) > 1 else ""


def prefers_alltoall(gpus: int, nccl: bool) -> bool:
    """Return whether Horovod is better for a rank: NCCL moves tensors between GPUs without the host."""
    return gpus > 0 and nccl


def _offer(way: str) -> tuple[ExchangeLibrary | None, Offer]:
    """Return this rank's library, if it is wanted and can be loaded, and this rank's offer."""
    if way == "horovod":
        return None, Offer("it is not wanted", "")
    obstacle = find_obstacle()
    if not obstacle and way == "auto" and prefers_alltoall(len(tf.config.list_logical_devices("GPU")), _has_nccl()):
        obstacle = "there are GPUs, between which NCCL moves tensors without the host"
    if obstacle:
        return None, Offer(obstacle, source_digest())
    try:
        return load_library(), Offer("", source_digest())
    except (OSError, tf.errors.OpError) as error:
        return None, Offer(f"its library cannot be loaded ({str(error).splitlines()[0]})", source_digest())


def _has_nccl() -> bool:
    import horovod.tensorflow as hvd

    return bool(hvd.nccl_built())


# --- Report for which tensors of which ranks a rank has waited too long, as Horovod does for its own operations
# A rank that hangs sends heartbeats as long as its process lives; the report shows which rank hangs.


_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"  # Horovod's own option, whose default follows
_DEFAULT_SECONDS = 60.0


FindWaits = Callable[[float], Mapping[int, list[str]]]
"""Returns the names of the exchanges that have been waited for longer than these seconds, by rank."""


def report_stalls(rank: int, find_waits: FindWaits, environment: Mapping[str, str] = os.environ) -> None:
    """Start a thread that reports stalls of this ``rank``; HOROVOD_STALL_CHECK_TIME_SECONDS (default 60; 0: never)."""
    try:
        seconds = float(environment.get(_SECONDS) or _DEFAULT_SECONDS)
    except ValueError:
        seconds = _DEFAULT_SECONDS
    if seconds > 0:
        threading.Thread(target=_run, args=(rank, find_waits, seconds), name="dapple-stalls", daemon=True).start()


def _run(rank: int, find_waits: FindWaits, seconds: float) -> None:
    known: Mapping[int, list[str]] = {}
    pause = threading.Event()
    while not pause.wait(seconds):
        found = find_waits(seconds)
        if found and found != known:
            LOGGER.warning(describe_stall(rank, found, seconds))
        known = found


def describe_stall(rank: int, found: Mapping[int, list[str]], seconds: float) -> str:
    """Return the report in Horovod's form; ``found``: names of exchanges, by the ranks that have not sent them."""
    lines = [f"{other}: [{', '.join(names)}]" for other, names in sorted(found.items())]
    return "\n".join([f"rank {rank} has waited for tensors for {seconds:g} s. Missing ranks:", *lines])
