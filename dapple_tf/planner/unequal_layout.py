"""Simulate a layout on devices of different kinds: ``layout`` and ``layout_contention`` with shares by speed.

Letters as in ``layout``; K kinds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dapple_tf.planner.layout import (
    Layout,
    LayoutStep,
    LayoutTables,
    Workspace,
    make_layout_tables,
    make_workspace,
    simulate_costs,
)
from dapple_tf.planner.layout_contention import add_contention
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.row_cuts import share_by_kind
from dapple_tf.simulator.compiled import Floats, Integers, compiled_part
from dapple_tf.simulator.costs import exposed_of
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.transfer import measure_allreduce, measure_shares, ring_seconds
from profiler.device_costs import profile_on


class UnequalTables(NamedTuple):
    """``LayoutTables``, whose seconds are not read, and what depends on the kinds of devices.

    Seconds of n samples are ``factor`` times those in the ``row`` of n.
    """

    layout: LayoutTables  # its ``moves.homes`` number the groups of devices of one server and kind
    servers: Integers  # [D]
    kinds: Integers  # [D]
    memory: Floats  # [K] usable bytes
    equal_row: Integers  # [Z, D + 1] of seconds, where a micro-batch is shared equally, for each replica count
    equal_factor: Floats  # [Z, D + 1]
    row: Integers  # [largest micro-batch + 1] of seconds, for each number of whole rows
    factor: Floats  # [largest micro-batch + 1]
    forward: Floats  # [K, rows, N + 1] seconds, sums over the blocks before
    backward: Floats  # [K, rows, N + 1]
    layer_backward: Floats  # [K, rows, L] seconds; of size 0 without overlap


class UnequalWorkspace(NamedTuple):
    """Arrays for simulating layouts. ``common``: see ``Workspace``."""

    common: Workspace
    devices: Integers  # [D] of all stages, one stage after the other
    cuts: Integers  # [D + most stages] the cut points of each stage's rows (see ``contention.measure_flows``)
    slowest: Integers  # [2, most stages] kind and row of the seconds of the replica with the longest backward
    slowest_factor: Floats  # [most stages]


def make_unequal_tables(problem: PlanningProblem, sizes: Integers, may_recompute: bool) -> UnequalTables:
    """Return the tables of a problem for these micro-batch ``sizes``; its schedule is "auto" or in ``POLICIES``."""
    cluster, profile, devices = problem.cluster, problem.profile, problem.cluster.devices
    names = list(dict.fromkeys(cluster.device_kinds))
    own = [profile_on(profile, cluster, cluster.device_kinds.index(kind)) for kind in names]
    equal = sizes[:, None] / np.arange(1, devices + 1)
    samples = np.concatenate([equal.ravel(), np.arange(1, sizes.max() + 1)])
    if any(p.timings for p in own):
        distinct, row = np.unique(samples, return_inverse=True)
        factor = np.ones(len(samples))
    else:  # seconds are proportional to the samples
        distinct, row, factor = (
            np.array([float(profile.batch_size)]),
            samples.astype(int) * 0,
            samples / profile.batch_size,
        )
    row = row.reshape(-1).astype(np.int64)
    of_equal, starts = equal.size, problem.chain.positions[:-1]
    none = np.zeros((len(sizes), 1))
    tables = make_layout_tables(problem, sizes, may_recompute)
    groups = list(dict.fromkeys(zip(cluster.homes, cluster.device_kinds, strict=True)))
    seconds = np.array([float((p.forward_seconds(1) + p.backward_seconds(1)).sum()) for p in own])
    kinds = np.array([names.index(kind) for kind in cluster.device_kinds], np.int64)
    moves = tables.moves._replace(
        homes=np.array([groups.index(g) for g in zip(cluster.homes, cluster.device_kinds, strict=True)], np.int64),
        speed=(1 / seconds if (seconds > 0).all() else np.ones(len(names)))[kinds],
    )
    return UnequalTables(
        layout=tables._replace(moves=moves, memory_bytes=usable_bytes(max(cluster.memories))),
        servers=np.array(cluster.homes, np.int64),
        kinds=kinds,
        memory=np.array([usable_bytes(cluster.memories[cluster.device_kinds.index(kind)]) for kind in names]),
        equal_row=np.hstack([none, row[:of_equal].reshape(equal.shape)]).astype(np.int64),
        equal_factor=np.hstack([none, factor[:of_equal].reshape(equal.shape)]),
        row=np.concatenate([[0], row[of_equal:]]),
        factor=np.concatenate([[0.0], factor[of_equal:]]),
        forward=_sums(np.array([[np.add.reduceat(p.forward_seconds(n), starts) for n in distinct] for p in own])),
        backward=_sums(np.array([[np.add.reduceat(p.backward_seconds(n), starts) for n in distinct] for p in own])),
        layer_backward=np.array([[p.backward_seconds(n) for n in distinct] for p in own])
        if problem.overlap
        else np.zeros((0, 0, 0)),
    )


def make_unequal_workspace(most_stages: int, devices: int, most_micro_batches: int) -> UnequalWorkspace:
    """Return empty arrays for simulating layouts."""
    return UnequalWorkspace(
        make_workspace(most_stages, devices, most_micro_batches),
        np.zeros(devices, np.int64),
        np.zeros(devices + most_stages, np.int64),
        np.zeros((2, most_stages), np.int64),
        np.zeros(most_stages),
    )


@compiled_part
def simulate_unequal(
    t: UnequalTables, layout: Layout, w: UnequalWorkspace, ceiling: float, extrapolate: bool
) -> LayoutStep:
    """Return the step of a layout without contention; see ``simulate_layout``."""
    return simulate_costs(t.layout, layout, w.common, _fill_costs(t, layout, w), ceiling, extrapolate)


@compiled_part
def add_unequal_contention(
    t: UnequalTables, layout: Layout, w: UnequalWorkspace, alone: LayoutStep, ceiling: float, extrapolate: bool
) -> LayoutStep:
    """Return ``add_contention`` of a layout that ``simulate_unequal`` has simulated last."""
    stages = layout.shape[0]
    gradients = np.empty((stages, t.layer_backward.shape[2]))
    for s in range(stages) if t.layer_backward.size else range(0):
        gradients[s] = t.layer_backward[w.slowest[0, s], w.slowest[1, s]] * w.slowest_factor[s]
    cuts = w.cuts[: w.common.offsets[stages] + stages]
    return add_contention(t.layout, layout, w.common, alone, cuts, gradients, ceiling, extrapolate)


@compiled_part
def _fill_costs(t: UnequalTables, layout: Layout, w: UnequalWorkspace) -> float:
    """Do what ``layout.fill_costs`` does; devices that get no row are left out of ``w.common.servers``."""
    stages, z, common = layout.shape[0], layout.shape[1], w.common
    scale, begins = t.layout.scale[z], np.zeros(stages + 1, np.int64)
    for s in layout.owner:
        if s >= 0:
            begins[s + 1] += 1
    for s in range(stages):
        if begins[s + 1] == 0 or begins[s + 1] > t.layout.moves.sizes[z]:
            return np.inf
        begins[s + 1] += begins[s]
    entry = begins.copy()
    for i, s in enumerate(layout.owner):
        if s >= 0:
            w.devices[entry[s]] = layout.device_at[i]
            entry[s] += 1
    common.offsets[0] = 0
    lacking = 0.0
    for s in range(stages):
        lacking += _fill_stage(t, layout, w, s, w.devices[begins[s] : begins[s + 1]])
    if np.isinf(lacking):
        return np.inf
    for s in range(stages - 1):
        a, b, c = common.offsets[s], common.offsets[s + 1], common.offsets[s + 2]
        cut, cut_next = w.cuts[a + s : b + s + 1], w.cuts[b + s + 1 : c + s + 2]
        end = layout.starts[s + 1]
        if not t.layout.splittable[end] and not np.array_equal(cut, cut_next):
            return np.inf
        latency, per_byte = measure_shares(common.servers[a:b], common.servers[b:c], cut, cut_next, t.layout.links)
        common.costs[2, s] = latency + per_byte * t.layout.boundary[end] * scale
    common.costs[2, stages - 1] = 0.0
    return lacking


@compiled_part
def _fill_stage(t: UnequalTables, layout: Layout, w: UnequalWorkspace, s: int, devices: Integers) -> float:
    """Share the rows of stage ``s`` between its ``devices``, and write its costs; return the bytes that they lack."""
    z, own, costs = layout.shape[1], t.layout, w.common.costs
    first, end, size, r = layout.starts[s], layout.starts[s + 1], own.moves.sizes[z], len(devices)
    kinds, row, factor = t.kinds[devices], t.equal_row[z, r], t.equal_factor[z, r]
    forward = factor * (t.forward[:, row, end] - t.forward[:, row, first])
    backward = factor * (t.backward[:, row, end] - t.backward[:, row, first])
    equal = True
    for kind in kinds:
        same = forward[kind] == forward[kinds[0]] and backward[kind] == backward[kinds[0]]
        equal = equal and same
    rows = np.ones(r, np.int64) if equal else share_by_kind(size, kinds, forward, backward)
    most, offset, kept = rows.max(), w.common.offsets[s], 0
    of_kind, fewest = np.zeros(len(forward), np.int64), most
    w.cuts[offset + s] = 0
    for i, count in enumerate(rows):
        if count:
            w.common.servers[offset + kept] = t.servers[devices[i]]
            w.cuts[offset + s + kept + 1] = w.cuts[offset + s + kept] + count
            of_kind[kinds[i]] = max(of_kind[kinds[i]], count)
            fewest = min(fewest, count)
            kept += 1
    w.common.offsets[s + 1] = offset + kept
    if fewest == most:  # as without shares
        for i in range(kept + 1):
            w.cuts[offset + s + i] = i
    stash, largest = own.stash[end] - own.stash[first], own.working[first:end].max()
    if layout.recompute[s]:
        largest, stash = largest + stash, own.boundary[first]
    parameters = own.parameters[end] - own.parameters[first]
    fixed, room = parameters * own.fixed_bytes_per_parameter_byte, np.inf
    costs[0, s], costs[1, s], costs[2, s] = 0.0, -1.0, 0.0
    for kind, count in enumerate(of_kind):
        if not count:
            continue
        if not equal:
            row, factor = t.row[count], t.factor[count]
        f = factor * (t.forward[kind, row, end] - t.forward[kind, row, first])
        b = factor * (t.backward[kind, row, end] - t.backward[kind, row, first])
        if layout.recompute[s]:
            b += f
        costs[0, s] = max(costs[0, s], f)
        if b > costs[1, s]:
            costs[1, s] = b
            w.slowest[0, s], w.slowest[1, s], w.slowest_factor[s] = kind, row, factor
        room = min(room, t.memory[kind] if count == most else fixed + (t.memory[kind] - fixed) * most / count)
    ring_latency, ring_per_byte = measure_allreduce(w.common.servers[offset : offset + kept], own.links)
    costs[3, s] = ring_seconds(ring_latency, ring_per_byte, parameters)
    if t.layer_backward.size and kept > 1:
        gradients = t.layer_backward[w.slowest[0, s], w.slowest[1, s]] * w.slowest_factor[s]
        each = np.where(own.layer_parameters > 0, ring_latency + ring_per_byte * own.layer_parameters, 0.0)
        costs[3, s] = exposed_of(gradients, each, own.positions[first], own.positions[end])
    # Memory is that of the largest device: what the stage's own have less counts as fixed bytes.
    share = 1 / r if equal else most / size
    costs[4, s] = fixed + own.memory_bytes - room
    costs[5, s], costs[6, s] = stash * own.scale[z] * share, largest * own.scale[z] * share
    return float(max(0.0, costs[4, s] + costs[5, s] + costs[6, s] - own.memory_bytes))


def _sums(rows: Floats) -> Floats:
    """Return the sums of the first 0, 1 ... entries along the last axis."""
    return np.concatenate([np.zeros((*rows.shape[:-1], 1)), np.cumsum(rows, axis=-1)], axis=-1)
