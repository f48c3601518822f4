"""SPP's objective, and its optimum by trying everything: the slow reference for planner "spp".

Plain Python from sections III and IV of the paper. It does not use the recurrence for W, the queues of Algorithm 1, or
an order of the devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Instance(NamedTuple):
    """p^f_l, p^b_l and alpha_l of the layers, d^f_{l,l+1} (= d^b) of the cuts, b_{v,v'}, and M."""

    forward: Sequence[float]
    backward: Sequence[float]
    alpha: Sequence[float]
    sent: Sequence[float]
    bandwidths: Sequence[Sequence[float]]
    micro_batches: int


class Mapped(NamedTuple):
    """A stage: its layers, and F(s)."""

    layers: Sequence[int]
    devices: Sequence[int]


def channel(instance: Instance, one: Mapped, other: Mapped) -> float:
    """Return c^f between two stages."""
    least = min(instance.bandwidths[v][w] for v in one.devices for w in other.devices)
    return instance.sent[one.layers[-1]] / (len(one.devices) * len(other.devices) * least)


def allreduce(instance: Instance, stage: Mapped) -> float:
    """Return A_s (equation 1)."""
    k = len(stage.devices)
    if k == 1:
        return 0.0
    least = min(instance.bandwidths[v][w] for v, w in itertools.combinations(stage.devices, 2))
    return 2 * (k - 1) * sum(instance.alpha[layer] for layer in stage.layers) / (k * least)


def computing(seconds: Sequence[float], stage: Mapped) -> float:
    """Return a replica's seconds of a micro-batch; ``seconds``: of the layers."""
    return sum(seconds[layer] for layer in stage.layers) / len(stage.devices)


def longest(instance: Instance, stages: Sequence[Mapped]) -> float:
    """Return W of the stages: of a stage with its AllReduce, or of a channel in both directions."""
    m = instance.micro_batches
    own = [
        m * (computing(instance.forward, s) + computing(instance.backward, s)) + allreduce(instance, s) for s in stages
    ]
    return max(own + [2 * m * channel(instance, a, b) for a, b in itertools.pairwise(stages)])


def cycle_bound(instance: Instance, stages: Sequence[Mapped]) -> float:
    """Return the bound of Lemma 1."""
    own = [computing(instance.forward, s) + computing(instance.backward, s) for s in stages]
    c = max(own + [2 * channel(instance, a, b) for a, b in itertools.pairwise(stages)])
    cycles = instance.micro_batches + 4 * len(stages) - 4
    return cycles * c + max(allreduce(instance, s) for s in stages)


def makespan(instance: Instance, stages: Sequence[Mapped], orders: Sequence[Sequence[tuple[str, int]]]) -> float:
    """Return equation 2 for stages that run their ("F" or "B", micro-batch) in these ``orders``, as soon as they can.

    Infinite for orders that block each other.
    """
    last = len(stages) - 1
    arrived = {("F", 0, m): 0.0 for m in range(instance.micro_batches)}
    free = dict.fromkeys(range(len(stages)), 0.0)
    channels: dict[tuple[str, int], float] = {}
    left = [list(order) for order in orders]
    while any(left):
        ready = [n for n, order in enumerate(left) if order and (order[0][0], n, order[0][1]) in arrived]
        if not ready:
            return float("inf")
        for n in ready:
            kind, m = left[n].pop(0)
            seconds = instance.forward if kind == "F" else instance.backward
            free[n] = max(free[n], arrived[kind, n, m]) + computing(seconds, stages[n])
            to = n + 1 if kind == "F" else n - 1
            if kind == "F" and n == last:
                arrived["B", n, m] = free[n]
            elif to >= 0:
                cost = channel(instance, stages[min(n, to)], stages[max(n, to)])
                channels[kind, n] = max(channels.get((kind, n), 0.0), free[n]) + cost
                arrived[kind, to, m] = channels[kind, n]
    return max(free[n] + allreduce(instance, stage) for n, stage in enumerate(stages))


def cycle_orders(stages: int, micro_batches: int) -> list[list[tuple[str, int]]]:
    """Return U_s from Fig. 4: block j has micro-batch m in cycle m + j, and in a cycle blocks are in order."""
    found = []
    for n in range(stages):
        blocks = {"F": 2 * n, "B": 4 * (stages - 1) - 2 * n}
        calls = [(m + blocks[kind], kind, m) for kind in "FB" for m in range(micro_batches)]
        found.append([(kind, m) for _, kind, m in sorted(calls, key=lambda call: (call[0], call[1] == "B"))])
    return found


def partitions(instance: Instance, order: Sequence[int]) -> Iterator[list[Mapped]]:
    """Yield all stages on all devices in this order."""
    for layers in divide(range(len(instance.forward))):
        for devices in divide(order):
            if len(layers) == len(devices):
                yield [Mapped(*pair) for pair in zip(layers, devices, strict=True)]


def mappings(instance: Instance) -> Iterator[list[Mapped]]:
    """Yield all stages with all sets of devices, of which each is used."""
    devices = range(len(instance.bandwidths))
    for layers in divide(range(len(instance.forward))):
        for owner in itertools.product(range(len(layers)), repeat=len(devices)):
            if set(owner) == set(range(len(layers))):
                yield [Mapped(part, [v for v in devices if owner[v] == n]) for n, part in enumerate(layers)]


def divide(items: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Yield all divisions into consecutive parts."""
    for cuts in itertools.product((False, True), repeat=len(items) - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(items)]
        yield [items[a:b] for a, b in itertools.pairwise(bounds)]


def all_orders(micro_batches: int) -> Iterator[list[tuple[str, int]]]:
    """Yield the orders of a stage's forwards and backwards that have each in turn of the micro-batches."""
    for positions in itertools.combinations(range(2 * micro_batches), micro_batches):
        counts = {"F": 0, "B": 0}
        order = []
        for index in range(2 * micro_batches):
            kind = "F" if index in positions else "B"
            order.append((kind, counts[kind]))
            counts[kind] += 1
            if counts["B"] > counts["F"]:
                break
        else:
            yield order


def best_makespan(instance: Instance, candidates: Iterable[list[Mapped]]) -> float:
    """Return the least makespan of these stages over the orders in which every stage keeps the micro-batches' order."""
    orders = list(all_orders(instance.micro_batches))
    return min(
        makespan(instance, stages, chosen)
        for stages in candidates
        for chosen in itertools.product(orders, repeat=len(stages))
    )
