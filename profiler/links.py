"""Measure latency and bandwidth of the links between the processes of a Horovod job, with Horovod's alltoall.

Start it as the training will be started, with one process per device; rank 0 writes the cluster file:
``mpirun -np 4 -H one:2,two:2 python -m dapple_tf.profiler.links -o cluster.yaml``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.cluster import Cluster, Link, Server

# Bytes: from sizes whose time is mostly latency to sizes whose time is mostly bandwidth. Most are large: a link with a
# burst allowance (a switch's buffer, a shaped interface) passes the first half megabyte at a speed that does not last.
SIZES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20)
REPEATS = 8

Pair = tuple[int, int]


@dataclass(frozen=True)
class Host:
    """A server, and the ranks that run on it."""

    name: str
    ranks: tuple[int, ...]


def probe(
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    server: str | None = None,
    device_memory: float | None = None,
) -> Cluster:
    """Measure the links between and inside the servers of this job; every rank calls it and gets the same cluster.

    One pair of ranks is measured inside each server, and one between every two servers; disjoint pairs run at the same
    time. So S servers take about S rounds, in each of which a pair moves 280 MB (3 s at 1 Gbps). The time of one of
    ``sizes`` is the median over ``repeats``, half of them in each direction. The latency is what training will see: it
    includes Horovod's negotiation (HOROVOD_CYCLE_TIME, 1 ms by default).

    Args:
        sizes: Bytes to send, two or more sizes.
        repeats: How often a pair sends each size, after one transfer that is not counted.
        server: The name of this rank's server; its host name by default.
        device_memory: Bytes of one device; by default what ``Cluster.detect`` finds, the least over the servers.

    Raises:
        ClusterError: Horovod is not installed, there is only one rank, or the ranks of a server are not consecutive.
    """
    hvd, tf = _import_horovod()
    hvd.init()
    hosts = find_hosts(_gather(hvd, server or socket.gethostname()))
    here = next(host for host in hosts if hvd.rank() in host.ranks)
    mine = Cluster.detect(len(here.ranks), environment={}).least_memory if device_memory is None else device_memory
    memory = min(_gather(hvd, mine))
    timed: dict[Pair, dict[int, list[float]]] = {}
    for pairs in find_rounds(hosts):
        for size in sizes:
            for repeat in range(repeats + 1):
                directions = pairs if repeat % 2 else tuple((b, a) for a, b in pairs)
                seconds = _exchange(hvd, tf, directions, size)
                if seconds is not None and repeat:  # the first transfer makes connections and buffers
                    pair = next(pair for pair in pairs if hvd.rank() in pair)
                    timed.setdefault(pair, {}).setdefault(size, []).append(seconds)
    cluster = _fit_cluster(hosts, memory, sizes, _gather(hvd, timed))
    # Every rank fits the links itself, so that all raise the same error or none; rank 0's numbers are used.
    return hvd.broadcast_object(cluster, root_rank=0)  # type: ignore[no-any-return]  # Horovod is untyped


def find_hosts(names: Sequence[str]) -> tuple[Host, ...]:
    """Return the servers of a job, in the order of their ranks. ``names``: the server of each rank.

    Raises:
        ClusterError: There is only one rank, or the ranks of a server are not consecutive.
    """
    if len(names) < 2:
        raise ClusterError(
            "there is only one rank, so no link to measure: start under mpirun with a process for every device, "
            "such as mpirun -np 4 -H one:2,two:2 python -m dapple_tf.profiler.links -o cluster.yaml"
        )
    hosts = tuple(
        Host(name, tuple(rank for rank, other in enumerate(names) if other == name)) for name in dict.fromkeys(names)
    )
    for host in hosts:
        if host.ranks[-1] - host.ranks[0] != len(host.ranks) - 1:
            raise ClusterError(
                f"the ranks of server {host.name} are {', '.join(map(str, host.ranks))}, but a cluster numbers its "
                "devices server by server: start with mpirun --map-by slot, so that they are consecutive"
            )
    return hosts


def find_rounds(hosts: Sequence[Host]) -> Iterator[tuple[Pair, ...]]:
    """Yield rounds of disjoint pairs of ranks: first one inside every server with two, then every two servers once.

    The pairs of servers are those of a round-robin tournament (circle method: one stays, the others rotate).
    """
    inside = tuple((host.ranks[0], host.ranks[1]) for host in hosts if len(host.ranks) > 1)
    if inside:
        yield inside
    seats: list[int | None] = [host.ranks[0] for host in hosts]
    if len(seats) % 2:
        seats.append(None)  # its partner pauses in that round
    for _ in range(len(seats) - 1):
        matches = [(a, b) for a, b in zip(seats, reversed(seats), strict=True)][: len(seats) // 2]
        pairs = tuple((min(a, b), max(a, b)) for a, b in matches if a is not None and b is not None)
        if pairs:
            yield pairs
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _exchange(hvd: Any, tf: Any, directions: Sequence[Pair], size: int) -> float | None:
    """Send ``size`` bytes from the first to the second rank of each pair; return seconds on receivers, else None.

    Only the receiver can tell when the bytes have arrived: the sender may return once they are in a buffer.
    """
    splits = np.zeros(hvd.size(), np.int32)
    for sender, receiver in directions:
        if sender == hvd.rank():
            splits[receiver] = size
    with tf.device("CPU"):  # Horovod is built for the host's memory
        payload = tf.zeros([int(splits.sum())], tf.uint8)
        _wait_for_all(hvd, tf)
        start = time.perf_counter()
        _, received_splits = hvd.alltoall(payload, splits)
        arrived = int(received_splits.numpy().sum())  # waits for the exchange
        seconds = time.perf_counter() - start
    return seconds if arrived else None


def _fit_cluster(
    hosts: Sequence[Host], memory: float, sizes: Sequence[int], timed: Sequence[dict[Pair, dict[int, list[float]]]]
) -> Cluster:
    """Return the cluster that fits the times of all ranks."""
    home = {rank: host.name for host in hosts for rank in host.ranks}
    measured = {}
    for a, b in sorted({pair for times in timed for pair in times}):
        both = [timed[rank].get((a, b), {}) for rank in (a, b)]
        medians = [float(np.median([second for times in both for second in times.get(size, [])])) for size in sizes]
        measured[home[a], home[b]] = fit_link(sizes, medians)
    return describe_cluster([Server(host.name, len(host.ranks)) for host in hosts], memory, measured)


def _gather(hvd: Any, mine: Any) -> list[Any]:
    """Return every rank's value, in rank order; with one rank, Horovod would not return a list."""
    return hvd.allgather_object(mine) if hvd.size() > 1 else [mine]


