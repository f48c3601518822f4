"""Flows that share network interfaces, as events of a plain Python simulation; the rule is that of ``contention``."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.contention import Flows, fill_ring, fill_transfer
from dapple_tf.simulator.transfer import LinkTables

Callback = Callable[[float], None]


@dataclass(frozen=True)
class FlowDemand:
    """The latency of a flow in seconds, and its demand of each interface direction that it uses; see ``contention``."""

    latency: float = 0.0
    of: Mapping[int, float] = field(default_factory=dict)


def transfer_demand(
    senders: Sequence[int],
    receivers: Sequence[int],
    tables: LinkTables,
    shares: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> FlowDemand:
    """Return the demand of a transfer between replicas on these servers; ``shares``: as in ``transfer_cost``."""
    demands = np.zeros(2 * len(tables.inside))
    return _used(fill_transfer(demands, senders, receivers, tables, shares), demands)


def ring_demand(servers: Sequence[int], tables: LinkTables) -> FlowDemand:
    """Return the demand of a ring over replicas on these servers."""
    demands = np.zeros(2 * len(tables.inside))
    return _used(fill_ring(demands, servers, tables), demands)


def _used(latency: float, demands: Floats) -> FlowDemand:
    return FlowDemand(latency, {d: float(demands[d]) for d in np.flatnonzero(demands).tolist()})


def demands_of(flows: Flows | None) -> dict[int, FlowDemand]:
    """Return the demand of each of the ``flows`` that shares an interface, by its number."""
    if flows is None:
        return {}
    uses = zip(flows.direction.tolist(), flows.demand.tolist(), strict=True)
    own = [dict(itertools.islice(uses, count)) for count in np.diff(flows.first).tolist()]
    return {flow: FlowDemand(float(flows.latency[flow]), demands) for flow, demands in enumerate(own) if demands}


@dataclass(eq=False)
class _Moving:
    """A flow that moves its bytes.

    ``left``: the seconds that the remaining bytes, at the time ``since``, would take without other flows.
    ``factor``: how many times longer they take now. ``due``: when the flow ends, unless the factor changes. ``rank``:
    as in ``SharedFlows.at``.
    """

    demands: Mapping[int, float]
    due: float
    left: float
    done: Callback
    rank: int
    since: float = 0.0
    factor: float = 1.0


class SharedFlows:
    """The events of a simulation in order of time, and the flows that are under way."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int, Callback]] = []
        self._numbers = itertools.count()
        self._counts = Counter[int]()
        self._moving = dict[_Moving, None]()

    def at(self, time: float, happen: Callback, rank: int = 0) -> None:
        """Call ``happen`` at this time; of events at one time the lowest ``rank`` is first, then the first added."""
        heapq.heappush(self._events, (time, rank, next(self._numbers), happen))

    def run_next(self) -> bool:
        """Let the next event happen; return False if there is none."""
        if not self._events:
            return False
        time, _, _, happen = heapq.heappop(self._events)
        happen(time)
        return True

    def start(self, now: float, seconds: float, demand: FlowDemand, done: Callback, rank: int = 0) -> None:
        """Start a flow that takes ``seconds`` alone; call ``done`` with the time at which it ends."""
        wait = min(demand.latency, seconds)
        if not demand.of or seconds == wait:
            self.at(now + seconds, done, rank)
            return
        flow = _Moving(demand.of, now + seconds, seconds - wait, done, rank)
        self.at(now + wait, lambda time: self._move(flow, time), rank)

    def _move(self, flow: _Moving, now: float) -> None:
        self._moving[flow] = None
        flow.since = now
        self._counts.update(flow.demands.keys())
        self._set_end(flow)
        self._recompute(now)

    def _set_end(self, flow: _Moving) -> None:
        self.at(flow.due, lambda time: self._end(flow, time), flow.rank)

    def _recompute(self, now: float) -> None:
        """Recompute how slowly flows move, and when they end."""
        for flow in self._moving:
            factor = max(1.0, *(self._counts[d] * demand for d, demand in flow.demands.items()))
            if factor != flow.factor:
                flow.left = max(0.0, flow.left - (now - flow.since) / flow.factor)
                flow.since, flow.factor = now, factor
                flow.due = now + flow.left * factor
                self._set_end(flow)

    def _end(self, flow: _Moving, now: float) -> None:
        """End a flow, unless it has ended or moves more slowly than when this was planned."""
        if flow not in self._moving or flow.due != now:
            return
        del self._moving[flow]
        self._counts.subtract(flow.demands.keys())
        self._recompute(now)
        flow.done(now)
