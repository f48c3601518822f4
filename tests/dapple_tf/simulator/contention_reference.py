"""A second simulator of a step whose flows share network interfaces, in plain Python, from the design's text.

It goes from event to event in exact fractions, knows bytes and bandwidths instead of demands, and shares no code with
the project's engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from dapple_tf.graph_passes.schedules.schedule import Action, Schedule
from dapple_tf.profiler.cluster import Cluster

Nic = tuple[int, str]  # a server, and "out" or "in"
Event = tuple[str, int, int]  # F, B (or I), W, SF or SB; stage (of a transfer: before the boundary); micro-batch


@dataclass
class Flow:
    """Something that moves: its latency, its bytes by interface direction, and its seconds on links not shared."""

    name: Event
    latency: Fraction
    load: Mapping[Nic, Fraction]
    floor: Fraction
    after: Fraction | None = None  # it may not begin before
    begin: Fraction | None = None
    waited: Fraction = Fraction(0)
    moved: Fraction = Fraction(0)
    end: Fraction | None = None


@dataclass(frozen=True)
class Setting:
    """A step to simulate: seconds of its actions, bytes over boundaries by micro-batch, and each stage's rings.

    ``rings``: seconds before the end of the last gradients, and bytes.
    """

    schedule: Schedule
    cluster: Cluster
    devices: Sequence[tuple[int, ...]]
    seconds: Mapping[Action, Fraction]
    boundary_bytes: Sequence[Sequence[Fraction]]
    rings: Sequence[Sequence[tuple[Fraction, Fraction]]]


@dataclass
class Found:
    """Starts and ends of all events, and when the rings of each stage have ended."""

    times: dict[Event, tuple[Fraction, Fraction]] = field(default_factory=dict)
    rings: dict[int, Fraction] = field(default_factory=dict)


def transfer_load(
    cluster: Cluster, senders: Sequence[int], receivers: Sequence[int], size: Fraction
) -> tuple[Fraction, dict[Nic, Fraction], Fraction]:
    """Latency, bytes by interface direction, and seconds on links that are not shared."""
    latency, load, other = Fraction(0), dict[Nic, Fraction](), dict[object, Fraction]()
    n, m = len(senders), len(receivers)
    for i, a in enumerate(senders):
        for j, b in enumerate(receivers):
            common = min(Fraction(i + 1, n), Fraction(j + 1, m)) - max(Fraction(i, n), Fraction(j, m))
            if common <= 0:
                continue
            x, y = cluster.homes[a], cluster.homes[b]
            link = cluster.link(x, y)
            latency = max(latency, Fraction(link.latency))
            if x == y:
                for key in (("sends", a), ("receives", b)):
                    other[key] = other.get(key, Fraction(0)) + common * size / Fraction(link.bandwidth)
            elif has_own_link(cluster, x, y):
                other[x, y] = other.get((x, y), Fraction(0)) + common * size / Fraction(link.bandwidth)
            else:
                for nic in ((x, "out"), (y, "in")):
                    load[nic] = load.get(nic, Fraction(0)) + common * size
    return latency, load, max(other.values(), default=Fraction(0))


def ring_load(
    cluster: Cluster, devices: Sequence[int], size: Fraction
) -> tuple[Fraction, dict[Nic, Fraction], Fraction]:
    """The same of a ring: every link of it moves 2 (r - 1) / r of the bytes."""
    r, homes = len(devices), [cluster.homes[device] for device in devices]
    if r == 1 or size == 0:
        return Fraction(0), {}, Fraction(0)
    latency, floor, load, each = Fraction(0), Fraction(0), dict[Nic, Fraction](), Fraction(2 * (r - 1), r) * size
    for a, b in zip(homes, [*homes[1:], homes[0]], strict=True):
        link = cluster.link(a, b)
        latency = max(latency, Fraction(link.latency))
        if a == b or has_own_link(cluster, a, b):
            floor = max(floor, each / Fraction(link.bandwidth))
        else:
            load[a, "out"] = load[b, "in"] = each
    return 2 * (r - 1) * latency, load, floor


def has_own_link(cluster: Cluster, a: int, b: int) -> bool:
    """Whether two servers have a link that only they use."""
    names = {cluster.servers[a].name, cluster.servers[b].name}
    return any(set(pair) == names for pair in cluster.links)


class _Simulation:
    def __init__(self, setting: Setting) -> None:
        self.s = setting
        schedule = setting.schedule
        self.worker_of = {a.stage: w for w, actions in enumerate(schedule.workers) for a in actions}
        self.stages = len(self.worker_of)
        self.heads = [0] * len(schedule.workers)
        self.running: list[tuple[Action, Fraction] | None] = [None] * len(schedule.workers)
        self.here: set[tuple[str, int, int]] = set()  # results: what, the stage that may take it, micro-batch
        self.channels: dict[tuple[str, int], list[tuple[Flow, list[int]]]] = {}
        self.held: list[list[int]] = [[] for _ in schedule.workers]
        self.rings: dict[int, list[Flow]] = {}
        self.gradients_end: dict[int, Fraction] = {}
        self.ring_order: list[list[int]] = [[] for _ in schedule.workers]
        self.missing = dict.fromkeys(range(self.stages), 0)
        for actions in schedule.workers:
            for a in actions:
                self.missing[a.stage] += a.kind != "F"
        self.now = Fraction(0)
        self.found = Found()

    def run(self) -> Found:
        while True:
            while self._change():
                pass
            moving = list(self._moving())
            share = {nic: sum(nic in flow.load for flow in moving) for flow in moving for nic in flow.load}
            rate = {id(flow): self._rate(flow, share) for flow in moving}
            steps = [end - self.now for run in self.running if run for end in [run[1]]]
            steps += [flow.latency - flow.waited for flow in self._begun() if flow.waited < flow.latency]
            steps += [(1 - flow.moved) / rate[id(flow)] for flow in moving]
            steps += [
                flow.after - self.now for flow in self._flows() if flow.after is not None and flow.after > self.now
            ]
            steps += [end - self.now for end in self.gradients_end.values() if end > self.now]
            if not steps:
                return self.found
            step = min(steps)
            for flow in self._begun():
                if flow.waited < flow.latency:
                    flow.waited += step
            for flow in moving:
                flow.moved += rate[id(flow)] * step
            self.now += step

    def _rate(self, flow: Flow, share: Mapping[Nic, int]) -> Fraction:
        bandwidth = Fraction(self.s.cluster.inter_server.bandwidth)
        rates = [bandwidth / share[nic] / size for nic, size in flow.load.items()]
        return min([*rates, 1 / flow.floor] if flow.floor else rates)

    def _flows(self) -> Iterable[Flow]:
        """The flows that are next on their channels, and those of the rings that may run."""
        yield from (queue[0][0] for queue in self.channels.values() if queue)
        for order in self.ring_order:
            free = True  # the rings of the worker's stages before have ended
            for stage in order:
                left = [flow for flow in self.rings[stage] if flow.end is None]
                if left and free:
                    yield left[0]
                free = free and not left

    def _begun(self) -> list[Flow]:
        return [flow for flow in self._flows() if flow.begin is not None]

    def _moving(self) -> Iterable[Flow]:
        return (flow for flow in self._begun() if flow.waited == flow.latency)

    def _change(self) -> bool:
        """Let one thing happen that happens now; return whether there was one."""
        for worker, run in enumerate(self.running):
            if run and run[1] == self.now:
                self.running[worker] = None
                self._ended(worker, run[0])
                return True
        for flow in self._flows():
            if flow.begin is None and (flow.after is None or flow.after <= self.now):
                flow.begin = self.now
                return True
            nothing = not flow.load and not flow.floor
            if flow.begin is not None and flow.waited == flow.latency and (nothing or flow.moved == 1):
                flow.end = self.now
                self._arrived(flow)
                return True
        for order in self.ring_order:
            for stage in order:
                ended = self.gradients_end[stage] <= self.now and all(f.end is not None for f in self.rings[stage])
                if stage not in self.found.rings and ended:
                    self.found.rings[stage] = self.now
                    return True
                if not ended:
                    break
        return any(self._start(worker) for worker in range(len(self.running)))

    def _start(self, worker: int) -> bool:
        actions = self.s.schedule.workers[worker]
        if self.running[worker] or self.heads[worker] == len(actions):
            return False
        a = actions[self.heads[worker]]
        needs = {
            "F": [("x", a.stage)] if a.stage else [],
            "B": [("f", a.stage)] + ([("g", a.stage)] if a.stage + 1 < self.stages else []),
            "W": [("i", a.stage)],
        }["B" if a.kind == "I" else a.kind]
        if any((what, stage, a.micro_batch) not in self.here for what, stage in needs):
            return False
        self.heads[worker] += 1
        end = self.now + self.s.seconds[a]
        self.running[worker] = a, end
        self.found.times[{"I": "B"}.get(a.kind, a.kind), a.stage, a.micro_batch] = self.now, end
        self.missing[a.stage] -= a.kind != "F"
        if self.missing[a.stage] == 0 and a.kind != "F":
            self.gradients_end[a.stage] = end
            self.ring_order[worker].append(a.stage)
            flows = []
            for before, size in self.s.rings[a.stage]:
                latency, load, floor = ring_load(self.s.cluster, self.s.devices[a.stage], size)
                flows.append(Flow(("ring", a.stage, 0), latency, load, floor, after=end - before))
            self.rings[a.stage] = flows
        return True

    def _ended(self, worker: int, a: Action) -> None:
        m = a.micro_batch
        if a.kind == "W":
            return
        if a.kind == "F":
            self.here.add(("f", a.stage, m))
            what, boundary, target = "SF", a.stage, a.stage + 1
        else:
            self.here.add(("i", a.stage, m))
            what, boundary, target = "SB", a.stage - 1, a.stage - 1
        if not 0 <= target < self.stages:
            return
        if self.worker_of[target] == worker:
            self.here.add(("x" if what == "SF" else "g", target, m))
            self.found.times[what, boundary, m] = self.now, self.now
            return
        self.held[worker].append(m)
        if a in self.s.schedule.together:
            return
        batches, self.held[worker] = self.held[worker], []
        size = sum((self.s.boundary_bytes[boundary][n] for n in batches), Fraction(0))
        pair = self.s.devices[boundary], self.s.devices[boundary + 1]
        latency, load, floor = transfer_load(self.s.cluster, *(pair if what == "SF" else pair[::-1]), size)
        if size == 0:
            load = {}
        flow = Flow((what, boundary, m), len(batches) * latency, load, floor)
        self.channels.setdefault((what, boundary), []).append((flow, batches))

    def _arrived(self, flow: Flow) -> None:
        what, boundary, _ = flow.name
        if what == "ring":
            return
        _, batches = self.channels[what, boundary].pop(0)
        assert flow.begin is not None
        for m in batches:
            self.found.times[what, boundary, m] = flow.begin, self.now
            self.here.add(("x", boundary + 1, m) if what == "SF" else ("g", boundary, m))


def run_reference(setting: Setting) -> Found:
    """Run the setting to its end."""
    return _Simulation(setting).run()
