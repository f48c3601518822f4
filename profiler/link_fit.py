"""Fit links to measured times, and describe a cluster by its links; this part of the probe needs no other process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from profiler.cluster import Cluster, Link, Server
from profiler.errors import ClusterError

TOLERANCE = 0.25  # a pair of servers gets a link of its own if it differs from the median by more than this share


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
    Numbers are rounded to three digits. Where no pair of one kind was measured, the median of the other kind is used
    for it, since no two devices are joined so. ``device_memory`` is in bytes.

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
        abs(link.bandwidth - usual.bandwidth) > TOLERANCE * usual.bandwidth
        or abs(link.latency - usual.latency) > TOLERANCE * usual.latency
    )


def _round(link: Link) -> Link:
    return Link(float(f"{link.bandwidth:.3g}"), float(f"{link.latency:.3g}"))
