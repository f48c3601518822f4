"""Orders of unequal devices: a stage gets devices that follow each other in one of them."""

from __future__ import annotations

import itertools

from profiler.cluster import Cluster
from profiler.device_costs import profile_on
from profiler.profile import Profile


def device_orders(profile: Profile, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the devices as given, by falling and by rising speed of the whole model, and with the kinds interleaved.

    Equally fast devices stay in their order. Raises ProfileError for a kind without costs.
    """
    given = tuple(range(cluster.devices))
    seconds = {
        kind: _seconds(profile_on(profile, cluster, cluster.device_kinds.index(kind)))
        for kind in dict.fromkeys(cluster.device_kinds)
    }
    fastest_first = tuple(sorted(given, key=lambda device: seconds[cluster.kind_of(device)]))
    slowest_first = tuple(sorted(given, key=lambda device: -seconds[cluster.kind_of(device)]))
    of_kinds = [[device for device in given if cluster.kind_of(device) == kind] for kind in seconds]
    interleaved = tuple(device for turn in itertools.zip_longest(*of_kinds) for device in turn if device is not None)
    return tuple(dict.fromkeys((given, fastest_first, slowest_first, interleaved)))


def _seconds(profile: Profile) -> float:
    size = profile.batch_size
    return float(profile.forward_seconds(size).sum() + profile.backward_seconds(size).sum())
