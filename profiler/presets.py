"""The clusters of the DAPPLE paper (Table III): Config A, B and C."""

from __future__ import annotations

import re

from profiler.cluster import Cluster, Link, Server
from profiler.errors import ClusterError

_NVLINK = Link(bandwidth=130e9, latency=5e-6)
_ETHERNET_25 = Link(bandwidth=25e9 / 8, latency=20e-6)
_ETHERNET_10 = Link(bandwidth=10e9 / 8, latency=20e-6)
_V100_MEMORY = 16e9

_NAME = re.compile(r"config-([a-z]+)(?::([0-9]{1,5}))?")


def config(letter: str, devices: int = 16) -> Cluster:
    """Return config ``letter`` of DAPPLE (Table III) with ``devices`` V100s of 16 GB.

    A: servers of 8 devices (the last one may have fewer) with NVLink at 130 GB/s inside and Ethernet at 25 Gbps
    between. B: servers of 1 device and 25 Gbps. C: servers of 1 device and 10 Gbps. Raises ClusterError for others.
    """
    if devices < 1:
        raise ClusterError(f"devices={devices}: a cluster needs at least one device")
    match letter.lower():
        case "a":
            size, between = 8, _ETHERNET_25
        case "b":
            size, between = 1, _ETHERNET_25
        case "c":
            size, between = 1, _ETHERNET_10
        case _:
            raise ClusterError(f"there is no config {letter!r}; there are a, b, c")
    counts = [min(size, devices - first) for first in range(0, devices, size)]
    servers = tuple(Server(f"server{index}", count) for index, count in enumerate(counts))
    return Cluster(servers, _V100_MEMORY, intra_server=_NVLINK if size > 1 else between, inter_server=between)


def load_preset(text: str) -> Cluster:
    """Return the preset ``config-a``, or ``config-a:32`` (devices). Raises ClusterError for any other name."""
    match = _NAME.fullmatch(text.lower())
    if not match:
        raise ClusterError(
            f"no cluster is called {text!r}; there are config-a, config-b and config-c, of 16 devices, and config-a:32 "
            "of 32 (at most 99999)"
        )
    letter, devices = match.groups()
    return config(letter) if devices is None else config(letter, int(devices))
