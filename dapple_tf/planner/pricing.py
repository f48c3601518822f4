"""The simulated seconds of plans under each policy, many a millisecond.

The rows of a plan's costs are, by stage: forward, backward, transfer to the next stage (either direction), exposed
AllReduce (seconds); fixed, stash of a micro-batch, working set (bytes of one device); and the part of backward that is
gradients of weights, where the schedule has them run by themselves (seconds).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.planner.cost_tables import CostTables
from dapple_tf.planner.search import fixed_bytes, stash_bytes, work_bytes
from dapple_tf.simulator.compiled import Floats, Integers, compiled
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.simulator.engine import early_backward_order, has_weights, step_seconds
from dapple_tf.simulator.named_orders import named_order
from graph_passes.errors import ScheduleError
from graph_passes.schedules.policies import ZERO_BUBBLE

POLICIES = ("dapple-a", "dapple-b", "gpipe")  # the earlier wins a tie, since it stashes less


class ScheduleSeconds(NamedTuple):
    """Seconds of a step under ``schedule``, infinite where none fits the memory."""

    seconds: float
    schedule: str


class FastestFound(NamedTuple):
    """The cheapest of several plans: its place (-1: none) and price, and how many were looked at, in order."""

    place: int
    price: ScheduleSeconds
    looked_at: int


def stage_cost_arrays(costs: Sequence[StageCosts]) -> Floats:
    """The rows of a plan's costs."""
    rows: Floats = np.array(
        [
            [
                c.forward_seconds,
                c.backward_seconds,
                c.send_forward_seconds,
                c.exposed_seconds,
                c.fixed_bytes,
                c.stash_bytes,
                c.working_bytes,
                c.weights_seconds,
            ]
            for c in costs
        ]
    ).T
    return rows


def fastest_schedule(rows: Floats, micro_batches: int, memory: float, schedule: str = "auto") -> ScheduleSeconds:
    """The best policy for these costs (or the price of ``schedule``), with D where memory asks for it.

    A schedule's name is checked before (``make_problem``).
    """
    if schedule not in (*POLICIES, "auto"):
        return _price_fixed(rows, micro_batches, memory, schedule)
    best = ScheduleSeconds(np.inf, "")
    for code, name in enumerate(POLICIES):
        if schedule in (name, "auto"):
            seconds, limit = policy_seconds(rows, micro_batches, memory, code)
            if seconds < best.seconds * (1 - 1e-9):
                best = ScheduleSeconds(seconds, name if limit == 0 else f"{name}:D={limit}")
    return best


def _price_fixed(rows: Floats, micro_batches: int, memory: float, schedule: str) -> ScheduleSeconds:
    nothing = ScheduleSeconds(np.inf, schedule)
    try:
        order, held = named_order(schedule, rows.shape[1], micro_batches)
    except ScheduleError:  # gpipe:D=4 of more than 4 micro-batches; a text of other stages
        return nothing
    room = memory - rows[4] - rows[6]
    short = held * rows[5] > room
    if short.any():
        limit = int((room[short] / rows[5][short]).min()) if (room > 0).all() else 0
        fewer = f"{schedule}:D={limit}"
        return _price_fixed(rows, micro_batches, memory, fewer) if schedule == ZERO_BUBBLE and limit > 0 else nothing
    weights = rows[7] if has_weights(order) else rows[7][:0]
    backward = rows[1] - rows[7] if len(weights) else rows[1]
    return ScheduleSeconds(step_seconds(order, rows[0], backward, weights, rows[2], rows[2], rows[3]), schedule)


@compiled
def policy_seconds(rows: Floats, micro_batches: int, memory: float, code: int) -> tuple[float, int]:
    """Seconds of one of POLICIES, and its D (0: memory does not limit it); infinite where it does not fit.

    D is the least of what the stages can hold, over those that would hold more than they can (DAPPLE, V.C).
    """
    stages = rows.shape[1]
    k = np.empty(stages, np.int64)
    limit = micro_batches
    for s in range(stages):
        wanted = stages - s if code == 0 else 2 * (stages - s) - 1 if code == 1 else micro_batches
        k[s] = min(wanted, micro_batches)
        room = memory - rows[4, s] - rows[6, s]
        if room < k[s] * rows[5, s]:
            limit = min(limit, int(room / rows[5, s])) if room > 0 else 0
    if limit < 1 or (code == 2 and limit < micro_batches):
        return np.inf, 0
    bounded = 0
    for s in range(stages):
        if k[s] > limit:
            k[s], bounded = limit, limit
    return _run(rows, k, micro_batches), bounded


