"""Every plan, one by one, and what each costs: the slow reference for the planners' tests.

Plain Python from the design's cost model and the paper's formulas (DAPPLE, section IV). Of the project it uses only
the engines and the flows that share network interfaces, which have tests of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np

from dapple_tf.graph_passes.schedules.spec import early_backward
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.contention import Flows, find_flows
from dapple_tf.simulator.engine import Rings, run, uniform_seconds
from dapple_tf.simulator.order import Order, encode
from dapple_tf.simulator.transfer import link_tables

Devices = tuple[int, ...]
Stage = tuple[int, int, Devices]  # the first layer, the one after the last, the devices
Stages = tuple[Stage, ...]


class Costs(NamedTuple):
    """Seconds of a micro-batch and bytes of a device, by stage; sends by boundary."""

    forward: list[float]
    backward: list[float]
    exposed: list[float]
    send: list[float]
    fixed: list[float]  # weights, gradients, slots and the working set
    stash: list[float]
    rings: list[tuple[tuple[float, float], ...]]  # seconds before the end of the last gradients, and of the ring


# --- all plans


def pick_devices(cluster: Cluster, used: frozenset[int], wanted: int, policy: str) -> Devices:
    """Return the devices that Fresh First, Append First or Scatter First gives a stage (DAPPLE, section IV.B)."""
    servers: list[list[int]] = [[] for _ in cluster.servers]
    for device, home in enumerate(cluster.homes):
        servers[home].append(device)
    touched = [server for server in servers if used & set(server)]
    fresh = [server for server in servers if not used & set(server)]
    free = {"fresh": [fresh, touched], "append": [touched, fresh], "scatter": [touched, fresh]}[policy]
    queue: list[int] = []
    for group in free:
        left = [[device for device in server if device not in used] for server in group]
        if policy == "scatter":
            queue += [d for row in itertools.zip_longest(*left) for d in row if d is not None]
        else:
            queue += itertools.chain.from_iterable(left)
    return tuple(sorted(queue[:wanted]))


def list_device_chains(cluster: Cluster, stages: int) -> list[tuple[Devices, ...]]:
    """Return the devices of each of ``stages`` stages, in all ways that the policies reach."""

    def grow(used: frozenset[int], count: int) -> Iterator[tuple[Devices, ...]]:
        if count == 0:
            yield ()
            return
        for wanted in range(1, cluster.devices - len(used) + 1):
            for devices in {pick_devices(cluster, used, wanted, policy) for policy in ("fresh", "append", "scatter")}:
                for rest in grow(used | set(devices), count - 1):
                    yield (devices, *rest)

    return sorted(grow(frozenset(), stages))


def list_plans(profile: Profile, cluster: Cluster) -> Iterator[Stages]:
    """Yield all contiguous cuts on all devices that the policies reach, if every stage has work to do."""
    layers = len(profile.layers)
    positions = profile.positions()
    work = [any((c.forward_seconds, c.backward_seconds, c.stash_bytes, c.parameter_bytes)) for c in profile.layers]
    for stages in range(1, min(cluster.devices, len(positions) + 1) + 1):
        chains = list_device_chains(cluster, stages)
        for starts in itertools.combinations(positions, stages - 1):
            bounds = (0, *starts, layers)
            if any(work) and not all(any(work[first:end]) for first, end in itertools.pairwise(bounds)):
                continue
            for chain in chains:
                replicas = [len(devices) for devices in chain]
                if all(replicas[i] == replicas[i + 1] or p not in profile.unsplittable for i, p in enumerate(starts)):
                    yield tuple(
                        (first, end, devices)
                        for (first, end), devices in zip(itertools.pairwise(bounds), chain, strict=True)
                    )


# --- their costs


def row_bounds(replicas: int, rows: int, *, whole: bool) -> list[Fraction]:
    """Return where the rows of each replica begin, and where the last ones end, as parts of the micro-batch."""
    return [Fraction(i * rows // replicas, rows) if whole else Fraction(i, replicas) for i in range(replicas + 1)]


def transfer_seconds(
    cluster: Cluster, senders: Devices, receivers: Devices, size: float, rows: int, *, whole: bool
) -> float:
    """Return the seconds of moving ``size`` bytes of a micro-batch between two stages, replica by replica."""
    left, right = (row_bounds(len(devices), rows, whole=whole) for devices in (senders, receivers))
    loads: dict[tuple[object, ...], tuple[float, float]] = {}  # seconds so far and latency of what may be slowest
    for (i, a), (j, b) in itertools.product(enumerate(senders), enumerate(receivers)):
        shared = float(min(left[i + 1], right[j + 1]) - max(left[i], right[j]))
        if shared <= 0:
            continue
        x, y = cluster.homes[a], cluster.homes[b]
        link = cluster.link(x, y)
        own = {(p, q) for p, q in cluster.links} & {
            (cluster.servers[x].name, cluster.servers[y].name),
            (cluster.servers[y].name, cluster.servers[x].name),
        }
        if x == y:
            keys: list[tuple[object, ...]] = [("sends", a), ("receives", b)]
        else:
            keys = [("link", x, y)] if own else [("leaves", x), ("enters", y)]
        for key in keys:
            before, latency = loads.get(key, (0.0, 0.0))
            loads[key] = before + shared * size / link.bandwidth, max(latency, link.latency)
    return max(latency for _, latency in loads.values()) + max(seconds for seconds, _ in loads.values())


def ring_seconds(cluster: Cluster, devices: Devices, size: float) -> float:
    """Return the seconds of AllReduce of ``size`` bytes: 2 (r - 1) turns of the largest latency and 1 / r of them."""
    r = len(devices)
    if r == 1 or size == 0:
        return 0.0
    hops = [(cluster.homes[devices[i]], cluster.homes[devices[(i + 1) % r]]) for i in range(r)]
    links = [cluster.link(a, b) for a, b in hops]
    return 2 * (r - 1) * (max(link.latency for link in links) + size / r / min(link.bandwidth for link in links))


class StageCostModel:
    """Costs of stages for micro-batches of ``size`` samples; each distinct stage and boundary is computed once."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        size: int,
        recompute: bool,
        overlap: bool,
        slots: int,
        whole: bool = True,
    ) -> None:
        self.profile, self.cluster, self.size, self.whole = profile, cluster, size, whole
        self.recompute, self.overlap, self.slots = recompute, overlap, slots
        self.stage: Callable[[Stage], tuple[float, ...]] = cache(self._stage)
        self.send: Callable[[int, Devices, Devices], float] = cache(self._send)

    def costs(self, stages: Stages) -> Costs:
        """Return the costs of a plan."""
        rows = [self.stage(stage) for stage in stages]
        send = [self.send(b[0], a[2], b[2]) for a, b in itertools.pairwise(stages)]
        f, b, exposed, fixed, stash = (list(column) for column in zip(*rows, strict=True))
        return Costs(f, b, exposed, send, fixed, stash, [self._rings(stage) for stage in stages])

    def _rings(self, stage: Stage) -> tuple[tuple[float, float], ...]:
        first, end, devices = stage
        if not self.overlap:
            return ((0.0, self.stage(stage)[2]),)
        backward = self.profile.backward_seconds(self._rows(devices))
        left, found = float(sum(backward[first:end])), []
        for i in reversed(range(first, end)):
            left -= float(backward[i])
            found.append((left, ring_seconds(self.cluster, devices, self.profile.layers[i].parameter_bytes)))
        return tuple(found)

    def _rows(self, devices: Devices) -> float:
        """Return the rows of the replica that has most."""
        return math.ceil(self.size / len(devices)) if self.whole else self.size / len(devices)

    def _crossing(self, position: int) -> float:
        if position == 0:
            return 0.0
        sources = {source for source, reader in self.profile.links if source < position <= reader}
        return sum(self.profile.layers[source].activation_bytes for source in sources) * self._scale

    @property
    def _scale(self) -> float:
        return self.size / self.profile.batch_size

    def _send(self, position: int, senders: Devices, receivers: Devices) -> float:
        return transfer_seconds(self.cluster, senders, receivers, self._crossing(position), self.size, whole=self.whole)

    def _works(self, layer: int) -> bool:
        """Return whether a layer is more than a view, whose gradient is a view as well."""
        cost, sizes = self.profile.layers[layer], (1, 2, self.profile.batch_size)
        seconds = [self.profile.forward_seconds(n)[layer] + self.profile.backward_seconds(n)[layer] for n in sizes]
        return bool(any(seconds) or cost.stash_bytes or cost.parameter_bytes)

    def _stage(self, stage: Stage) -> tuple[float, ...]:
        first, end, devices = stage
        rows, layers = self._rows(devices), self.profile.layers
        r, scale = self.size / rows, self._scale
        forward = [float(x) for x in self.profile.forward_seconds(rows)[first:end]]
        backward = [float(x) for x in self.profile.backward_seconds(rows)[first:end]]
        exposed = ring_seconds(self.cluster, devices, sum(layers[i].parameter_bytes for i in range(first, end)))
        if self.overlap:
            now = done = 0.0
            for i in reversed(range(first, end)):
                now += backward[i - first]
                done = max(done, now) + ring_seconds(self.cluster, devices, layers[i].parameter_bytes)
            exposed = done - now
        stash = sum(layers[i].stash_bytes for i in range(first, end)) * scale / r
        inputs = {i: [s for s, reader in self.profile.links if reader == i] for i in range(first, end)}
        work = max(
            (layers[i].activation_bytes + sum(layers[s].activation_bytes for s in inputs[i])) * scale / r
            if self._works(i)
            else 0.0
            for i in range(first, end)
        )
        again = 0.0
        if self.recompute:
            again, work, stash = sum(forward), work + stash, self._crossing(first) / r
        fixed = sum(layers[i].parameter_bytes for i in range(first, end)) * (2 + self.slots)
        return sum(forward), sum(backward) + again, exposed, fixed + work, stash


