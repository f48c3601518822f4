"""The search by a lower bound of the simulated step: what a further stage adds to the bound of a partial plan."""

from __future__ import annotations

from typing import NamedTuple

from dapple_tf.planner.complete_plans import CompletePlan, offer_plan
from dapple_tf.planner.cost_tables import CostTables
from dapple_tf.planner.labels import Labels, Limits, find_slot, is_kept, labels_of_state, put_label
from dapple_tf.planner.table_lookups import (
    StageSeconds,
    can_follow,
    compute_seconds,
    fits,
    least_later,
    stage_seconds,
    transfer_seconds,
)
from dapple_tf.simulator.compiled import compiled_part

# Bounds add up the same seconds in another order than the simulator, so they are lowered by more than sums round.
ROUNDING = 1 - 1e-12


class StepBound(NamedTuple):
    """``first_forward_end``, ``drain`` and ``bound`` of a partial plan, as in ``Labels``."""

    first_forward_end: float
    drain: float
    bound: float


@compiled_part
def bound_step(before: StepBound, transfer: float, stage: StageSeconds, m: int, later: float) -> StepBound:
    """Return the lower bound of the simulated step of every plan that begins with these stages.

    ``m``: micro-batches. ``later``: seconds of a micro-batch in the busiest of the stages to come, at least. Weight
    gradients that are actions of their own delay no other stage. The bound is the largest of four: for this stage, for
    the channel from the stage before, for the channel back, and for the busiest stage to come. Each is the time until
    the first micro-batch is there, the work for all micro-batches, and the time from there to the end of the step.
    """
    f, b, w, send = stage.forward, stage.backward, stage.weights, transfer
    first_forward_end = before.first_forward_end + send + f
    steady = (m - 1) * (f + b)
    drain = b - w + max(w + stage.exposed, before.drain + send)
    bound = max(first_forward_end + steady + b + stage.exposed, first_forward_end + (m - 1) * (f + b - w) + drain)
    bound = max(bound, before.first_forward_end + m * send + f + drain)
    bound = max(bound, first_forward_end + b - w + m * send + before.drain)
    bound = max(bound, first_forward_end + m * later + drain)
    return StepBound(first_forward_end, drain, max(before.bound, bound * ROUNDING))


@compiled_part
def extend_by_bound(
    t: CostTables,
    labels: Labels,
    heap: list[CompletePlan],
    planned: int,
    p: int,
    limits: Limits,
    ceiling: float,
    unexplored: float,
) -> tuple[float, float]:
    """Extend every label of state (planned, p) by every stage that can follow.

    Returns the new ``ceiling``, and the least bound of the labels dropped because a state was full, ``unexplored``.
    """
    m, blocks = t.micro_batches, len(t.working_bytes)
    for label in range(*labels_of_state(labels, planned, p)):
        if labels.bound[label] >= ceiling:
            continue
        before = StepBound(labels.first_forward_end[label], labels.drain[label], labels.bound[label])
        stages = labels.stages[label] + 1
        for transition in range(t.first_transition[p], t.first_transition[p + 1]):
            if not can_follow(t, transition, planned):
                continue
            q, transfer = t.next_placement[transition], transfer_seconds(t, transition, planned)
            largest = 0.0
            for end in range(planned + 1, blocks + 1):
                largest = max(largest, t.working_bytes[end - 1])
                steady = (m - 1) * compute_seconds(t, planned, end, q)
                if not fits(t, planned, end, q, largest) or before.first_forward_end + transfer + steady >= ceiling:
                    break  # with more blocks the stage needs even more memory and time
                if end < blocks and (t.devices_left[q] == 0 or stages == limits.max_stages):
                    continue
                new = bound_step(before, transfer, stage_seconds(t, planned, end, q), m, least_later(t, end, q))
                if new.bound >= ceiling:
                    continue
                if end == blocks:
                    ceiling = offer_plan(heap, (-new.bound, label, q, planned), limits.max_results, ceiling)
                    continue
                state = (end - 1) * labels.placements + q
                slot = find_slot(labels, state)
                if not is_kept(labels, state, slot, new.bound):
                    unexplored = min(unexplored, new.bound)
                    continue
                evicted = put_label(labels, state, slot, label, planned, stages, new.bound, new.bound)
                unexplored = min(unexplored, evicted)
                labels.first_forward_end[slot], labels.drain[slot] = new.first_forward_end, new.drain
    return ceiling, unexplored
