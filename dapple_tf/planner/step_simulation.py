"""Simulate many plans under each scheduling policy in compiled code, and find the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.cost_tables import CostTables
from dapple_tf.planner.search import SearchResult
from dapple_tf.planner.table_lookups import fixed_bytes, stage_seconds, stash_bytes, transfer_seconds, working_bytes
from dapple_tf.simulator.compiled import Floats, Integers, compiled
from dapple_tf.simulator.contention import Flows, measure_flows, no_flows
from dapple_tf.simulator.engine import step_seconds
from dapple_tf.simulator.held_stash import worker_peaks
from dapple_tf.simulator.interrupts import check_stop, stop_flag
from dapple_tf.simulator.named_orders import named_order
from dapple_tf.simulator.order import Order, early_backward_order
from dapple_tf.simulator.rings import Rings, layer_rings, make_rings, whole_rings
from dapple_tf.simulator.shared_engine import shared_step_seconds
from dapple_tf.timeline.stage_costs import StageCosts
from graph_passes.errors import ScheduleError
from graph_passes.schedules.spec import HANDCRAFTED_ZERO_BUBBLE, ScheduleSpec, warm_up

POLICIES = ("dapple-a", "dapple-b", "gpipe")  # of equally fast policies the first is taken: it stashes least
# Schedules that are simulated in place of ``zb-auto`` while planning, by the stages of a device: one, or two in a V.
_SUBSTITUTES = {1: HANDCRAFTED_ZERO_BUBBLE, 2: ("zb-v", "dualpipe-v")}
_GPIPE = POLICIES.index("gpipe")
CONTENTION_FACTOR = 25  # how many times longer a simulation with contention takes, about


class StageCostArrays(NamedTuple):
    """The costs of a plan's stages as arrays [stages]: seconds of one micro-batch, bytes of one device."""

    forward_seconds: Floats
    backward_seconds: Floats
    send_seconds: Floats  # one transfer to the next stage, or back; 0 for the last stage
    exposed_seconds: Floats  # AllReduce after the last gradients, once a step
    fixed_bytes: Floats  # weights, gradients, optimizer slots
    stash_bytes: Floats  # of each micro-batch in flight
    working_bytes: Floats
    weights_seconds: Floats  # the part of backward for gradients of weights, if the schedule runs it on its own; else 0


class ScheduleSeconds(NamedTuple):
    """Seconds of a step under ``schedule``; infinite if no schedule fits the memory."""

    seconds: float
    schedule: str


class FastestFound(NamedTuple):
    """The fastest of several plans: its row (-1: none) and seconds, and how many plans were simulated, in order."""

    row: int
    best: ScheduleSeconds
    simulated: int


def stage_cost_arrays(costs: Sequence[StageCosts]) -> StageCostArrays:
    """Return the costs of a plan's stages as arrays."""
    return StageCostArrays(
        np.array([c.forward_seconds for c in costs]),
        np.array([c.backward_seconds for c in costs]),
        np.array([c.send_forward_seconds for c in costs]),
        np.array([c.exposed_seconds for c in costs]),
        np.array([c.fixed_bytes for c in costs]),
        np.array([c.stash_bytes for c in costs]),
        np.array([c.working_bytes for c in costs]),
        np.array([c.weights_seconds for c in costs]),
    )


@lru_cache(maxsize=1024)
def policy_warm_ups(stages: int, micro_batches: int) -> Integers:
    """Return K_i of every policy, [policies, stages], without a limit by memory (not to be written to)."""
    return np.array([warm_up(policy, stages, micro_batches) for policy in POLICIES], np.int64)


class Network(NamedTuple):
    """The ``flows`` of a plan's stages, which share the servers' interfaces, and the ``rings`` of their AllReduces."""

    flows: Flows
    rings: Rings