def _wait_for_all(hvd: Any, tf: Any) -> None:
    """Return once every rank has called this: Horovod for TensorFlow has no barrier."""
    with tf.device("CPU"):
        hvd.allreduce(tf.zeros([1]), name="dapple_tf.profiler.links.barrier")


def _import_horovod() -> tuple[Any, Any]:
    try:
        import horovod.tensorflow as hvd
        import tensorflow as tf
    except ImportError as error:
        raise ClusterError(
            f"measuring links needs Horovod, which cannot be imported ({error}): make horovod"
        ) from error
    return hvd, tf


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m dapple_tf.profiler.links -o FILE``: rank 0 writes the cluster file.

    Returns the exit code: 0, or 1 after an error of one line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dapple_tf.profiler.links", description="Measure the links of a Horovod job."
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="write the cluster here (.yaml or .json)")
    output: Path = parser.parse_args(arguments).output
    try:
        cluster = probe()
        hvd, tf = _import_horovod()
        try:
            if hvd.rank() == 0:
                cluster.save(output)
        finally:
            _wait_for_all(hvd, tf)  # a rank that leaves early shuts Horovod down for all
    except ClusterError as error:
        # The first rank of each server prints: an error may be on one server only.
        if int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("HOROVOD_LOCAL_RANK", "0"))) == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


