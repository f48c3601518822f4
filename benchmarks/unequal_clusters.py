"""Clusters of devices of different kinds, and profiles with seconds of each kind, for the challenger of "best"."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server
from dapple_tf.profiler.profile import KindSeconds, Profile

_SPEEDS = {"V100": 1.0, "P100": 0.6, "T4": 0.4, "K80": 0.05}
_ETHERNET = {speed: Link(speed * 1e9 / 8, 20e-6) for speed in (10, 25, 100)}
_PCI = Link(12e9, 10e-6)
_V, _T = ("V100", 4), ("T4", 4)
_HALF = [("V100", 2), ("T4", 2)]


def unequal_clusters() -> dict[str, Cluster]:
    """Return clusters of 4 to 32 devices by name: kinds by server and within servers, little memory, racks."""
    return {
        "2 servers of 4 V100, 2 of 4 T4": _cluster([[_V], [_V], [_T], [_T]]),
        "2 servers of 4 V100, 2 of 4 T4, 10 Gbps": _cluster([[_V], [_V], [_T], [_T]], between=10),
        "3 servers of 4 T4, 1 of 4 V100": _cluster([[_T], [_T], [_T], [_V]]),
        "4 servers of 2 V100 and 2 T4": _cluster([_HALF] * 4),
        "2 servers of 2 V100 and 2 T4, 10 Gbps": _cluster([_HALF] * 2, between=10),
        "4 servers of 3 V100 and 1 T4, 100 Gbps": _cluster([[("V100", 3), ("T4", 1)]] * 4, between=100),
        "4 servers of 4, T4 of 4 GB": _cluster([[_V], [_T], [_V], [_T]], memory={"T4": 4e9}),
        "4 servers of 2 V100 and 2 T4 of 8 GB": _cluster([_HALF] * 4, memory={"T4": 8e9}),
        "2 servers of 2 V100 of 8 GB and 2 T4 of 4 GB": _cluster([_HALF] * 2, memory={"V100": 8e9, "T4": 4e9}),
        "4 servers of 4, V100 of 4 GB": _cluster([[_V], [_T], [_V], [_T]], memory={"V100": 4e9}),
        "3 servers of 5": _cluster([[("V100", 5)], [("T4", 5)], [("V100", 3), ("T4", 2)]]),
        "3 servers of 5, three kinds": _cluster([[("V100", 5)], [("P100", 5)], [("T4", 5)]]),
        "V100 and very slow K80": _cluster([[_V], [("K80", 4)], [_V], [("K80", 4)]]),
        "racks of 2 servers": _cluster(
            [[("V100", 2)], [("T4", 2)]] * 4, between=10, links={(i, i + 1): 100 for i in range(0, 8, 2)}
        ),
        "8 servers of 4": _cluster([[_V], [_T], *[_HALF] * 2] * 2),
        "4 devices in 1 server": _cluster([_HALF]),
    }


def measure_kinds(profile: Profile, cluster: Cluster, draw: random.Random) -> Profile:
    """Return the profile with seconds of every slower kind, up to 30% off what its speed says, each layer its own."""
    slower = [kind for kind in dict.fromkeys(cluster.device_kinds) if kind is not None and kind != "V100"]
    layers = []
    for layer in profile.layers:
        seconds = {
            kind: KindSeconds(
                *(
                    own / _SPEEDS[kind] * draw.uniform(0.7, 1.3)
                    for own in (layer.forward_seconds, layer.backward_seconds)
                )
            )
            for kind in slower
        }
        layers.append(replace(layer, kinds=seconds))
    return replace(profile, layers=tuple(layers))


def _cluster(
    servers: Sequence[Sequence[tuple[str, int]]],
    *,
    between: int = 25,
    memory: dict[str, float] | None = None,
    links: dict[tuple[int, int], int] | None = None,
) -> Cluster:
    """Return servers of these kinds and counts; links in Gbps, PCI Express within servers; 16 GB where not given."""
    named = tuple(Server.of_kinds(f"h{i}", groups) for i, groups in enumerate(servers))
    used = {kind for groups in servers for kind, _ in groups}
    kinds = {kind: DeviceKind((memory or {}).get(kind, 16e9), _SPEEDS[kind]) for kind in used}
    own = {(f"h{a}", f"h{b}"): _ETHERNET[speed] for (a, b), speed in (links or {}).items()}
    return Cluster(named, None, _PCI, _ETHERNET[between], own, kinds=kinds)