def make_network(flows: Flows | None, costs: Sequence[StageCosts]) -> Network | None:
    """Return the flows, and the rings of stages with these costs; None without ``flows``."""
    return None if flows is None else Network(flows, make_rings(costs))


def fastest_schedule(
    costs: StageCostArrays,
    micro_batches: int,
    memory_bytes: float,
    schedule: str = "auto",
    network: Network | None = None,
    ceiling: float = np.inf,
) -> ScheduleSeconds:
    """Return the fastest policy for these stages, or ``schedule``, with its seconds and, where memory limits it, D.

    ``network``: for the seconds with contention; None for those without. ``ceiling``: seconds; what is not below them
    is infinite. A step is simulated without contention first, which takes less time and is never slower.

    Of policies that are equally fast but for rounding the first of ``POLICIES`` is taken. A schedule's name must be
    valid (``make_problem`` checks it).
    """
    if schedule != "auto" and ScheduleSpec.parse(schedule).is_searched:
        # Reason: the search takes far longer. It starts from all of these, so what it finds for the plan is no slower.
        names = (schedule, *find_substitutes(schedule))
        found = [_named_schedule_seconds(costs, micro_batches, memory_bytes, name, network, ceiling) for name in names]
        return ScheduleSeconds(min(entry.seconds for entry in found), schedule)
    if schedule not in (*POLICIES, "auto"):
        return _named_schedule_seconds(costs, micro_batches, memory_bytes, schedule, network, ceiling)
    warm_ups = policy_warm_ups(len(costs.forward_seconds), micro_batches)
    best = ScheduleSeconds(ceiling, "")
    for policy, name in enumerate(POLICIES):
        if schedule in (name, "auto"):
            arguments = costs, warm_ups[policy], micro_batches, memory_bytes, policy != _GPIPE
            seconds, limit = policy_seconds(*arguments)
            if network is not None and seconds < best.seconds * (1 - 1e-9):
                seconds, limit, _ = shared_policy_seconds(*arguments, network, best.seconds, False)
            if seconds < best.seconds * (1 - 1e-9):
                best = ScheduleSeconds(seconds, _limited(name, limit))
    return best if best.schedule else ScheduleSeconds(np.inf, "")


def _limited(policy: str, limit: int) -> str:
    """Return the schedule's name; a ``limit`` of 0 is none."""
    return policy if limit == 0 else f"{policy}:D={limit}"


def _named_schedule_seconds(
    costs: StageCostArrays,
    micro_batches: int,
    memory_bytes: float,
    schedule: str,
    network: Network | None,
    ceiling: float,
) -> ScheduleSeconds:
    """Return the seconds of a schedule that is not one of ``POLICIES``; memory may limit ``zb-h1`` and ``zb-h2``."""
    nothing = ScheduleSeconds(np.inf, schedule)
    try:
        order, in_flight = named_order(schedule, len(costs.forward_seconds), micro_batches)
    except ScheduleError:  # gpipe:D=4 of more than 4 micro-batches; a schedule for another number of stages
        return nothing
    if len(order.actions) < len(costs.forward_seconds):
        peaks = worker_peaks(order, costs.fixed_bytes, costs.stash_bytes, costs.working_bytes)
        fits = (peaks <= memory_bytes).all()
        return ScheduleSeconds(_seconds_below(order, costs, network, ceiling), schedule) if fits else nothing
    room = memory_bytes - costs.fixed_bytes - costs.working_bytes
    short = in_flight * costs.stash_bytes > room
    if short.any():
        limit = int((room[short] / costs.stash_bytes[short]).min()) if (room > 0).all() else 0
        if schedule not in HANDCRAFTED_ZERO_BUBBLE or limit < 1:
            return nothing
        return _named_schedule_seconds(costs, micro_batches, memory_bytes, f"{schedule}:D={limit}", network, ceiling)
    return ScheduleSeconds(_seconds_below(order, costs, network, ceiling), schedule)


