"""Flows that share network interfaces, as events of a plain Python simulation; the rule is that of ``contention``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dapple_tf.simulator.contention import fill_ring, fill_transfer
from dapple_tf.simulator.transfer import LinkTables

Happen = Callable[[float], None]


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
    latency = fill_transfer(demands, senders, receivers, tables, shares)
    return FlowDemand(latency, {d: float(demands[d]) for d in np.flatnonzero(demands).tolist()})


def ring_demand(servers: Sequence[int], tables: LinkTables) -> FlowDemand:
    """Return the demand of a ring over replicas on these servers."""
    demands = np.zeros(2 * len(tables.inside))
    latency = fill_ring(demands, servers, tables)
    return FlowDemand(latency, {d: float(demands[d]) for d in np.flatnonzero(demands).tolist()})


class SharedFlows:
    """The flows that are under way. ``at``: a function that schedules an event: its time, and what is called then."""

    def __init__(self, at: Callable[[float, Happen], None]) -> None:
        self._at = at
        self._counts: Counter[int] = Counter()
        self._moving: dict[int, _Moving] = {}
        self._number = 0

    def start(self, now: float, seconds: float, demand: FlowDemand, done: Happen) -> None:
        """Start a flow that takes ``seconds`` alone; call ``done`` with the time at which it ends."""
        wait = min(demand.latency, seconds)
        if not demand.of or seconds == wait:
            self._at(now + seconds, done)
            return
        flow = _Moving(demand.of, now + seconds, seconds - wait, done)
        self._at(now + wait, lambda time: self._move(flow, time))

    def _move(self, flow: _Moving, now: float) -> None:
        self._number += 1
        number = self._number
        self._moving[number] = flow
        flow.since = now
        self._counts.update(flow.demands.keys())
        self._at(flow.due, lambda time: self._end(number, time))
        self._recompute(now)

    def _recompute(self, now: float) -> None:
        """Recompute how slowly flows move, and when they end."""
        for number, flow in self._moving.items():
            factor = max(1.0, *(self._counts[d] * demand for d, demand in flow.demands.items()))
            if factor != flow.factor:
                flow.left = max(0.0, flow.left - (now - flow.since) / flow.factor)
                flow.since, flow.factor = now, factor
                flow.due = now + flow.left * factor
                self._at(flow.due, partial(self._end, number))

    def _end(self, number: int, now: float) -> None:
        """End a flow, unless it has ended or moves more slowly than when this was planned."""
        flow = self._moving.get(number)
        if flow is None or flow.due != now:
            return
        del self._moving[number]
        self._counts.subtract(flow.demands.keys())
        self._recompute(now)
        flow.done(now)


@dataclass
class _Moving:
    """A flow that moves its bytes.

    ``left``: the seconds that the bytes which are left at the time ``since`` would take without other flows.
    ``factor``: how many times longer they take now. ``due``: when the flow ends, unless the factor changes.
    """

    demands: Mapping[int, float]
    due: float
    left: float
    done: Happen
    since: float = 0.0
    factor: float = 1.0
