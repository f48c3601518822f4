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
from dapple_tf.simulator.engine import Rings, make_rings, run, uniform_seconds
from dapple_tf.simulator.order import HeldStash, Order, named_order
from dapple_tf.timeline.stage_costs import StageCosts

# A schedule with more stashes is taken only if it shortens the step by more than this fraction, since costs are not
# known more precisely.
WORTH_MEMORY = 0.02
POLICIES = ("dapple-a", "dapple-b", "gpipe")  # of equally fast policies the first is taken: it stashes least
_LIMITED = ("dapple-a", "dapple-b", *HANDCRAFTED_ZERO_BUBBLE)  # schedules that get D where memory limits them
# Schedules that are simulated in place of ``zb-auto`` while planning, by the stages per device: 1, or 2 in a V.
_SUBSTITUTES = {1: HANDCRAFTED_ZERO_BUBBLE, 2: ("zb-v", "dualpipe-v")}
_ALMOST = 1 - 1e-9  # a policy that is faster only by a rounding error does not replace an earlier one


class StageCostArrays(NamedTuple):
    """The costs of a plan's stages as arrays [stages]: seconds of one micro-batch, bytes of one device."""

    forward_seconds: Floats
    backward_seconds: Floats
    send_seconds: Floats  # one transfer to the next stage, or back; 0 for the last stage
    fixed_bytes: Floats  # weights, gradients, optimizer slots
    stash_bytes: Floats  # of each micro-batch in flight
    working_bytes: Floats
    weights_seconds: Floats  # the part of backward for gradients of weights, if it is an action of its own; else 0
    rings: Rings  # the AllReduces of a step
    flows: Flows | None = None  # the flows that share the servers' interfaces; None without contention


class ScheduleSeconds(NamedTuple):
    """Seconds of a step under ``schedule``; infinite if no schedule fits the memory."""

    seconds: float
    schedule: str


def stage_cost_arrays(costs: Sequence[StageCosts], flows: Flows | None = None) -> StageCostArrays:
    """Return the costs of a plan's stages as arrays; ``flows``: as in ``StageCostArrays``."""
    return StageCostArrays(
        np.array([c.forward_seconds for c in costs]),
        np.array([c.backward_seconds for c in costs]),
        np.array([c.send_forward_seconds for c in costs]),
        np.array([c.fixed_bytes for c in costs]),
        np.array([c.stash_bytes for c in costs]),
        np.array([c.working_bytes for c in costs]),
        np.array([c.weights_seconds for c in costs]),
        make_rings(costs),
        flows,
    )


def fastest_schedule(
    costs: StageCostArrays,
    micro_batches: int,
    memory_bytes: float,
    schedule: str = "auto",
    ceiling: float = np.inf,
) -> ScheduleSeconds:
    """Return the fastest policy for these stages ("auto"), or the given ``schedule``, with its seconds.

    Where memory limits the policy, its name has D. ``ceiling``: seconds; a step that is not shorter counts as infinite.
    Of policies that differ only by rounding errors the first of ``POLICIES`` is taken. A schedule's name must be valid
    (``make_problem`` checks it).
    """
    if schedule != "auto" and ScheduleSpec.parse(schedule).is_searched:
        # Reason: the search takes far longer. It starts from all of these schedules, so the order that it finds later
        # is no slower.
        names = (schedule, *find_substitutes(schedule))
        found = [_schedule_seconds(costs, micro_batches, memory_bytes, name, ceiling) for name in names]
        return ScheduleSeconds(min(entry.seconds for entry in found), schedule)
    if schedule not in (*POLICIES, "auto"):
        return _schedule_seconds(costs, micro_batches, memory_bytes, schedule, ceiling)
    best = ScheduleSeconds(ceiling, "")
    for name in POLICIES:
        if schedule in (name, "auto"):
            timed = _schedule_seconds(costs, micro_batches, memory_bytes, name, best.seconds * _ALMOST)
            best = timed if timed.seconds < np.inf else best
    return best if best.schedule else ScheduleSeconds(np.inf, "")


