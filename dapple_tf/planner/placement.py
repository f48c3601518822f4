"""Which devices a stage gets: the three policies of DAPPLE, section IV.B, and all placements they reach."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from profiler.cluster import Cluster

Used = tuple[int, ...]  # devices taken from each server; a server's are taken in order
Policy = Callable[[Used, Used, int], Used]  # used, sizes of the servers, devices wanted -> used afterwards


def fresh_first(used: Used, sizes: Used, wanted: int) -> Used:
    """Fill servers of which nothing is used yet, then the others."""
    order = sorted(range(len(sizes)), key=lambda server: used[server] > 0)
    return _fill(used, sizes, wanted, order)


def append_first(used: Used, sizes: Used, wanted: int) -> Used:
    """Fill servers of which something is used already, then fresh ones."""
    order = sorted(range(len(sizes)), key=lambda server: used[server] == 0)
    return _fill(used, sizes, wanted, order)


def scatter_first(used: Used, sizes: Used, wanted: int) -> Used:
    """Take devices equally from all used servers, or from all where all are fresh; then from the others."""
    taken = list(used)
    some = any(used)
    for group in ([i for i, u in enumerate(used) if u or not some], [i for i, u in enumerate(used) if some and not u]):
        while wanted and (room := [i for i in group if taken[i] < sizes[i]]):
            rounds = min(wanted // len(room), min(sizes[i] - taken[i] for i in room))
            for server in room if rounds else room[:wanted]:
                taken[server] += max(rounds, 1)
            wanted -= rounds * len(room) if rounds else wanted
    return tuple(taken)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


def _fill(used: Used, sizes: Used, wanted: int, order: Iterable[int]) -> Used:
    taken = list(used)
    for server in order:
        more = min(wanted, sizes[server] - taken[server])
        taken[server] += more
        wanted -= more
    return tuple(taken)


@dataclass(frozen=True)
class Placement:
    """A stage's share of the cluster: the devices between two states of use, ``left`` unused afterwards."""

    before: Used
    after: Used
    left: int

    @cached_property
    def replicas(self) -> int:
        """r: how many devices it is."""
        return sum(self.after) - sum(self.before)

    def servers(self) -> tuple[int, ...]:
        """The server of each device, in the order of the plan."""
        pairs = zip(self.before, self.after, strict=True)
        return tuple(server for server, (b, a) in enumerate(pairs) for _ in range(a - b))


@dataclass(frozen=True)
class Placements:
    """All placements that chains of policies reach, and which may follow which.

    ``follow[p]``: placements of the next stage after p; ``follow[-1]`` (the last) those of the first stage.
    ``complete``: whether none was left out for their number.
    """

    items: tuple[Placement, ...]
    follow: tuple[tuple[int, ...], ...]
    complete: bool


def find_placements(
    sizes: Sequence[int],
    counts: Sequence[int],
    *,
    policies: Sequence[Policy] = POLICIES,
    most: int | None = None,
    stages: int | None = None,
) -> Placements:
    """Placements on servers of these ``sizes``, for stages of any of ``counts`` replicas, or of all that is left.

    Breadth first; once there are ``most``, what follows takes all that is left, as does stage number ``stages``.
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
    follow = (*(tuple(moves.get(item.after, ())) for item in items), tuple(moves[start]))
    return Placements(tuple(items), follow, complete)


def device_indices(cluster: Cluster, placement: Placement, order: Sequence[int]) -> tuple[int, ...]:
    """The numbers of a placement's devices, server by server; ``order`` says which server each entry stands for."""
    first = list(itertools.accumulate((server.devices for server in cluster.servers), initial=0))
    taken = zip(order, placement.before, placement.after, strict=True)
    return tuple(sorted(first[server] + k for server, before, after in taken for k in range(before, after)))