def step_of(costs: Costs, micro_batches: int, memory: float, flows: Flows | None = None) -> dict[str, float]:
    """Return the seconds of a step under each policy that fits, by the schedule's name; ``flows``: for contention."""
    memory *= 1 + 1e-12
    stages = len(costs.forward)
    found = {}
    for name in ("dapple-a", "dapple-b", "gpipe"):
        k = {
            "dapple-a": [stages - i for i in range(stages)],
            "dapple-b": [2 * (stages - i) - 1 for i in range(stages)],
            "gpipe": [micro_batches] * stages,
        }[name]
        k = [min(held, micro_batches) for held in k]
        limit = micro_batches
        for i in range(stages):
            if costs.fixed[i] + k[i] * costs.stash[i] > memory:
                holds = [n for n in range(k[i]) if costs.fixed[i] + n * costs.stash[i] <= memory]
                limit = min(limit, max(holds, default=0))
        if limit == 0 or (name == "gpipe" and limit < micro_batches):
            continue
        schedule = name if max(k) <= limit else f"{name}:D={limit}"
        found[schedule] = order_seconds(_order(tuple(min(held, limit) for held in k), micro_batches), costs, flows)
    return found


def order_seconds(order: Order, costs: Costs, flows: Flows | None = None) -> float:
    """Return the seconds of a step in this order."""
    send = np.array([*costs.send, 0.0])
    forward, backward, exposed = (np.array(row) for row in (costs.forward, costs.backward, costs.exposed))
    before, seconds = np.array([ring for of_stage in costs.rings for ring in of_stage]).T.copy()
    every = Rings(np.cumsum([0, *map(len, costs.rings)]), before, seconds, exposed)
    return run(order, uniform_seconds(forward, backward, np.zeros(0), send, send), every, flows).seconds