def _seconds_below(order: Order, costs: StageCostArrays, network: Network | None, ceiling: float) -> float:
    """Return the seconds of a step; infinity if they are not below ``ceiling``."""
    seconds = order_seconds(order, costs) if network is None or ceiling < np.inf else 0.0
    if network is not None and seconds < ceiling:
        seconds = order_seconds(order, costs, network, ceiling)
    return seconds if seconds < ceiling else np.inf


def find_substitutes(schedule: str) -> tuple[str, ...]:
    """Return the schedules for which planners cut stages instead of ``zb-auto``: of as many stages per device."""
    chunks = ScheduleSpec.parse(schedule).chunks
    return _SUBSTITUTES.get(chunks, ()) if chunks else ()


def order_seconds(
    order: Order, costs: StageCostArrays, network: Network | None = None, ceiling: float = np.inf
) -> float:
    """Return the seconds of a step whose workers run their actions in this ``order``; ``network``: for contention.

    With contention they may be infinite where they are not below ``ceiling``.
    """
    forward, backward, weights = costs.forward_seconds, costs.backward_seconds, costs.weights_seconds
    send = costs.send_seconds
    if network is None:
        return float(step_seconds(order, forward, backward, weights, send, send, costs.exposed_seconds))
    end, _ = shared_step_seconds(
        order, forward, backward, weights, send, send, network.rings, network.flows, ceiling, False
    )
    return float(end)


@compiled
def policy_seconds(
    costs: StageCostArrays, warm_up: Integers, micro_batches: int, memory_bytes: float, limitable: bool
) -> tuple[float, int]:
    """Return the seconds of a step under a policy with this ``warm_up`` (K_i), and D; 0 if memory does not limit it.

    D is the least number of micro-batches that a stage can hold, over the stages that cannot hold K_i (DAPPLE, section
    V.C). Infinite if a stage cannot hold one, or if the policy is not ``limitable`` (gpipe) and memory limits it.
    """
    limit = _memory_limit(costs, warm_up, micro_batches, memory_bytes)
    if limit < 1 or (limit < micro_batches and not limitable):
        return np.inf, 0
    limited = limit if warm_up.max() > limit else 0
    order = early_backward_order(np.minimum(warm_up, limit), micro_batches)
    send, no_weights = costs.send_seconds, costs.weights_seconds[:0]
    seconds = step_seconds(
        order, costs.forward_seconds, costs.backward_seconds, no_weights, send, send, costs.exposed_seconds
    )
    return float(seconds), limited


@compiled
def shared_policy_seconds(
    costs: StageCostArrays,
    warm_up: Integers,
    micro_batches: int,
    memory_bytes: float,
    limitable: bool,
    network: Network,
    ceiling: float,
    extrapolate: bool,
) -> tuple[float, int, int]:
    """Return what ``policy_seconds`` returns, with contention, and the number of actions simulated.

    The seconds may be infinite where they are not below ``ceiling``. ``extrapolate``: see ``shared_step_seconds``; for
    a constant, Numba would compile the simulation again.
    """
    limit = _memory_limit(costs, warm_up, micro_batches, memory_bytes)
    if limit < 1 or (limit < micro_batches and not limitable):
        return np.inf, 0, 0
    limited = limit if warm_up.max() > limit else 0
    order = early_backward_order(np.minimum(warm_up, limit), micro_batches)
    send, no_weights = costs.send_seconds, costs.weights_seconds[:0]
    seconds, actions = shared_step_seconds(
        order,
        costs.forward_seconds,
        costs.backward_seconds,
        no_weights,
        send,
        send,
        network.rings,
        network.flows,
        ceiling,
        extrapolate,
    )
    return float(seconds), limited, actions


