"""A cluster as a hierarchy of levels, as planner "pipedream" takes it (PipeDream, section 3.1 and figure 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dapple_tf.errors import PlanError
from dapple_tf.planner.systems.device_order import server_bandwidths
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.simulator.arrays import Floats
from dapple_tf.wording import format_count

_Labels = NDArray[np.int64]  # of each server: the first server of its component


@dataclass(frozen=True)
class Level:
    """Level k: ``count`` components of level k - 1 (m_k), joined by links of ``bandwidth`` bytes per second (B_k)."""

    count: int
    bandwidth: float


@dataclass(frozen=True)
class Hierarchy:
    """Levels 1, 2 ... from the innermost, and the ``devices`` in an order in which each component is consecutive.

    A component of level 0 is a device; the one component of the last level holds all devices. Without levels there is
    one device. Raises PlanError for counts below 2, bandwidths that are not above 0, and devices that are not as many
    as the levels say, or not distinct.
    """

    levels: tuple[Level, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        for number, level in enumerate(self.levels, 1):
            if level.count < 2:
                raise PlanError(f"level {number} has {level.count} components; it must have at least 2")
            if not (math.isfinite(level.bandwidth) and level.bandwidth > 0):
                raise PlanError(f"level {number} has a bandwidth of {level.bandwidth}, not a finite number above 0")
        total = math.prod(level.count for level in self.levels)
        if len(self.devices) != total:
            raise PlanError(f"the levels are for {format_count(total, 'device')}, but {len(self.devices)} are given")
        if len(set(self.devices)) != total:
            raise PlanError(f"devices is {list(self.devices)}: name each device once")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of one component of level 0 (one device), 1, 2 ..."""
        return tuple(math.prod(level.count for level in self.levels[:k]) for k in range(len(self.levels) + 1))

    def flatten(self) -> Hierarchy:
        """Return the hierarchy of one level that holds all devices, at the least bandwidth of any level."""
        if len(self.levels) < 2:
            return self
        return Hierarchy((Level(len(self.devices), min(level.bandwidth for level in self.levels)),), self.devices)


def derive_hierarchy(cluster: Cluster) -> Hierarchy:
    """Return the hierarchy of a cluster.

    Level 1 joins the devices of a server, if servers have several. The levels above join servers: for each bandwidth
    of a link between servers, from the highest down, servers that are connected by links of at least that bandwidth
    form a component. These are a level if all components have equally many parts; other bandwidths start no level. B_k
    is the least bandwidth between two parts of a component. A cluster whose servers have different numbers of devices
    is one level, at the least bandwidth of any link: PipeDream's levels have equal components only.
    """
    counts = {server.devices for server in cluster.servers}
    between = server_bandwidths(cluster)
    inside = [float(between[i, i]) for i, server in enumerate(cluster.servers) if server.devices > 1]
    np.fill_diagonal(between, np.inf)
    if len(counts) > 1:
        least = min([*inside, *between[~np.eye(len(between), dtype=bool)]])
        return Hierarchy((Level(cluster.devices, float(least)),), tuple(range(cluster.devices)))
    (count,) = counts
    levels = [Level(count, min(inside))] if count > 1 else []
    above, order = _join_servers(between)
    devices = tuple(server * count + device for server in order for device in range(count))
    return Hierarchy((*levels, *above), devices)


def _join_servers(between: Floats) -> tuple[list[Level], list[int]]:
    """Return the levels above the servers, and the servers in an order in which each component is consecutive."""
    parts: _Labels = np.arange(len(between))  # of the last level so far
    levels, keys = list[Level](), [parts]
    for bandwidth in sorted(set(between[~np.eye(len(between), dtype=bool)].tolist()), reverse=True):
        joined = _connect(between >= bandwidth)
        counts = {len(set(parts[joined == label].tolist())) for label in set(joined.tolist())}
        if len(counts) == 1 and (count := counts.pop()) > 1:
            inside = (joined[:, None] == joined[None, :]) & (parts[:, None] != parts[None, :])
            levels.append(Level(count, float(between[inside].min())))
            parts = joined
            keys.append(joined)
    return levels, np.lexsort(keys).tolist()


def _connect(linked: NDArray[np.bool_]) -> _Labels:
    """Return the first server that each server is connected with, directly or through others."""
    labels: _Labels = np.arange(len(linked))
    while True:
        nearest = np.where(linked, labels[None, :], len(linked)).min(axis=1)
        if (nearest == labels).all():
            return labels
        labels = nearest
