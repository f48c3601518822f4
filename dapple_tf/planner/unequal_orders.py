"""Orders of unequal devices: a stage gets devices that follow each other in one of them."""

from __future__ import annotations

import itertools

from profiler.cluster import Cluster
from profiler.device_costs import profile_on
from profiler.profile import Profile

_MOST_KIND_ORDERS = 6  # those of three kinds
_MOST_FIRST_SERVERS = 4
_FEW_DEVICES = 16  # with more, rotated orders make the search 1.5 times as long and rarely change the plan


def device_orders(profile: Profile, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return orders of the devices to try: as given, by speed, grouped by kind, interleaved by kind, and rotated.

    By speed of the whole model: falling and rising. By kind: for up to six orders of the kinds, all devices of one kind
    after another, and one device of each kind in turn. Rotated, on at most 16 devices: as given, but starting at the
    second, third or fourth server. (The last devices of an order may be unused, so what comes first matters.) Equally
    fast devices stay in their order. Raises ProfileError for a kind without costs.
    """
    given = tuple(range(cluster.devices))
    seconds = {
        kind: _seconds(profile_on(profile, cluster, cluster.device_kinds.index(kind)))
        for kind in dict.fromkeys(cluster.device_kinds)
    }
    orders = [given, *(tuple(sorted(given, key=lambda d: sign * seconds[cluster.kind_of(d)])) for sign in (1, -1))]
    of_kind = {kind: [device for device in given if cluster.kind_of(device) == kind] for kind in seconds}
    for kinds in itertools.islice(itertools.permutations(seconds), _MOST_KIND_ORDERS):
        turns = itertools.zip_longest(*(of_kind[kind] for kind in kinds))
        orders.append(tuple(device for turn in turns for device in turn if device is not None))
        orders.append(tuple(device for kind in kinds for device in of_kind[kind]))
    servers = len(cluster.servers)
    for first in range(1, min(servers, _MOST_FIRST_SERVERS)) if cluster.devices <= _FEW_DEVICES else ():
        orders.append(tuple(sorted(given, key=lambda d: (cluster.homes[d] - first) % servers)))
    return tuple(dict.fromkeys(orders))


def _seconds(profile: Profile) -> float:
    size = profile.batch_size
    return float(profile.forward_seconds(size).sum() + profile.backward_seconds(size).sum())