@compiled
def _memory_limit(costs: StageCostArrays, warm_up: Integers, micro_batches: int, memory_bytes: float) -> int:
    """Return the least number of micro-batches that a stage which cannot hold K_i can hold; without any, all."""
    limit = micro_batches
    for s in range(len(warm_up)):
        room = memory_bytes - costs.fixed_bytes[s] - costs.working_bytes[s]
        if room < warm_up[s] * costs.stash_bytes[s]:
            limit = min(limit, int(room / costs.stash_bytes[s])) if room > 0 else 0
    return limit


@compiled
def stage_costs_from_tables(t: CostTables, starts: Integers, placements: Integers, stages: int) -> StageCostArrays:
    """Return the costs of a plan that the search found: ``starts`` and ``placements`` of its stages."""
    rows = np.zeros((8, stages))
    costs = StageCostArrays(rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7])
    blocks = len(t.working_bytes)
    for s in range(stages):
        first, end, p = starts[s], starts[s + 1] if s + 1 < stages else blocks, placements[s]
        seconds = stage_seconds(t, first, end, p)
        costs.forward_seconds[s], costs.backward_seconds[s] = seconds.forward, seconds.backward
        costs.weights_seconds[s], costs.exposed_seconds[s] = seconds.weights, seconds.exposed
        if s + 1 < stages:
            transition = t.first_transition[p]
            while t.next_placement[transition] != placements[s + 1]:
                transition += 1
            costs.send_seconds[s] = transfer_seconds(t, transition, end)
        costs.fixed_bytes[s] = fixed_bytes(t, first, end)
        costs.stash_bytes[s] = stash_bytes(t, first, end) / t.replicas[p]
        costs.working_bytes[s] = working_bytes(t, first, end, t.working_bytes[first:end].max()) / t.replicas[p]
    return costs


@compiled
def network_from_tables(t: CostTables, starts: Integers, placements: Integers, costs: StageCostArrays) -> Network:
    """Return the flows and rings of a plan that the search found; ``costs``: of its stages."""
    stages = len(costs.forward_seconds)
    offsets = np.zeros(stages + 1, np.int64)
    for s in range(stages):
        p = placements[s]
        offsets[s + 1] = offsets[s] + t.server_offsets[p + 1] - t.server_offsets[p]
    servers = np.empty(offsets[stages], np.int64)
    for s in range(stages):
        p = placements[s]
        servers[offsets[s] : offsets[s + 1]] = t.servers[t.server_offsets[p] : t.server_offsets[p + 1]]
    cuts = np.empty(len(servers) + stages, np.int64)  # equal rows
    for s in range(stages):
        for i in range(offsets[s], offsets[s + 1] + 1):
            cuts[i + s] = i - offsets[s]
    flows = measure_flows(servers, offsets, cuts, np.ones(stages - 1, np.bool_), t.links)
    if t.layer_gradients.size == 0:
        return Network(flows, whole_rings(costs.exposed_seconds))
    gradients, bounds = np.empty((stages, t.layer_gradients.shape[1])), np.empty(stages + 1, np.int64)
    latency, per_byte = np.empty(stages), np.empty(stages)
    for s in range(stages):
        p = placements[s]
        gradients[s] = t.layer_gradients[t.seconds_row[p]]
        bounds[s] = t.positions[starts[s]]
        latency[s], per_byte[s] = t.allreduce_latency[p], t.allreduce_seconds_per_byte[p]
    bounds[stages] = t.positions[len(t.positions) - 1]
    return Network(
        flows, layer_rings(gradients, t.layer_parameter_bytes, bounds, latency, per_byte, costs.exposed_seconds)
    )


