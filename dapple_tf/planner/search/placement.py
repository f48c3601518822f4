"""Placement of stages on devices: the three policies of DAPPLE, section IV.B, and all placements that they lead to."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.profiler.cluster import Cluster

Used = tuple[int, ...]  # a number of devices for each server: those in use (the first ones of the server), or all
Policy = Callable[[Used, Used, int], Used]  # (used, server sizes, number of devices wanted) -> used afterwards


def fresh_first(used: Used, sizes: Used, wanted: int) -> Used:
    """Take devices from unused servers, then from the others."""
    return _fill(used, sizes, wanted, _fresh(used), _started(used))


def append_first(used: Used, sizes: Used, wanted: int) -> Used:
    """Take devices from servers that are partly in use, then from the others."""
    return _fill(used, sizes, wanted, _started(used), _fresh(used))


def scatter_first(used: Used, sizes: Used, wanted: int) -> Used:
    """Take devices equally from all servers in use, or from all servers if none is in use; then from the others."""
    taken = list(used)
    for servers in (list(_started(used)), list(_fresh(used))):
        while wanted and (room := [i for i in servers if taken[i] < sizes[i]]):
            each = min(wanted // len(room), min(sizes[i] - taken[i] for i in room))
            for server in room if each else room[:wanted]:
                taken[server] += max(each, 1)
            wanted -= each * len(room) if each else wanted
    return tuple(taken)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


def _fresh(used: Used) -> Iterator[int]:
    """Yield the servers that have no device in use."""
    return (server for server, count in enumerate(used) if not count)


def _started(used: Used) -> Iterator[int]:
    """Yield the servers that have some devices in use."""
    return (server for server, count in enumerate(used) if count)


def _fill(used: Used, sizes: Used, wanted: int, *groups: Iterable[int]) -> Used:
    """Take ``wanted`` devices from the servers of the first group in turn, then from those of the others."""
    taken = list(used)
    for server in itertools.chain(*groups):
        if not wanted:
            break
        more = min(wanted, sizes[server] - taken[server])
        taken[server] += more
        wanted -= more
    return tuple(taken)


@dataclass(frozen=True)
class Placement:
    """The devices of one stage: those in use after it but not before. ``devices_left``: how many are still unused."""

    before: Used
    after: Used
    devices_left: int

    @cached_property
    def replicas(self) -> int:
        """Number of devices, r."""
        return sum(self.after) - sum(self.before)

    def servers(self) -> tuple[int, ...]:
        """Return the server of each device, in the order of the plan."""
        taken = map(operator.sub, self.after, self.before)
        return tuple(itertools.chain.from_iterable(map(itertools.repeat, itertools.count(), taken)))


@dataclass(frozen=True)
class Placements:
    """The placements that sequences of policies lead to.

    ``successors[p]``: the placements that the next stage can have after a stage on placement p; the last entry has the
    placements of the first stage. ``complete``: no placement was left out to limit their number.
    """

    items: tuple[Placement, ...]
    successors: tuple[tuple[int, ...], ...]
    complete: bool


def find_placements(
    sizes: Sequence[int],
    counts: Sequence[int],
    *,
    policies: Sequence[Policy] = POLICIES,
    most: int | None = None,
    stages: int | None = None,
) -> Placements:
    """Return placements on servers of these ``sizes``: stages of any of ``counts`` replicas, or of all devices left.

    The search is breadth first. Stage number ``stages`` takes all devices left. So does every stage once there are
    ``most`` placements.
    """
    size = tuple(sizes)
    start, total = (0,) * len(size), sum(size)
    found: dict[tuple[Used, Used], int] = {}
    items: list[Placement] = []
    moves: dict[Used, list[int]] = {}
    depth, complete = {start: 1}, True
    queue = [start]
    for used in queue:
        left = total - sum(used)
        full = most is not None and len(items) >= most
        complete = complete and not full
        last = full or depth[used] == stages
        moves[used] = []
        for wanted in sorted({left} if last else {c for c in counts if c <= left} | {left}):
            for after in dict.fromkeys(policy(used, size, wanted) for policy in policies):
                if (used, after) not in found:
                    found[used, after] = len(items)
                    items.append(Placement(used, after, left - wanted))
                moves[used].append(found[used, after])
                if left > wanted and after not in depth:
                    depth[after] = depth[used] + 1
                    queue.append(after)
    successors = (*(tuple(moves.get(item.after, ())) for item in items), tuple(moves[start]))
    return Placements(tuple(items), successors, complete)


def find_all_placements(sizes: Sequence[int], most: int) -> Placements | None:
    """Return the placements of stages of any number of replicas; None if there are about ``most`` of them or more."""
    total = sum(sizes)
    # If the first u devices are in use, the next stage can have 1 to total - u replicas. That makes at least
    # total (total + 1) / 2 placements. Up to 3 total placements may be found after ``most`` is reached.
    if total * (total - 5) // 2 >= most:
        return None
    found = find_placements(sizes, range(1, total + 1), most=most)
    return found if found.complete else None


def device_indices(cluster: Cluster, placement: Placement, order: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of a placement's devices, ascending; ``order``: the server of each entry of the placement."""
    first = list(itertools.accumulate((server.devices for server in cluster.servers), initial=0))
    taken = zip(order, placement.before, placement.after, strict=True)
    return tuple(sorted(first[server] + k for server, before, after in taken for k in range(before, after)))