def _schedule_seconds(
    costs: StageCostArrays, micro_batches: int, memory_bytes: float, schedule: str, ceiling: float
) -> ScheduleSeconds:
    """Return the seconds of a step under a schedule, and its name with D where memory limits one of ``_LIMITED``.

    D is the least number of micro-batches that a stage can hold, over the stages that cannot hold as many as the
    schedule has in flight there (DAPPLE, section V.C). Infinite if the memory is too small, and where the seconds are
    not below ``ceiling``.
    """
    stages, nothing = len(costs.forward_seconds), ScheduleSeconds(np.inf, schedule)
    try:
        order, in_flight = named_order(schedule, stages, micro_batches)
    except ScheduleError:  # such as gpipe:D=4 with more than 4 micro-batches, or a schedule for other numbers of stages
        return nothing
    if len(order.actions) < stages:
        peaks = HeldStash.of(order).peaks(costs.fixed_bytes, costs.stash_bytes, costs.working_bytes)
        if (peaks > memory_bytes).any():
            return nothing
    else:
        room = memory_bytes - costs.fixed_bytes - costs.working_bytes
        short = room < in_flight * costs.stash_bytes
        if short.any():
            limit = int((room[short] / costs.stash_bytes[short]).min()) if (room[short] > 0).all() else 0
            if schedule not in _LIMITED or limit < 1:
                return nothing
            if limit < in_flight.max():  # else the memory is short only by a rounding error
                schedule = f"{schedule}:D={limit}"
                order = named_order(schedule, stages, micro_batches).order
    seconds = order_seconds(order, costs, ceiling)
    return ScheduleSeconds(seconds if seconds < ceiling else np.inf, schedule)


def find_substitutes(schedule: str) -> tuple[str, ...]:
    """Return the schedules that planners cut stages for in place of ``zb-auto``, with as many stages per device."""
    chunks = ScheduleSpec.parse(schedule).chunks
    return _SUBSTITUTES.get(chunks, ()) if chunks else ()


def order_seconds(order: Order, costs: StageCostArrays, ceiling: float = np.inf) -> float:
    """Return the seconds of a step whose workers run their actions in this ``order``.

    They may be infinite where they are not below ``ceiling``.
    """
    seconds = uniform_seconds(
        costs.forward_seconds, costs.backward_seconds, costs.weights_seconds, costs.send_seconds, costs.send_seconds
    )
    return run(order, seconds, costs.rings, costs.flows, ceiling).seconds


def least_step_seconds(
    costs: CostModel, stages: Sequence[StagePlan], samples: int, micro_batches: int, *, splits: bool, overlap: bool
) -> float:
    """Return a lower bound (seconds) of the step of ``stages``, on micro-batches of ``samples`` each.

    A device computes all micro-batches. Before its first action, each earlier stage has run a forward. The last
    backward of the device belongs to the first of its stages. After it, each earlier stage runs a backward, and this
    stage runs its AllReduce. If weight gradients are actions of their own (``splits``), they may run after all this;
    then only the seconds of the device itself count. With ``overlap`` AllReduce does not count. Transfers,
    re-computation and contention are left out.
    """
    busy = dict[tuple[int, ...], float]()  # seconds of the device's stages for one micro-batch
    around = dict[tuple[int, ...], float]()  # seconds before and after all of its actions
    before, worker = 0.0, None
    for stage in stages:
        if stage.worker != worker:  # the first stage of another pipeline
            before, worker = 0.0, stage.worker
        own = costs.compute_seconds(stage, samples)
        if stage.devices not in busy:
            busy[stage.devices] = 0.0
            around[stage.devices] = 0.0 if splits else max(before, 0.0 if overlap else costs.allreduce_seconds(stage))
        busy[stage.devices] += own
        before += own
    return max(around[devices] + micro_batches * seconds for devices, seconds in busy.items())