def simulate_found_plans(
    tables: CostTables, found: SearchResult, ceiling: float, schedule: str, max_events: int, *, contention: bool
) -> FastestFound:
    """Return the fastest plan below ``ceiling`` seconds, simulated under ``schedule`` or, for "auto", every policy.

    With ``contention`` a plan is simulated without it first, which takes less time and is never slower.

    Plans are simulated by rising score, which must be a lower bound of their step. It ends where the next bound shows
    that no later plan is faster, or after ``max_events`` simulated events.
    """
    if schedule in (*POLICIES, "auto"):
        policies = np.array([i for i, name in enumerate(POLICIES) if schedule in (name, "auto")], np.int64)
        longest = found.starts.shape[1]
        warm_ups = np.zeros((longest + 1, len(POLICIES), longest), np.int64)
        for stages in np.unique(found.stages):
            warm_ups[stages, :, :stages] = policy_warm_ups(int(stages), tables.micro_batches)
        index, seconds, policy, limit, simulated = _simulate_policies(
            tables,
            found.scores,
            found.starts,
            found.placements,
            found.stages,
            warm_ups,
            policies,
            ceiling,
            max_events,
            contention,
            False,
            stop_flag(),
        )
        check_stop()
        return FastestFound(index, ScheduleSeconds(seconds, _limited(POLICIES[policy], limit)), simulated)
    best, index = ScheduleSeconds(ceiling, schedule), -1
    for i, bound in enumerate(found.scores):
        if bound >= best.seconds:
            return FastestFound(index, best, i)
        costs = stage_costs_from_tables(tables, found.starts[i], found.placements[i], found.stages[i])
        new = fastest_schedule(costs, tables.micro_batches, tables.memory_bytes, schedule)
        if contention and new.seconds < best.seconds * (1 - 1e-9):
            network = network_from_tables(tables, found.starts[i], found.placements[i], costs)
            new = fastest_schedule(costs, tables.micro_batches, tables.memory_bytes, schedule, network)
        if new.seconds < best.seconds * (1 - 1e-9):
            best, index = new, i
    return FastestFound(index, best, len(found))


@compiled
def _simulate_policies(
    t: CostTables,
    bounds: Floats,
    starts: Integers,
    placements: Integers,
    counts: Integers,
    warm_ups: Integers,
    policies: Integers,
    ceiling: float,
    max_events: int,
    contention: bool,
    extrapolate: bool,
    stop: NDArray[np.bool_],
) -> tuple[int, float, int, int, int]:
    """Return the fastest plan's index (-1: none), seconds, policy and D (0: none), and how many plans were simulated.

    ``counts``: stages of each plan. ``warm_ups`` [stages, policies, stage]: K_i. ``policies``: those allowed.
    ``extrapolate``: see ``shared_policy_seconds``. ``stop``: see ``stop_flag``; it ends the search after the present
    plan.
    """
    best, index, fastest, limit = ceiling, -1, 0, 0
    for i in range(len(bounds)):
        if bounds[i] >= best * (1 - 1e-9) or max_events <= 0 or stop[0]:
            return index, best, fastest, limit, i
        stages = counts[i]
        costs = stage_costs_from_tables(t, starts[i], placements[i], stages)
        network, known = Network(no_flows(stages), whole_rings(costs.exposed_seconds)), not contention
        for policy in policies:
            warm_up = warm_ups[stages, policy, :stages]
            seconds, new_limit = policy_seconds(costs, warm_up, t.micro_batches, t.memory_bytes, policy != _GPIPE)
            max_events -= 4 * stages * t.micro_batches  # forwards, backwards and a transfer for each
            if not known and seconds < best * (1 - 1e-9):
                network, known = network_from_tables(t, starts[i], placements[i], costs), True
            if network.flows.directions > 0 and seconds < best * (1 - 1e-9):
                seconds, new_limit, actions = shared_policy_seconds(
                    costs, warm_up, t.micro_batches, t.memory_bytes, policy != _GPIPE, network, best, extrapolate
                )
                max_events -= CONTENTION_FACTOR * 2 * actions
            if seconds < best * (1 - 1e-9):
                best, index, fastest, limit = seconds, i, policy, new_limit
            if seconds <= bounds[i] * (1 + 1e-9):
                break  # no policy can be faster than the bound
    return index, best, fastest, limit, len(bounds)