@cache
def _order(k: tuple[int, ...], micro_batches: int) -> Order:
    return encode(early_backward(k, micro_batches))


def _flows(cluster: Cluster, devices: Sequence[Devices], size: int) -> Flows:
    homes = [[cluster.homes[device] for device in own] for own in devices]
    rows = [[(i + 1) * size // len(own) - i * size // len(own) for i in range(len(own))] for own in devices]
    return find_flows(homes, [True] * (len(homes) - 1), link_tables(cluster), rows)


def fits(costs: Costs, memory: float, held: Sequence[int]) -> bool:
    """Return whether every stage can hold this number of micro-batches, up to rounding."""
    memory *= 1 + 1e-12
    return all(fixed + k * stash <= memory for fixed, stash, k in zip(costs.fixed, costs.stash, held, strict=True))


# --- the paper's formulas


def latency(forward: Sequence[float], backward: Sequence[float], allreduce: Sequence[float], m: int) -> float:
    """Return formulas 1 to 3 as printed, over stages and networks alike; s = Q belongs to the case s < Q."""
    stages = len(forward)
    q = stages - 1
    for s in range(stages - 2, -1, -1):
        steady = (m - 1) * (forward[s] + backward[s])
        other = (m - 1) * (forward[q] + backward[q]) + sum(forward[a] + backward[a] for a in range(s + 1, q))
        if steady > other and not math.isclose(steady, other, rel_tol=1e-12):
            q = s
    warm_up = sum(forward[: q + 1])
    steady = (m - 1) * (forward[q] + backward[q])
    ending = max(
        allreduce[s] + (sum(backward[s : q + 1]) if s <= q else -sum(backward[q : s + 1])) for s in range(stages)
    )
    return warm_up + steady + ending


def formula_of(costs: Costs, micro_batches: int) -> float:
    """Return the latency of a plan: its stages with the networks between them."""
    forward, backward, allreduce = [], [], []
    for i in range(len(costs.forward)):
        forward.append(costs.forward[i])
        backward.append(costs.backward[i])
        allreduce.append(costs.exposed[i])
        if i < len(costs.send):
            forward.append(costs.send[i])
            backward.append(costs.send[i])
            allreduce.append(0.0)
    return latency(forward, backward, allreduce, micro_batches)


# --- the optimum


class Optimum(NamedTuple):
    """The least seconds and a plan that has them; infinite if nothing fits."""

    seconds: float
    stages: Stages = ()
    size: int = 0
    schedule: str = ""


def divisors(number: int) -> list[int]:
    """Return the divisors in rising order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def find_optimum(
    profile: Profile,
    cluster: Cluster,
    batch: int,
    *,
    by_formula: bool = False,
    recompute: bool = False,
    overlap: bool = False,
    slots: int = 2,
    contention: bool = True,
) -> Optimum:
    """Return the best of all plans: by simulation on any devices, or by formula on all of them.

    By formula, plans whose stages can hold the warm-up of policy A come before all others.
    """
    best = warm = Optimum(math.inf)
    plans = list(list_plans(profile, cluster))
    for size in divisors(batch):
        model = StageCostModel(profile, cluster, size, recompute, overlap, slots, whole=not by_formula)
        for stages in plans:
            if max(len(devices) for _, _, devices in stages) > size:
                continue
            if by_formula and sum(len(devices) for _, _, devices in stages) < cluster.devices:
                continue
            costs = model.costs(stages)
            if not fits(costs, cluster.device_memory, [1] * len(stages)):
                continue
            if by_formula:
                found = {"": formula_of(costs, batch // size)}
                full = [min(len(stages) - i, batch // size) for i in range(len(stages))]
                if fits(costs, cluster.device_memory, full) and found[""] < warm.seconds:
                    warm = Optimum(found[""], stages, size)
            else:
                flows = _flows(cluster, tuple(devices for _, _, devices in stages), size) if contention else None
                found = step_of(costs, batch // size, cluster.device_memory, flows)
            for schedule, seconds in found.items():
                if seconds < best.seconds:
                    best = Optimum(seconds, stages, size, schedule)
    return warm if warm.stages else best
