"""Simulate stages under each scheduling policy, and find the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.spec import HANDCRAFTED_ZERO_BUBBLE, ScheduleSpec
from dapple_tf.plans import StagePlan
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.contention import Flows
from dapple_tf.simulator.costs import CostModel
from dapple_tf.simulator.engine import Rings, make_rings, run, uniform_seconds, whole_rings
from dapple_tf.simulator.order import HeldStash, Order, early_backward_order, named_order
from dapple_tf.timeline.stage_costs import StageCosts

# A schedule with more stashes is taken only if it shortens the step by more than this fraction, since costs are not
# known more precisely.
WORTH_MEMORY = 0.02
POLICIES = ("dapple-a", "dapple-b", "gpipe")  # of equally fast policies the first is taken: it stashes least
# Schedules that are simulated in place of ``zb-auto`` while planning, by the stages per device: 1, or 2 in a V.
_SUBSTITUTES = {1: HANDCRAFTED_ZERO_BUBBLE, 2: ("zb-v", "dualpipe-v")}
_ALMOST = 1 - 1e-9  # a policy that is faster only by a rounding error does not replace an earlier one


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


class Network(NamedTuple):
    """The ``rings`` of the AllReduces of a plan's stages, and the ``flows`` that share the servers' interfaces."""

    flows: Flows | None
    rings: Rings


def make_network(flows: Flows | None, costs: Sequence[StageCosts]) -> Network:
    """Return the flows, and the rings of stages with these costs; ``flows``: None without contention."""
    return Network(flows, make_rings(costs))


def fastest_schedule(
    costs: StageCostArrays,
    micro_batches: int,
    memory_bytes: float,
    schedule: str = "auto",
    network: Network | None = None,
    ceiling: float = np.inf,
) -> ScheduleSeconds:
    """Return the fastest policy for these stages ("auto"), or the given ``schedule``, with its seconds.

    Where memory limits the policy, its name has D. ``network``: None for one ring a stage, without contention.
    ``ceiling``: seconds; a step that is not shorter counts as infinite.

    Of policies that differ only by rounding errors the first of ``POLICIES`` is taken. A schedule's name must be valid
    (``make_problem`` checks it).
    """
    if schedule != "auto" and ScheduleSpec.parse(schedule).is_searched:
        # Reason: the search takes far longer. It starts from all of these, so what it finds for the plan is no slower.
        names = (schedule, *find_substitutes(schedule))
        found = [_named_schedule_seconds(costs, micro_batches, memory_bytes, name, network, ceiling) for name in names]
        return ScheduleSeconds(min(entry.seconds for entry in found), schedule)
    if schedule not in (*POLICIES, "auto"):
        return _named_schedule_seconds(costs, micro_batches, memory_bytes, schedule, network, ceiling)
    best = ScheduleSeconds(ceiling, "")
    for name in POLICIES:
        if schedule in (name, "auto"):
            timed = _policy_seconds(costs, name, micro_batches, memory_bytes, network, best.seconds * _ALMOST)
            if timed.seconds < best.seconds * _ALMOST:
                best = timed
    return best if best.schedule else ScheduleSeconds(np.inf, "")


def _policy_seconds(
    costs: StageCostArrays,
    policy: str,
    micro_batches: int,
    memory_bytes: float,
    network: Network | None,
    ceiling: float,
) -> ScheduleSeconds:
    """Return the seconds of a step under a policy, and its name with D where memory limits it.

    D is the least number of micro-batches that a stage can hold, over the stages that cannot hold K_i (DAPPLE, section
    V.C). Infinite if a stage cannot hold one, if memory limits GPipe, and where they are not below ``ceiling``.
    """
    warm_up = ScheduleSpec.parse(policy).warm_up(len(costs.forward_seconds), micro_batches)
    assert warm_up is not None, "a policy has K_i"
    room = memory_bytes - costs.fixed_bytes - costs.working_bytes
    short = room < np.array(warm_up) * costs.stash_bytes
    limit = micro_batches
    if short.any():
        limit = int((room[short] / costs.stash_bytes[short]).min()) if (room[short] > 0).all() else 0
    if limit < 1 or (limit < micro_batches and policy == "gpipe"):
        return ScheduleSeconds(np.inf, policy)
    order = early_backward_order(np.minimum(warm_up, limit), micro_batches)
    limited = policy if max(warm_up) <= limit else f"{policy}:D={limit}"
    return ScheduleSeconds(order_seconds(order, costs, network, ceiling), limited)


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
        peaks = HeldStash.of(order).peaks(costs.fixed_bytes, costs.stash_bytes, costs.working_bytes)
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
    seconds = order_seconds(order, costs, network, ceiling)
    return seconds if seconds < ceiling else np.inf


def find_substitutes(schedule: str) -> tuple[str, ...]:
    """Return the schedules for which planners cut stages instead of ``zb-auto``: of as many stages per device."""
    chunks = ScheduleSpec.parse(schedule).chunks
    return _SUBSTITUTES.get(chunks, ()) if chunks else ()


def order_seconds(
    order: Order, costs: StageCostArrays, network: Network | None = None, ceiling: float = np.inf
) -> float:
    """Return the seconds of a step whose workers run their actions in this ``order``.

    ``network``: as in ``fastest_schedule``. They may be infinite where they are not below ``ceiling``.
    """
    seconds = uniform_seconds(
        costs.forward_seconds, costs.backward_seconds, costs.weights_seconds, costs.send_seconds, costs.send_seconds
    )
    rings = network.rings if network else whole_rings(costs.exposed_seconds)
    return run(order, seconds, rings, network.flows if network else None, ceiling).seconds


def least_step_seconds(
    costs: CostModel, stages: Sequence[StagePlan], samples: int, micro_batches: int, *, splits: bool, overlap: bool
) -> float:
    """Return a lower bound (seconds) of the step of ``stages``, on micro-batches of ``samples`` each.

    A device computes for all micro-batches. Before its first action, each stage before it has run a forward. Its last
    backward is one of the first of its stages. After it, each stage before runs a backward, and this stage runs its
    AllReduce. If weight gradients are actions of their own (``splits``), they may come even later, so then only the
    seconds of the device itself count. With ``overlap`` AllReduce does not count. Transfers, re-computation and
    contention are left out.
    """
    busy = dict[tuple[int, ...], float]()  # seconds of the device's stages for one micro-batch
    around = dict[tuple[int, ...], float]()  # seconds before and after all of its actions
    before, worker = 0.0, None
    for stage in stages:
        if stage.worker != worker:  # the first stage of another pipeline
            before, worker = 0.0, stage.worker
        own = costs.replicas.compute_seconds(costs.in_rows(stage, samples), samples)
        if stage.devices not in busy:
            busy[stage.devices] = 0.0
            around[stage.devices] = 0.0 if splits else max(before, 0.0 if overlap else costs.allreduce_seconds(stage))
        busy[stage.devices] += own
        before += own
    return max(around[devices] + micro_batches * seconds for devices, seconds in busy.items())
