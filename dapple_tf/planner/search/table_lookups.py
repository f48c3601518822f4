"""Compiled look-ups in ``CostTables``: seconds and bytes of one stage, and seconds of one transfer between stages.

A stage holds blocks ``first`` to ``end`` (exclusive) and runs on one placement; p is the placement's index.
"""

from __future__ import annotations

from typing import NamedTuple

from dapple_tf.planner.search.cost_tables import CostTables
from dapple_tf.simulator.compiled import compiled, compiled_part


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch in one stage, over all its replicas.

    ``weights``: the part of ``backward`` that computes gradients of weights, if the schedule runs it on its own, else
    0. ``exposed``: seconds of AllReduce after the last gradients.
    """

    forward: float
    backward: float
    weights: float
    exposed: float


@compiled
def stage_seconds(t: CostTables, first: int, end: int, p: int) -> StageSeconds:
    """Return the seconds of a stage."""
    row = t.seconds_row[p]
    return StageSeconds(
        t.forward[row, end] - t.forward[row, first],
        t.backward[row, end] - t.backward[row, first],
        t.weights[row, end] - t.weights[row, first],
        exposed_seconds(t, first, end, p),
    )


@compiled_part
def compute_seconds(t: CostTables, first: int, end: int, p: int) -> float:
    """Return the seconds of a stage's forward and backward together, F + B."""
    row = t.seconds_row[p]
    forward, backward = t.forward[row, end] - t.forward[row, first], t.backward[row, end] - t.backward[row, first]
    return float(forward + backward)


@compiled
def exposed_seconds(t: CostTables, first: int, end: int, p: int) -> float:
    """Return the seconds of AllReduce after a stage's last gradients; without overlap that is all of it."""
    if t.exposed.size:
        return float(t.exposed[t.exposed_row[p], first, end])
    parameter_bytes = t.parameter_bytes[end] - t.parameter_bytes[first]
    seconds = t.allreduce_latency[p] + t.allreduce_seconds_per_byte[p] * parameter_bytes
    return float(seconds if t.trained[end] > t.trained[first] else 0.0)


@compiled
def transfer_seconds(t: CostTables, transition: int, start: int) -> float:
    """Return the seconds of one transfer, in either direction, into a stage that starts at block ``start``.

    0 for the first stage: nothing crosses before block 0, and the transitions of the start have no latency.
    """
    return float(t.transfer_latency[transition] + t.transfer_seconds_per_byte[transition] * t.boundary_bytes[start])


@compiled
def fixed_bytes(t: CostTables, first: int, end: int) -> float:
    """Return the bytes of weights, gradients and optimizer slots, which every replica of a stage holds."""
    return float((t.parameter_bytes[end] - t.parameter_bytes[first]) * t.fixed_bytes_per_parameter_byte)


@compiled
def stash_bytes(t: CostTables, first: int, end: int) -> float:
    """Return the bytes that one micro-batch in flight keeps for backward, over all replicas of a stage."""
    return float(t.boundary_bytes[first] if t.recompute else t.stash_bytes[end] - t.stash_bytes[first])


@compiled
def working_bytes(t: CostTables, first: int, end: int, largest: float) -> float:
    """Return the bytes of a backward's working set, over all replicas of a stage.

    ``largest``: the largest working set of a block. With re-computation, the recomputed stash is added.
    """
    return float(largest + (t.stash_bytes[end] - t.stash_bytes[first] if t.recompute else 0.0))


@compiled
def fits(t: CostTables, first: int, end: int, p: int, largest: float) -> bool:
    """Return whether a device can hold one replica of a stage with one micro-batch in flight."""
    fixed, replicas = fixed_bytes(t, first, end), t.replicas[p]
    work = working_bytes(t, first, end, largest)
    return bool(fixed + work / replicas + stash_bytes(t, first, end) / replicas <= t.memory_bytes)


@compiled_part
def can_follow(t: CostTables, transition: int, start: int) -> bool:
    """Return whether the second stage of a transition can begin at block ``start``.

    Each of its replicas needs a sample of the micro-batch. Where a tensor that cannot be split crosses, both stages
    need the same number of replicas.
    """
    enough_samples = t.replicas[t.next_placement[transition]] <= t.micro_batch_size
    return bool(enough_samples & (t.splittable[start] | t.same_replicas[transition]))


@compiled_part
def least_later(t: CostTables, end: int, p: int) -> float:
    """Return the seconds of a micro-batch in the busiest stage after this one, at least; 0 if none follows.

    A lower bound: the device-seconds of the remaining blocks, divided by the number of remaining devices.
    """
    return float(t.least_remaining[end] / max(t.devices_left[p], 1))
