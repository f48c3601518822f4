"""Labels of the planner's dynamic programming: partial plans, of which each state keeps the best few.

A *label* is a plan of the first j blocks. Its *state* is (j, p), where p is the placement of its last stage: the
placement says which devices are in use, and so stands for m and g of T_PL(j, m, g) in DAPPLE, section IV.C. The paper
keeps one label for each state; here a state has room for ``width`` labels. Label -1 is the empty plan.

Functions that take ``Labels`` (or ``CostTables``) in an inner loop must have no branch but one conditional
expression. Numba counts references to every array of the tuple, and it removes that counting only from such functions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled_part


class Labels(NamedTuple):
    """Labels as arrays. State (j, p) has number (j - 1) * P + p; its labels are ``width`` consecutive entries.

    The last entry of every array, which index -1 reads, is the empty plan: all 0. Times are seconds.
    """

    counts: Integers  # [states] labels in use
    parent: Integers  # the label without the last stage
    first_block: Integers  # where the last stage begins
    stages: Integers
    bound: Floats  # at most the score of every complete plan that begins with this label
    rank: Floats  # sort key: a state keeps its ``width`` labels of least rank
    round_trip: Floats  # F + B of all stages and networks so far
    pivot_threshold: Floats  # the least steady phase, (M - 1)(F + B), with which a later stage becomes pivot
    forward: Floats  # of the last stage
    backward: Floats
    allreduce: Floats
    transfer: Floats  # into the last stage
    placements: int
    width: int


class Limits(NamedTuple):
    """Limits of one search: plans returned, and whether stages must hold policy A's warm-up."""

    max_results: int
    require_warm_up: bool


@compiled_part
def make_labels(blocks: int, placements: int, width: int) -> Labels:
    """Return empty arrays for the labels of every state with blocks left, with the empty plan."""
    states = max(0, blocks - 1) * placements
    size = states * width + 1
    labels = Labels(
        np.zeros(states, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int16),
        np.empty(size, np.int16),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        placements,
        width,
    )
    labels.stages[-1], labels.bound[-1] = 0, 0.0
    labels.round_trip[-1:], labels.pivot_threshold[-1:] = 0.0, 0.0
    return labels


@compiled_part
def labels_of_state(labels: Labels, planned: int, placement: int) -> tuple[int, int]:
    """Return the range of labels of a state, as begin and end (exclusive); without planned blocks the empty plan."""
    if planned == 0:
        return -1, 0
    state = (planned - 1) * labels.placements + placement
    return state * labels.width, state * labels.width + int(labels.counts[state])


@compiled_part
def find_slot(labels: Labels, state: int) -> int:
    """Return the entry for a new label of a state: the first free one, or that of the label with the worst rank."""
    first, count = state * labels.width, labels.counts[state]
    if count < labels.width:
        return int(first + count)
    worst = first
    for other in range(first + 1, first + labels.width):
        if labels.rank[other] > labels.rank[worst]:
            worst = other
    return int(worst)


@compiled_part
def is_kept(labels: Labels, state: int, slot: int, rank: float) -> bool:
    """Return whether a label of this rank gets the slot of ``find_slot``: it is free, or its label ranks worse."""
    return bool((labels.counts[state] < labels.width) | (rank < labels.rank[slot]))


@compiled_part
def put_label(
    labels: Labels, state: int, slot: int, parent: int, first_block: int, stages: int, bound: float, rank: float
) -> float:
    """Write a label into the slot of ``find_slot``; return the bound of the label that it evicts, infinity if none."""
    evicted = labels.bound[slot]
    if labels.counts[state] < labels.width:
        evicted = np.inf
    labels.counts[state] = min(labels.counts[state] + 1, labels.width)
    labels.parent[slot], labels.first_block[slot], labels.stages[slot] = parent, first_block, stages
    labels.bound[slot], labels.rank[slot] = bound, rank
    return float(evicted)


@compiled_part
def placement_of(labels: Labels, label: int) -> int:
    """Return the placement of a label's last stage."""
    return int(label // labels.width % labels.placements)