# --- Fit links to measured times, and describe a cluster by its links; this part of the probe needs no other process


_TOLERANCE = 0.25  # a pair of servers gets a link of its own if it differs from the median by more than this share


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Return the link that moves ``sizes`` (bytes) in about ``seconds``: time = latency + bytes / bandwidth.

    The line minimises the sum of absolute errors, each divided by the root of its time. (Unweighted errors would leave
    the latency to chance; relative ones would let the middle sizes, where bursts are, decide the bandwidth. Least
    squares would follow a single disturbed size.) Such a line passes through two of the points, or through one and
    the origin, so all of these are tried. The latency is never negative, and the bandwidth positive and finite: where
    time does not grow with size, it is taken to be 100 times the largest size over its time, an upper bound.

    Raises:
        ClusterError: There are fewer than two distinct sizes, or numbers that are not positive and finite.
    """
    bytes_, times = np.asarray(sizes, float), np.asarray(seconds, float)
    if bytes_.shape != times.shape or len(np.unique(bytes_)) < 2:
        raise ClusterError(
            f"fitting a link needs one time for each of two or more sizes, not times {times} for sizes {bytes_}"
        )
    if not (np.isfinite([bytes_, times]).all() and (bytes_ > 0).all() and (times > 0).all()):
        raise ClusterError(f"a link's sizes and times must be positive and finite: {bytes_} bytes in {times} s")
    flattest = times / bytes_.max() / 100
    lines = [*zip(0 * times, times / bytes_, strict=True), *zip(times, flattest, strict=True)]
    for (b0, t0), (b1, t1) in itertools.combinations(zip(bytes_, times, strict=True), 2):
        slope = (t1 - t0) / (b1 - b0) if b1 != b0 else 0.0
        if slope > 0 and t0 - slope * b0 >= 0:
            lines.append((t0 - slope * b0, max(slope, flattest.min())))
    errors = [np.sum(np.abs(latency + slope * bytes_ - times) / np.sqrt(times)) for latency, slope in lines]
    latency, slope = lines[int(np.argmin(errors))]
    return Link(float(1 / slope), float(latency))


def describe_cluster(
    servers: Sequence[Server], device_memory: float, measured: Mapping[tuple[str, str], Link]
) -> Cluster:
    """Return the cluster of these servers with the links ``measured`` between pairs of them, or inside one.

    Pairs are of server names; a link inside a server has its name twice. ``intra_server`` and ``inter_server`` are the
    medians; a pair gets a link of its own where bandwidth or latency differs from the median by more than a quarter.
    Numbers are rounded to three digits. Where no link inside a server was measured, or none between servers, the median
    of the other links is used, since no two devices are joined by such a link. ``device_memory`` is in bytes.

    Raises:
        ClusterError: Nothing was measured.
    """
    if not measured:
        raise ClusterError("no link was measured: the probe needs two or more ranks")
    inside = {pair: link for pair, link in measured.items() if pair[0] == pair[1]}
    between = {pair: link for pair, link in measured.items() if pair[0] != pair[1]}
    intra, inter = _median_link(inside or between), _median_link(between or inside)
    own = {pair: link for pair, link in inside.items() if _differs(link, intra)}
    own |= {pair: link for pair, link in between.items() if _differs(link, inter)}
    rounded = {pair: _round(link) for pair, link in own.items()}
    return Cluster(tuple(servers), device_memory, _round(intra), _round(inter), rounded)


def _median_link(links: Mapping[tuple[str, str], Link]) -> Link:
    return Link(median(link.bandwidth for link in links.values()), median(link.latency for link in links.values()))


def _differs(link: Link, usual: Link) -> bool:
    return (
        abs(link.bandwidth - usual.bandwidth) > _TOLERANCE * usual.bandwidth
        or abs(link.latency - usual.latency) > _TOLERANCE * usual.latency
    )


def _round(link: Link) -> Link:
    return Link(float(f"{link.bandwidth:.3g}"), float(f"{link.latency:.3g}"))


if __name__ == "__main__":
    sys.exit(main())
