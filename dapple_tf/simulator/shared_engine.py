"""Compiled discrete-event simulation of a schedule whose transfers and rings share network interfaces.

The rule is that of the module ``contention``; where nothing is shared, ``engine`` computes the same times faster.

Actions need no events: once the ends of its inputs are known, an action's start and end are computed at once. The only
events are those of flows that share an interface: the end of a flow's latency, and of its transfer, in order of time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.simulator.compiled import Floats, Integers, compiled, compiled_part
from dapple_tf.simulator.contention import Flows
from dapple_tf.simulator.early_backward import STEADY_MARGIN
from dapple_tf.simulator.engine import Run, step_seconds
from dapple_tf.simulator.event_tree import earliest_leaf, make_events, set_event
from dapple_tf.simulator.order import (
    BACKWARD,
    FORWARD,
    KIND_MASK,
    KIND_SHIFT,
    MICRO_BATCH_MASK,
    NONE,
    STAGE_SHIFT,
    WEIGHTS,
    Order,
)
from dapple_tf.simulator.rings import Rings

_ALMOST = 1 - 1e-9  # of seconds that were added and subtracted again
_IDLE, _LATENCY, _EMPTY, _MOVES, _HALTED, _HALTED_LATENCY = range(6)  # phases of a flow; an empty one has no bytes


class Seconds(NamedTuple):
    """Seconds of each stage and micro-batch: arrays [S, M], or [S, 1] where micro-batches are alike.

    As in ``engine.run``; ``weights`` is 0 where weight gradients are no actions of their own. ``forward_together`` and
    ``backward_together``: whether the result of an action leaves with that of the next micro-batch.
    """

    forward: Floats
    backward: Floats
    weights: Floats
    send_forward: Floats
    send_backward: Floats
    forward_together: NDArray[np.bool_]
    backward_together: NDArray[np.bool_]


# Columns of the state of flows, [3 S, 6]. _BEGIN: when the transfer or ring began. _SECONDS: what it takes alone.
# _LEFT: what the bytes that were left at the time _SINCE take alone. _FACTOR: how many times more slowly than alone
# they move since then. _DUE: when the phase ends.
_BEGIN, _SECONDS, _LEFT, _SINCE, _FACTOR, _DUE = range(6)
# Columns of the state as integers, [3 S, 3]: the phase, whether it ends later than a flow alone, and its leaf in
# the tree of events.
_PHASE, _SLOWED, _LEAF = range(3)


@compiled
def _begin(
    f: Floats, g: Integers, events: Floats, gate: Floats, flow: int, begin: float, latency: float, seconds: float
) -> None:
    """Let a flow that takes ``seconds`` alone begin."""
    wait = min(latency, seconds)
    g[flow, _PHASE], g[flow, _SLOWED] = _LATENCY, 0
    f[flow, _BEGIN], f[flow, _SECONDS] = begin, seconds
    f[flow, _LEFT], f[flow, _DUE] = seconds - wait, begin + wait
    set_event(events, g[flow, _LEAF], min(begin + wait, gate[flow]))


@compiled_part
def _factor(counts: Integers, first: Integers, direction: Integers, demand: Floats, flow: int) -> float:
    """Return how many times more slowly than alone a flow moves."""
    factor = 1.0
    for use in range(first[flow], first[flow + 1]):
        factor = max(factor, counts[direction[use]] * demand[use])
    return factor


@compiled
def _count(
    f: Floats,
    g: Integers,
    events: Floats,
    gate: Floats,
    counts: Integers,
    first: Integers,
    direction: Integers,
    demand: Floats,
    near_first: Integers,
    near: Integers,
    flow: int,
    change: int,
    now: float,
) -> None:
    """Add a flow to those that move (``change`` 1) or remove it (-1), and recompute how slowly those near it do."""
    for use in range(first[flow], first[flow + 1]):
        counts[direction[use]] += change
    for entry in range(near_first[flow], near_first[flow + 1]):
        other = near[entry]
        if g[other, _PHASE] == _MOVES:
            factor = _factor(counts, first, direction, demand, other)
            if factor != f[other, _FACTOR]:
                left = max(0.0, f[other, _LEFT] - (now - f[other, _SINCE]) / f[other, _FACTOR])
                f[other, _LEFT], f[other, _SINCE], f[other, _FACTOR] = left, now, factor
                f[other, _DUE] = now + left * factor
                g[other, _SLOWED] = 1
                set_event(events, g[other, _LEAF], min(f[other, _DUE], gate[other]))


@compiled
def _move(
    f: Floats,
    g: Integers,
    events: Floats,
    gate: Floats,
    counts: Integers,
    first: Integers,
    direction: Integers,
    demand: Floats,
    near_first: Integers,
    near: Integers,
    flow: int,
    now: float,
) -> None:
    """Let a flow move after its latency, if it has anything to move."""
    left = f[flow, _LEFT]
    if left <= 0.0:
        g[flow, _PHASE] = _EMPTY
        f[flow, _DUE] = now
        set_event(events, g[flow, _LEAF], min(now, gate[flow]))
        return
    g[flow, _PHASE] = _MOVES
    f[flow, _FACTOR] = 1.0
    _count(f, g, events, gate, counts, first, direction, demand, near_first, near, flow, 1, now)
    factor = _factor(counts, first, direction, demand, flow)
    f[flow, _SINCE], f[flow, _FACTOR] = now, factor
    if factor == 1.0 and g[flow, _SLOWED] == 0:
        f[flow, _DUE] = f[flow, _BEGIN] + f[flow, _SECONDS]
    else:
        f[flow, _DUE] = now + left * factor
        g[flow, _SLOWED] = 1
    set_event(events, g[flow, _LEAF], min(f[flow, _DUE], gate[flow]))


@compiled_part
def _halt(f: Floats, g: Integers, events: Floats, flow: int, now: float) -> bool:
    """Interrupt a flow until ``_resume``; return whether it moved. ``_LEFT`` is then what is left to move."""
    moved = g[flow, _PHASE] == _MOVES
    if moved:
        f[flow, _LEFT] = max(0.0, f[flow, _LEFT] - (now - f[flow, _SINCE]) / f[flow, _FACTOR])
        g[flow, _PHASE], g[flow, _SLOWED] = _HALTED, 1
    else:
        g[flow, _PHASE], f[flow, _SINCE] = _HALTED_LATENCY, f[flow, _DUE] - now
    f[flow, _DUE] = np.inf
    set_event(events, g[flow, _LEAF], np.inf)
    return bool(moved)


@compiled_part
def _resume_latency(f: Floats, g: Integers, events: Floats, flow: int, now: float) -> None:
    """Let a flow go on that was interrupted during its latency."""
    wait = f[flow, _SINCE]
    g[flow, _PHASE], f[flow, _DUE] = _LATENCY, now + wait
    set_event(events, g[flow, _LEAF], now + wait)
    if f[flow, _SECONDS] - f[flow, _LEFT] - wait <= 0.0:  # nothing of the latency had passed
        f[flow, _BEGIN] = now
    else:
        g[flow, _SLOWED] = 1


@compiled
def _free_leaf(busy: Integers, g: Integers, events: Floats, leaf: int, last: int) -> None:
    """Remove the flow at a leaf; the one at the ``last`` leaf moves there."""
    moved, time = busy[last], events[len(events) // 2 + last]
    busy[leaf], g[moved, _LEAF] = moved, leaf
    set_event(events, leaf, time)
    set_event(events, last, np.inf)


@compiled_part
def _action_seconds(seconds: Seconds, kind: int, s: int, column: int) -> float:
    """Return the seconds of an action of stage ``s``."""
    if kind == FORWARD:
        return float(seconds.forward[s, column])
    if kind == WEIGHTS:
        return float(seconds.weights[s, column])
    if kind == BACKWARD:
        return float(seconds.backward[s, column])
    return float(seconds.backward[s, column] - seconds.weights[s, column])


@compiled
def run_shared(
    order: Order,
    seconds: Seconds,
    flows: Flows,
    rings: Rings,
    splits: bool,
    keep: bool,
    ceiling: float,
    extrapolate: bool,
) -> tuple[Run, Floats]:
    """Return what ``engine.run`` returns, and when the AllReduces of each stage end [S] (NaN: never), in seconds.

    ``splits``: whether some weight gradients are actions of their own. ``keep``: whether the times of actions and
    transfers are wanted; else their arrays have size 0, or mean nothing. ``ceiling``: the simulation
    stops once the end of a worker's action, plus the seconds of its remaining actions and of the least AllReduce of its
    stages, reaches these seconds. ``extrapolate``: it also stops where the period of the steady phase shows that the
    step will probably reach them, as in ``early_backward_seconds``, whose orders it is for.

    The AllReduces of one worker's stages run one after the other, in the order in which their gradients are complete:
    what is left of a stage's rings when its last gradients are there waits for those of the worker's stages before it.
    Results that leave together are one transfer, with the sums of their latencies and of their seconds.
    """
    actions, worker_of, micro_batches = order.actions, order.worker_of, order.micro_batches
    (workers, length), stages = actions.shape, len(worker_of)
    kept, kept_w = stages if keep else 0, stages if keep and splits else 0
    start_f = np.full((kept, micro_batches), np.nan)
    end_f = np.full((kept, micro_batches), np.nan)
    start_b = np.full((kept, micro_batches), np.nan)
    end_b = np.full((kept, micro_batches), np.nan)
    start_w = np.full((kept_w, micro_batches), np.nan)
    end_w = np.full((kept_w, micro_batches), np.nan)
    sent = np.full((2, kept, micro_batches), np.nan)  # starts of transfers, forward and backward
    turned = np.zeros(micro_batches, np.bool_)  # whether the last stage's forward has ended
    has_inputs = np.zeros((stages if splits else 0, micro_batches), np.bool_)  # whether a backward has ended
    arrived = np.full((2, stages, micro_batches), np.nan)
    times = start_f, end_f, start_b, end_b, start_w, end_w, sent[0], arrived[0], sent[1], arrived[1]
    last_start, ring_end = np.zeros(stages), np.full(stages, np.nan)
    missing = np.zeros(stages, np.int64)  # gradients that a stage's rings wait for
    columns = seconds.forward.shape[1]
    left = np.full(workers, np.inf)  # seconds that a worker still needs: its actions, and the least of its AllReduces
    for s in range(stages):
        left[worker_of[s]] = min(left[worker_of[s]], rings.exposed[s])
    for w in range(workers):
        for code in actions[w]:
            if code != NONE:
                s, column = code >> STAGE_SHIFT, code & MICRO_BATCH_MASK if columns > 1 else 0
                left[w] += _action_seconds(seconds, (code >> KIND_SHIFT) & KIND_MASK, s, column)
                missing[s] += (code >> KIND_SHIFT) & KIND_MASK != FORWARD
    head = np.zeros(workers, np.int64)
    now = np.zeros(workers)
    free = np.zeros((2, stages))  # when each channel is free, of those whose transfer has no flow
    # The transfers that wait for a channel, in the order of its producer: the time of each, its last micro-batch, how
    # many it has, and its seconds. And the last micro-batch and the number of the one that the channel is busy with.
    ready = np.empty((2, stages, micro_batches))
    length_of = np.empty((2, stages, micro_batches))
    batch = np.empty((2, stages, micro_batches), np.int32)
    group = np.empty((2, stages, micro_batches), np.int32)
    under_way, under_way_group = np.zeros((2, stages), np.int64), np.zeros((2, stages), np.int64)
    queued, begun = np.zeros((2, stages), np.int64), np.zeros((2, stages), np.int64)
    unsent, unsent_seconds = np.zeros(workers, np.int64), np.zeros(workers)  # results that leave with a later one
    flow_count = 3 * stages
    f, g = np.zeros((flow_count, 6)), np.zeros((flow_count, 3), np.int64)
    first, direction, demand, latency = flows.first, flows.direction, flows.demand, flows.latency
    near_first, near = flows.near_first, flows.near
    sharing = 0  # flows that use some direction
    for flow in range(flow_count):
        if first[flow] < first[flow + 1]:
            sharing += 1
    busy, busy_count = np.zeros(sharing, np.int64), 0  # the flows that are not idle
    events = make_events(sharing)
    counts = np.zeros(flows.directions, np.int64)  # the flows that move in each direction
    ring = np.zeros(stages, np.int64)  # the ring of each stage that runs
    previous = np.full(stages, -1, np.int64)  # the stage of the same worker whose rings come before
    following = np.full(stages, -1, np.int64)
    newest = np.full(workers, -1, np.int64)
    gate = np.full(flow_count, np.inf)  # of a ring: end of the last gradients, where it must then wait for others
    complete = np.zeros(stages)  # end of the last gradients
    waiting, waits = np.arange(workers)[::-1].copy(), np.ones(workers, np.bool_)
    count, done, time = workers, 0, 0.0
    settled, steady = 2 * stages + 2, 0.0  # the steady phase has begun by then; as many more give its period
    while True:
        while count:
            count -= 1
            w = int(waiting[count])
            waits[w] = False
            while head[w] < length:
                code = actions[w, head[w]]
                if code == NONE:
                    break
                s, kind, m = code >> STAGE_SHIFT, (code >> KIND_SHIFT) & KIND_MASK, code & MICRO_BATCH_MASK
                column = m if columns > 1 else 0
                start, way, target = now[w], -1, -1
                own = _action_seconds(seconds, kind, s, column)
                if kind == FORWARD:
                    if s:
                        arrival = arrived[0, s - 1, m]
                        if np.isnan(arrival):
                            break
                        start = max(start, arrival)
                    end = start + own
                    if keep:
                        start_f[s, m], end_f[s, m] = start, end
                    if s + 1 < stages:
                        way, target = 0, s + 1
                    else:
                        turned[m] = True
                elif kind == WEIGHTS:
                    if not has_inputs[s, m]:
                        break
                    end = start + own
                    if keep:
                        start_w[s, m], end_w[s, m] = start, end
                else:
                    if s + 1 < stages:
                        arrival = arrived[1, s, m]  # which is after this stage's forward
                        if np.isnan(arrival):
                            break
                        start = max(start, arrival)
                    elif not turned[m]:
                        break
                    end = start + own
                    if keep:
                        start_b[s, m], end_b[s, m] = start, end
                    if splits:
                        has_inputs[s, m] = True
                    if s:
                        way, target = 1, s - 1
                now[w] = end
                head[w] += 1
                done += 1
                left[w] -= own
                if extrapolate and s == 0 and kind == BACKWARD:
                    if m == settled:
                        steady = end
                    elif m == 2 * settled:
                        period = (end - steady) / settled
                        if end + period * (micro_batches - 1 - m) * STEADY_MARGIN >= ceiling:
                            left[w] = np.inf
                if end + left[w] * _ALMOST >= ceiling:
                    return (*times, done), ring_end
                if way >= 0:
                    boundary, to = min(s, target), worker_of[target]
                    if to == w:
                        arrived[way, boundary, m] = end
                        if keep:
                            sent[way, boundary, m] = end
                    else:
                        unsent[w] += 1
                        if way == 0:
                            unsent_seconds[w] += seconds.send_forward[boundary, column]
                            held = seconds.forward_together[s, column]
                        else:
                            unsent_seconds[w] += seconds.send_backward[boundary, column]
                            held = seconds.backward_together[s, column]
                        if not held:
                            flow, taken = way * stages + boundary, unsent_seconds[w]
                            if first[flow] == first[flow + 1]:
                                begin = max(end, free[way, boundary])
                                free[way, boundary] = begin + taken
                                for i in range(unsent[w]):
                                    arrived[way, boundary, m - i] = free[way, boundary]
                                    if keep:
                                        sent[way, boundary, m - i] = begin
                                if not waits[to]:
                                    waiting[count], waits[to] = to, True
                                    count += 1
                            elif g[flow, _PHASE] == _IDLE:
                                begin = max(end, free[way, boundary])
                                under_way[way, boundary], under_way_group[way, boundary] = m, unsent[w]
                                busy[busy_count], g[flow, _LEAF] = flow, busy_count
                                busy_count += 1
                                _begin(f, g, events, gate, flow, begin, latency[flow] * unsent[w], taken)
                            else:
                                entry = queued[way, boundary]
                                ready[way, boundary, entry], length_of[way, boundary, entry] = end, taken
                                batch[way, boundary, entry], group[way, boundary, entry] = m, unsent[w]
                                queued[way, boundary] += 1
                            unsent[w], unsent_seconds[w] = 0, 0.0
                if kind != FORWARD:
                    missing[s] -= 1
                    if missing[s] == 0:
                        complete[s], last_start[s] = end, start
                        before = newest[w]
                        newest[w], previous[s] = s, before
                        flow = 2 * stages + s
                        if first[flow] == first[flow + 1]:  # as are those of the worker's other stages
                            begin = end
                            if before >= 0:
                                begin = max(end, ring_end[before])
                            ring_end[s] = begin + rings.exposed[s]
                        else:
                            ring[s] = rings.first[s]
                            begin = max(start, end - rings.before[ring[s]])
                            busy[busy_count], g[flow, _LEAF] = flow, busy_count
                            busy_count += 1
                            if before >= 0 and np.isnan(ring_end[before]):
                                following[before], gate[flow] = s, end
                            _begin(f, g, events, gate, flow, begin, latency[flow], rings.seconds[ring[s]])
        # The next event of a flow.
        if events[1] == np.inf:
            break
        time = max(time, events[1])
        chosen = earliest_leaf(events)
        flow = busy[chosen]
        way, s = flow // stages, flow % stages
        if gate[flow] <= f[flow, _DUE]:
            gate[flow] = np.inf
            if _halt(f, g, events, flow, time):
                _count(f, g, events, gate, counts, first, direction, demand, near_first, near, flow, -1, time)
            continue
        if g[flow, _PHASE] == _LATENCY:
            _move(f, g, events, gate, counts, first, direction, demand, near_first, near, flow, time)
            continue
        if g[flow, _PHASE] == _MOVES:
            _count(f, g, events, gate, counts, first, direction, demand, near_first, near, flow, -1, time)
        g[flow, _PHASE] = _IDLE
        if way == 2:
            ring[s] += 1
            if ring[s] < rings.first[s + 1]:
                begin = max(time, max(last_start[s], complete[s] - rings.before[ring[s]]))
                _begin(f, g, events, gate, flow, begin, latency[flow], rings.seconds[ring[s]])
                continue
            busy_count -= 1
            _free_leaf(busy, g, events, chosen, busy_count)
            gate[flow], ring[s] = np.inf, NONE
            if previous[s] >= 0 and np.isnan(ring_end[previous[s]]):
                continue  # it ends with those of the worker's stages before
            while s >= 0 and ring[s] == NONE:
                ring_end[s] = max(time, complete[s])
                s = following[s]
            if s >= 0:
                flow = 2 * stages + s
                gate[flow] = np.inf
                set_event(events, g[flow, _LEAF], f[flow, _DUE])
                if g[flow, _PHASE] == _HALTED:
                    _move(f, g, events, gate, counts, first, direction, demand, near_first, near, flow, time)
                elif g[flow, _PHASE] == _HALTED_LATENCY:
                    _resume_latency(f, g, events, flow, time)
            continue
        free[way, s] = time
        for m in range(under_way[way, s] - under_way_group[way, s] + 1, under_way[way, s] + 1):
            arrived[way, s, m] = time
            if keep:
                sent[way, s, m] = f[flow, _BEGIN]
        if begun[way, s] < queued[way, s]:
            entry = begun[way, s]
            begun[way, s] += 1
            under_way[way, s], under_way_group[way, s] = batch[way, s, entry], group[way, s, entry]
            begin = max(time, ready[way, s, entry])
            _begin(f, g, events, gate, flow, begin, latency[flow] * group[way, s, entry], length_of[way, s, entry])
        else:
            busy_count -= 1
            _free_leaf(busy, g, events, chosen, busy_count)
        waiting[0], waits[worker_of[s + 1 - way]] = worker_of[s + 1 - way], True
        count = 1
    return (*times, done), ring_end


@compiled
def uniform_seconds(
    forward: Floats, backward: Floats, weights: Floats, send_forward: Floats, send_backward: Floats
) -> Seconds:
    """Return the seconds of micro-batches that are alike, whose results leave alone; the arguments are of each stage.

    ``weights`` may be of size 0.
    """
    stages = len(forward)
    own_weights = weights if len(weights) else np.zeros(stages)
    alone = np.zeros((stages, 1), np.bool_)
    return Seconds(
        forward.reshape(stages, 1),
        backward.reshape(stages, 1),
        own_weights.reshape(stages, 1),
        send_forward.reshape(stages, 1),
        send_backward.reshape(stages, 1),
        alone,
        alone,
    )


@compiled
def shared_step_seconds(
    order: Order,
    forward: Floats,
    backward: Floats,
    weights: Floats,
    send_forward: Floats,
    send_backward: Floats,
    rings: Rings,
    flows: Flows,
    ceiling: float,
    extrapolate: bool,
) -> tuple[float, int]:
    """Return the end of a step whose flows share interfaces, and the number of actions simulated.

    ``forward`` to ``send_backward``: as in ``engine.step_seconds``, which is the same without contention, and never
    more. ``rings``: without overlap ``whole_rings(exposed)``. The end is infinite for an order that deadlocks, and
    where the simulation ends early, as the step would not end before ``ceiling``; ``extrapolate``: or likely would not.
    """
    if flows.directions == 0:
        end = step_seconds(order, forward, backward, weights, send_forward, send_backward, rings.exposed)
        return end, order.actions.size
    seconds = uniform_seconds(
        np.ascontiguousarray(forward),
        np.ascontiguousarray(backward),
        np.ascontiguousarray(weights),
        np.ascontiguousarray(send_forward),
        np.ascontiguousarray(send_backward),
    )
    found, ends = run_shared(order, seconds, flows, rings, len(weights) > 0, False, ceiling, extrapolate)
    return (np.inf if np.isnan(ends).any() else float(ends.max())), found[-1]