@compiled
def _run(rows: Floats, warm: Integers, micro_batches: int) -> float:
    order = early_backward_order(warm, micro_batches)
    return float(step_seconds(order, rows[0], rows[1], rows[7][:0], rows[2], rows[2], rows[3]))


@compiled
def stage_costs_from_tables(t: CostTables, starts: Integers, places: Integers, stages: int) -> Floats:
    """The rows of a plan of the search."""
    rows = np.zeros((8, stages))
    n = len(t.working)
    for s in range(stages):
        first, end, p = starts[s], starts[s + 1] if s + 1 < stages else n, places[s]
        row, r = t.row[p], t.replicas[p]
        rows[0, s] = t.forward[row, end] - t.forward[row, first]
        rows[1, s] = t.backward[row, end] - t.backward[row, first]
        if s + 1 < stages:
            e = t.first[p]
            while t.following[e] != places[s + 1]:
                e += 1
            rows[2, s] = t.latency[e] + t.rate[e] * t.crossing[end]
        if t.exposed.size:
            rows[3, s] = t.exposed[t.exposed_class[p], first, end]
        else:
            rows[3, s] = t.ring[p] * (t.parameters[end] - t.parameters[first])
        rows[4, s] = fixed_bytes(t, first, end)
        rows[5, s] = stash_bytes(t, first, end) / r
        rows[7, s] = t.weights[row, end] - t.weights[row, first]
        rows[6, s] = work_bytes(t, first, end, t.working[first:end].max()) / r
    return rows


def simulate_found_plans(
    t: CostTables,
    bounds: Floats,
    starts: Integers,
    places: Integers,
    counts: Integers,
    ceiling: float,
    schedule: str,
    events: int,
) -> FastestFound:
    """Price plans (rows, by rising bound) until the next bound is no better than the best, or after ``events``."""
    if schedule in (*POLICIES, "auto"):
        codes = np.array([i for i, name in enumerate(POLICIES) if schedule in (name, "auto")], np.int64)
        index, seconds, code, limit, looked = _price_found(t, bounds, starts, places, counts, ceiling, codes, events)
        name = POLICIES[code] if limit == 0 else f"{POLICIES[code]}:D={limit}"
        return FastestFound(index, ScheduleSeconds(seconds, name), looked)
    best, index = ScheduleSeconds(ceiling, schedule), -1
    for i, bound in enumerate(bounds):
        if bound >= best.seconds:
            return FastestFound(index, best, i)
        rows = stage_costs_from_tables(t, starts[i], places[i], counts[i])
        found = fastest_schedule(rows, t.micro_batches, t.memory, schedule)
        if found.seconds < best.seconds * (1 - 1e-9):
            best, index = found, i
    return FastestFound(index, best, len(bounds))


@compiled
def _price_found(
    t: CostTables,
    bounds: Floats,
    starts: Integers,
    places: Integers,
    counts: Integers,
    ceiling: float,
    codes: Integers,
    events: int,
) -> tuple[int, float, int, int, int]:
    best, index, chosen, limit = ceiling, -1, 0, 0
    for i in range(len(bounds)):
        if bounds[i] >= best * (1 - 1e-9) or events <= 0:
            return index, best, chosen, limit, i
        rows = stage_costs_from_tables(t, starts[i], places[i], counts[i])
        for code in codes:
            seconds, held = policy_seconds(rows, t.micro_batches, t.memory, code)
            events -= 4 * counts[i] * t.micro_batches
            if seconds < best * (1 - 1e-9):
                best, index, chosen, limit = seconds, i, code, held
            if seconds <= bounds[i] * (1 + 1e-9):
                break  # no policy can do better
    return index, best, chosen, limit, len(bounds)
