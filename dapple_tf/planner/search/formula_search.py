"""The search by formulas 1 to 3 of DAPPLE; partial plans are ranked by formula 5 (all remaining layers as one stage).

A partial plan cannot know its pivot stage Q, but it bounds the latency L of formulas 1 and 2 for every Q that it may
get: with Q = s, L is at least (sum of F + B of stages 0 to s) + (M - 1)(F_s + B_s). Formula 3 goes from the last stage
to the first, and a stage takes over from Q if its steady phase is longer than that of Q and the F + B between them. So
a stage is pivot only if its steady phase reaches the *pivot threshold* of the stages before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dapple_tf.planner.search.complete_plans import CompletePlan, offer_plan
from dapple_tf.planner.search.cost_tables import CostTables
from dapple_tf.planner.search.labels import Labels, Limits, find_slot, is_kept, labels_of_state, placement_of, put_label
from dapple_tf.planner.search.latency import pipeline_latency
from dapple_tf.planner.search.table_lookups import (
    StageSeconds,
    can_follow,
    compute_seconds,
    exposed_seconds,
    fits,
    fixed_bytes,
    least_later,
    stage_seconds,
    stash_bytes,
    transfer_seconds,
    working_bytes,
)
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.compiled import compiled_part

# Bounds add up the same seconds in another order than formulas 1 and 2, so they are lowered by more than sums round.
ROUNDING = 1 - 1e-12


class Formula(NamedTuple):
    """``round_trip``, ``pivot_threshold`` and ``bound`` of a partial plan, as in ``Labels``."""

    round_trip: float
    pivot_threshold: float
    bound: float


@compiled_part
def add_network(labels: Labels, label: int, transfer: float, m: int) -> Formula:
    """Return the terms of a label and one more network stage, whose F and B are ``transfer`` each (section IV.A).

    ``m``: micro-batches.
    """
    threshold, bound = labels.pivot_threshold[label], labels.bound[label]
    round_trip, steady = labels.round_trip[label] + 2 * transfer, (m - 1) * 2 * transfer
    if steady >= threshold:
        bound = max(bound, (round_trip + steady) * ROUNDING)
    return Formula(round_trip, max(steady, threshold - 2 * transfer), bound)


@compiled_part
def add_stage(before: Formula, stage: StageSeconds, m: int, later: float) -> Formula:
    """Return the formula's terms with one more stage.

    ``later``: F + B of the longest of the stages to come, at least.
    """
    both = stage.forward + stage.backward
    round_trip = before.round_trip + stage.forward + stage.backward
    steady = (m - 1) * both
    threshold = max(steady, before.pivot_threshold - stage.forward - stage.backward)
    bound = round_trip + steady if steady >= before.pivot_threshold else 0.0
    if (m - 1) * later >= threshold:
        bound = max(bound, round_trip + (m - 1) * later)
    if m == 1:  # without a steady phase the last stage stays pivot, and all stages count
        bound = max(bound, round_trip + later)
    return Formula(round_trip, threshold, max(before.bound, bound * ROUNDING))


@compiled_part
def extend_by_formula(
    t: CostTables,
    labels: Labels,
    heap: list[CompletePlan],
    planned: int,
    p: int,
    limits: Limits,
    ceiling: float,
    unexplored: float,
) -> tuple[float, float]:
    """Extend every label of state (planned, p) by every stage that can follow; complete plans use all devices.

    Returns the new ``ceiling``, and the least bound of the labels dropped because a state was full, ``unexplored``.
    """
    m, blocks = t.micro_batches, len(t.working_bytes)
    scratch = np.empty((3, 2 * blocks + 1))
    for label in range(*labels_of_state(labels, planned, p)):
        if labels.bound[label] >= ceiling:
            continue
        stages = labels.stages[label] + 1
        for transition in range(t.first_transition[p], t.first_transition[p + 1]):
            if not can_follow(t, transition, planned):
                continue
            q, transfer = t.next_placement[transition], transfer_seconds(t, transition, planned)
            before = add_network(labels, label, transfer, m)
            if before.bound >= ceiling:
                continue
            largest = 0.0
            for end in range(planned + 1, blocks + 1):
                largest = max(largest, t.working_bytes[end - 1])
                steady = (m - 1) * compute_seconds(t, planned, end, q)
                too_long = steady >= before.pivot_threshold and before.round_trip + steady >= ceiling
                if too_long or not fits(t, planned, end, q, largest):
                    break  # with more blocks the stage needs even more memory and time
                if (end < blocks) != (t.devices_left[q] > 0):
                    continue
                stage = stage_seconds(t, planned, end, q)
                new = add_stage(before, stage, m, least_later(t, end, q))
                if new.bound >= ceiling:
                    continue
                if end == blocks:
                    if not limits.require_warm_up or holds_warm_up(t, labels, label, planned, q):
                        latency = latency_with_rest(t, labels, label, transfer, stage, end, q, scratch)
                        if latency < ceiling:
                            ceiling = offer_plan(heap, (-latency, label, q, planned), limits.max_results, ceiling)
                    continue
                state = (end - 1) * labels.placements + q
                slot, latency = find_slot(labels, state), new.bound
                if is_kept(labels, state, slot, new.bound):
                    latency = latency_with_rest(t, labels, label, transfer, stage, end, q, scratch)
                if not is_kept(labels, state, slot, latency):
                    unexplored = min(unexplored, new.bound)
                    continue
                evicted = put_label(labels, state, slot, label, planned, stages, new.bound, latency)
                unexplored = min(unexplored, evicted)
                labels.round_trip[slot], labels.pivot_threshold[slot] = new.round_trip, new.pivot_threshold
                labels.forward[slot], labels.backward[slot] = stage.forward, stage.backward
                labels.allreduce[slot], labels.transfer[slot] = stage.exposed, transfer
    return ceiling, unexplored


@compiled_part
def latency_with_rest(
    t: CostTables,
    labels: Labels,
    label: int,
    transfer: float,
    stage: StageSeconds,
    end: int,
    q: int,
    scratch: Floats,
) -> float:
    """Return formula 5: the latency of the label's stages, the new stage, and all that is left as the last stage.

    ``transfer``: into the new stage. ``end``: the first block that is left. ``q``: the new stage's placement.
    ``scratch`` [3, 2N + 1]: room for F, B and AllReduce of stages and networks, written from the last to the first.
    """
    blocks, column = len(t.working_bytes), scratch.shape[1]
    if end < blocks:
        transition = t.rest_transition[q]
        last, move = t.next_placement[transition], transfer_seconds(t, transition, end)
        row = t.seconds_row[last]
        column -= 1
        scratch[0, column] = t.forward[row, blocks] - t.forward[row, end]
        scratch[1, column] = t.backward[row, blocks] - t.backward[row, end]
        scratch[2, column] = exposed_seconds(t, end, blocks, last)
        column -= 1
        scratch[0, column], scratch[1, column], scratch[2, column] = move, move, 0.0
    column -= 1
    scratch[0, column], scratch[1, column], scratch[2, column] = stage.forward, stage.backward, stage.exposed
    while label >= 0:
        column -= 1
        scratch[0, column], scratch[1, column], scratch[2, column] = transfer, transfer, 0.0
        column -= 1
        scratch[0, column], scratch[1, column] = labels.forward[label], labels.backward[label]
        scratch[2, column] = labels.allreduce[label]
        transfer = labels.transfer[label]
        label = labels.parent[label]
    return float(pipeline_latency(scratch[0, column:], scratch[1, column:], scratch[2, column:], t.micro_batches))


@compiled_part
def holds_warm_up(t: CostTables, labels: Labels, label: int, first: int, p: int) -> bool:
    """Return whether each stage i of a complete plan can hold min(S - i, M) micro-batches (policy A, section V.C).

    ``label``: the plan without its last stage, which begins at block ``first`` on placement ``p``.
    """
    end, warm_up = len(t.working_bytes), 1
    while True:
        in_flight = min(warm_up, t.micro_batches) * stash_bytes(t, first, end)
        work = working_bytes(t, first, end, t.working_bytes[first:end].max())
        if fixed_bytes(t, first, end) + (work + in_flight) / t.replicas[p] > t.memory_bytes:
            return False
        if label < 0:
            return True
        end, first, p = first, labels.first_block[label], placement_of(labels, label)
        label = labels.parent[label]
        warm_up += 1
