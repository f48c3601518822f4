"""Choose how the ranks of a job exchange tensors: by the native ops, or by Horovod's alltoall."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from dapple_tf.distributed.exchange_network import ExchangeNetwork
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.native.library import ExchangeLibrary, find_obstacle, load_library, source_digest
from dapple_tf.distributed.shared_errors import describe_difference, share_error
from dapple_tf.errors import UsageError

EXCHANGE = "DAPPLE_EXCHANGE"
_WAYS = ("auto", "native", "horovod")


@dataclass(frozen=True)
class Offer:
    """The answer of one rank to the question whether it can exchange natively.

    ``obstacle``: why it cannot, or should not, be used there; "" if it can. ``digest``: of its source.
    """

    obstacle: str
    digest: str


def start_exchanges(job: Job, environment: Mapping[str, str] = os.environ) -> None:
    """Choose how ``job`` exchanges tensors, by DAPPLE_EXCHANGE (auto, native, horovod); every rank must call this.

    ``auto``: natively where that works on all ranks; rank 0 says why where it does not. Does nothing the second time.
    Raises UsageError for another value, or if ``native`` is not possible; JobError if the ranks have different values.
    """
    if job.exchange_way:
        return
    way = job.run_on_all(lambda: read_way(environment))
    job.compare({EXCHANGE: way})
    library, offer = _offer(way)
    obstacle = "" if way == "horovod" else combine_offers(job.gather(offer))
    if obstacle and way == "native":
        raise share_error(UsageError(f"{EXCHANGE}=native is not possible: {obstacle}"), 0)
    if obstacle and job.rank == 0:
        print(f"dapple: the ranks exchange tensors by Horovod's alltoall: {obstacle}", file=sys.stderr, flush=True)
    job.exchange_way = "horovod" if obstacle or library is None else "native"
    if library is not None and not obstacle:
        job.exchange_network = ExchangeNetwork(job, library)


def read_way(environment: Mapping[str, str]) -> str:
    """Return the value of DAPPLE_EXCHANGE, "auto" by default; raises UsageError for one that does not exist."""
    way = environment.get(EXCHANGE) or _WAYS[0]
    if way not in _WAYS:
        raise UsageError(f"{EXCHANGE}={way!r}: give one of {', '.join(_WAYS)}")
    return way


def combine_offers(offers: Sequence[Offer]) -> str:
    """Return why the ranks with these ``offers`` cannot exchange natively; "" if they can."""
    for obstacle in dict.fromkeys(offer.obstacle for offer in offers if offer.obstacle):
        ranks = [rank for rank, offer in enumerate(offers) if offer.obstacle == obstacle]
        return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {obstacle}"
    digests = [offer.digest for offer in offers]
    return describe_difference("library of native exchanges", digests) if len(set(digests)) > 1 else ""


def prefers_alltoall(gpus: int, nccl: bool) -> bool:
    """Return whether a rank is better off with Horovod: its NCCL moves tensors between GPUs, and not by the host."""
    return gpus > 0 and nccl


def _offer(way: str) -> tuple[ExchangeLibrary | None, Offer]:
    """Return this rank's library, where it is wanted and can be loaded, and its offer."""
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
