"""A plan as small arrays that a local search changes and simulates in microseconds: ``Layout`` and ``LayoutTables``.

Letters: S stages, N blocks of layers, L layers, D devices, Z micro-batch sizes, M micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.step_simulation import POLICIES
from dapple_tf.simulator.compiled import Floats, Integers, compiled, compiled_part
from dapple_tf.simulator.costs import exposed_of
from dapple_tf.simulator.early_backward import early_backward_seconds
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.transfer import LinkTables, link_tables, measure_allreduce, measure_transfer, ring_seconds

IDLE = -1
UNFIT = 1e12  # seconds of a layout that does not fit: more than any that does, and more for each byte that it lacks
_GPIPE = POLICIES.index("gpipe")


class MoveTables(NamedTuple):
    """The part of a problem's tables that local-search moves read: few arrays, since each adds seconds of compiling."""

    sizes: Integers  # [Z] samples of a micro-batch
    work: Floats  # [Z, N + 1] seconds of a micro-batch on one device, sums over the blocks before
    homes: Integers  # [D] the server of each device; of unequal devices one number for each server and kind
    speed: Floats  # [D] of each device, over that of the others
    unequal_links: bool  # whether some pairs of servers have links of their own
    may_recompute: bool


class LayoutTables(NamedTuple):
    """The tables from which the costs of all layouts of one problem are computed. Bytes are of the profile's batch."""

    moves: MoveTables
    micro_batches: Integers  # [Z]
    scale: Floats  # [Z] of the profile's bytes
    row: Integers  # [Z, D + 1] the row of seconds for each replica count
    factor: Floats  # [Z, D + 1] by which the seconds in that row are multiplied
    forward: Floats  # [rows, N + 1] seconds, sums over the blocks before
    backward: Floats  # [rows, N + 1]
    layer_backward: Floats  # [rows, L] seconds; of size 0 without overlap
    layer_parameters: Floats  # [L] bytes
    positions: Integers  # [N + 1] the first layer of each block
    parameters: Floats  # [N + 1] bytes, sums over the blocks before
    stash: Floats  # [N + 1] bytes, sums over the blocks before
    working: Floats  # [N] bytes
    boundary: Floats  # [N + 1] bytes that cross the cut before each block; 0 at both ends
    splittable: NDArray[np.bool_]  # [N + 1] whether stages of unequal replica counts can meet before each block
    links: LinkTables
    memory_bytes: float
    fixed_bytes_per_parameter_byte: float
    policies: Integers  # those that the schedule allows


class Layout(NamedTuple):
    """Stages as arrays. The devices are in an order, and those of a stage are the ones that it owns, in this order.

    ``shape``: S, and the index of the micro-batch size.
    """

    shape: NDArray[np.int64]  # [2]
    starts: NDArray[np.int64]  # [most stages + 1] the first block of each stage; entry S is N
    owner: NDArray[np.int64]  # [D] the stage of each device, in the device order, or IDLE
    device_at: NDArray[np.int64]  # [D] the device order: the device at each index
    recompute: NDArray[np.bool_]  # [most stages]


class Workspace(NamedTuple):
    """Arrays for simulating layouts, allocated once for all of them."""

    costs: Floats  # [7, most stages] forward, backward, send, exposed seconds; fixed, stash, working bytes
    arrival: Floats  # [most stages, most M]
    servers: Integers  # [D] of the devices of all stages, one stage after the other
    offsets: Integers  # [most stages + 1] where each stage's begin
    warm_up: Integers  # [most stages] K_i of the policy that is simulated
    best_warm_up: Integers  # [most stages] K_i of the fastest policy
    names: Integers  # [D] numbers from 0 of the servers of one boundary; all IDLE outside of ``measure_boundary``


class LayoutStep(NamedTuple):
    """Seconds of a step (``UNFIT`` and more if it does not fit), simulated events, and the policy's index, or -1."""

    seconds: float
    events: int
    policy: int


def make_layout_tables(problem: PlanningProblem, sizes: Integers, may_recompute: bool) -> LayoutTables:
    """Return the tables of a problem for these micro-batch ``sizes``; its schedule is "auto" or in ``POLICIES``."""
    chain, profile, devices = problem.chain, problem.profile, problem.cluster.devices
    counts = np.arange(1, devices + 1)
    samples = sizes[:, None] / counts
    if profile.timings:
        distinct, row = np.unique(samples, return_inverse=True)
        row, factor = row.reshape(samples.shape), np.ones(samples.shape)
    else:  # seconds are proportional to the samples
        distinct = np.array([float(profile.batch_size)])
        row, factor = np.zeros(samples.shape, np.int64), samples / profile.batch_size
    seconds = [chain.block_seconds(n) for n in distinct]
    layers = [profile.backward_seconds(n) for n in distinct] if problem.overlap else []
    first = np.zeros((len(sizes), 1), np.int64)
    forward, backward = _sums(np.array([f for f, _ in seconds])), _sums(np.array([b for _, b in seconds]))
    work = (forward + backward)[row[:, 0]] * factor[:, :1]
    return LayoutTables(
        moves=MoveTables(
            sizes=sizes,
            work=work,
            homes=np.array(problem.cluster.homes, np.int64),
            speed=np.ones(devices),
            unequal_links=bool(problem.cluster.links),
            may_recompute=may_recompute,
        ),
        micro_batches=problem.global_batch_size // sizes,
        scale=sizes / profile.batch_size,
        row=np.hstack([first, row]).astype(np.int64),
        factor=np.hstack([first.astype(np.float64), factor]),
        forward=forward,
        backward=backward,
        layer_backward=np.array(layers).reshape(len(layers), len(profile.layers)),
        layer_parameters=np.array(profile.parameter_bytes),
        positions=np.array(chain.positions, np.int64),
        parameters=_sums(chain.parameter_bytes),
        stash=_sums(chain.stash_bytes),
        working=np.array(chain.working_bytes),
        boundary=np.concatenate([[0.0], chain.crossing_bytes, [0.0]]),
        splittable=np.concatenate([[True], chain.splittable, [True]]),
        links=link_tables(problem.cluster),
        memory_bytes=usable_bytes(problem.cluster.least_memory),
        fixed_bytes_per_parameter_byte=2.0 + problem.optimizer_slots,
        policies=np.array([i for i, name in enumerate(POLICIES) if problem.schedule in (name, "auto")], np.int64),
    )


def _sums(rows: Floats) -> Floats:
    """Return the sums of the first 0, 1 ... entries along the last axis."""
    return np.concatenate([np.zeros((*rows.shape[:-1], 1)), np.cumsum(rows, axis=-1)], axis=-1)


@compiled
def make_layout(most_stages: int, devices: int) -> Layout:
    """Return an empty layout."""
    return Layout(
        np.zeros(2, np.int64),
        np.zeros(most_stages + 1, np.int64),
        np.full(devices, IDLE),
        np.arange(devices),
        np.zeros(most_stages, np.bool_),
    )


@compiled
def copy_layout(source: Layout, target: Layout) -> None:
    """Write one layout over another with equally large arrays."""
    target.shape[:] = source.shape
    target.starts[:] = source.starts
    target.owner[:] = source.owner
    target.device_at[:] = source.device_at
    target.recompute[:] = source.recompute


@compiled
def make_workspace(most_stages: int, devices: int, most_micro_batches: int) -> Workspace:
    """Return empty arrays for simulating layouts."""
    return Workspace(
        np.zeros((7, most_stages)),
        np.zeros((most_stages, most_micro_batches)),
        np.zeros(devices, np.int64),
        np.zeros(most_stages + 1, np.int64),
        np.zeros(most_stages, np.int64),
        np.zeros(most_stages, np.int64),
        np.full(devices, IDLE),
    )


@compiled_part
def measure_boundary(senders: Integers, receivers: Integers, t: LayoutTables, w: Workspace) -> tuple[float, float]:
    """Return ``measure_transfer``, faster where no pair of servers has its own link: of the boundary's servers only."""
    if t.moves.unequal_links:
        return measure_transfer(senders, receivers, t.links)
    count, both = 0, np.concatenate((senders, receivers))
    for i, server in enumerate(both):
        if w.names[server] == IDLE:
            w.names[server] = count
            count += 1
        both[i] = w.names[server]
    for server in senders:
        w.names[server] = IDLE
    for server in receivers:
        w.names[server] = IDLE
    x, none = t.links, np.zeros((count, count))
    few = LinkTables(
        x.inside[:count], x.inside_latency[:count], x.interface, x.interface_latency, none, none, x.has_own
    )
    return measure_transfer(both[: len(senders)], both[len(senders) :], few)


@compiled_part
def fill_costs(t: LayoutTables, layout: Layout, w: Workspace) -> float:
    """Write the costs of the stages into ``w.costs``; return the bytes that the devices lack.

    Bytes are those with one micro-batch in flight. Infinite where a replica gets no sample, where a stage has no
    device, and where stages of unequal replica counts meet at a tensor that cannot be split.
    """
    stages, z = layout.shape[0], layout.shape[1]
    w.offsets[: stages + 1] = 0
    for s in layout.owner:
        if s >= 0:
            w.offsets[s + 1] += 1
    for s in range(stages):
        r = w.offsets[s + 1]
        if r == 0 or r > t.moves.sizes[z]:
            return np.inf
        if s and not t.splittable[layout.starts[s]] and r != w.offsets[s] - w.offsets[s - 1]:
            return np.inf
        w.offsets[s + 1] += w.offsets[s]
    entry = w.offsets[:stages].copy()
    for i, s in enumerate(layout.owner):
        if s >= 0:
            w.servers[entry[s]] = t.moves.homes[layout.device_at[i]]
            entry[s] += 1
    lacking, scale = 0.0, t.scale[z]
    for s in range(stages):
        first, end = layout.starts[s], layout.starts[s + 1]
        homes = w.servers[w.offsets[s] : w.offsets[s + 1]]
        r = len(homes)
        row, factor = t.row[z, r], t.factor[z, r]
        forward = factor * (t.forward[row, end] - t.forward[row, first])
        backward = factor * (t.backward[row, end] - t.backward[row, first])
        stash, largest = t.stash[end] - t.stash[first], t.working[first:end].max()
        if layout.recompute[s]:
            backward, largest, stash = backward + forward, largest + stash, t.boundary[first]
        parameters = t.parameters[end] - t.parameters[first]
        ring_latency, ring_per_byte = measure_allreduce(homes, t.links)
        ring = ring_seconds(ring_latency, ring_per_byte, parameters)
        w.costs[0, s], w.costs[1, s], w.costs[2, s], w.costs[3, s] = forward, backward, 0.0, ring
        if t.layer_backward.size and r > 1:
            gradients = t.layer_backward[row] * factor
            each = np.where(t.layer_parameters > 0, ring_latency + ring_per_byte * t.layer_parameters, 0.0)
            w.costs[3, s] = exposed_of(gradients, each, t.positions[first], t.positions[end])
        if s + 1 < stages:
            receivers = w.servers[w.offsets[s + 1] : w.offsets[s + 2]]
            latency, per_byte = measure_boundary(homes, receivers, t, w)
            w.costs[2, s] = latency + per_byte * t.boundary[end] * scale
        w.costs[4, s] = parameters * t.fixed_bytes_per_parameter_byte
        w.costs[5, s], w.costs[6, s] = stash * scale / r, largest * scale / r
        lacking += max(0.0, w.costs[4, s] + w.costs[5, s] + w.costs[6, s] - t.memory_bytes)
    return lacking


@compiled_part
def least_seconds(costs: Floats, stages: int, micro_batches: int) -> float:
    """Return a lower bound of the step under every policy.

    It is the largest, over stages and boundaries, of the time before its first forward or transfer can start, its work
    for all micro-batches, and the time after its last one to the end of the step. ``costs``: see ``Workspace``.
    """
    before, drain, bound = 0.0, 0.0, 0.0
    for s in range(stages):
        f, b, exposed = costs[0, s], costs[1, s], costs[3, s]
        send = costs[2, s - 1] if s else 0.0
        if s:
            before += send
            drain += send + costs[1, s - 1]
            bound = max(bound, before + (micro_batches - 1) * send + f + b + drain)
        drain = max(exposed, drain)
        bound = max(bound, before + micro_batches * (f + b) + drain)
        before += f
    return bound


@compiled_part
def simulate_layout(t: LayoutTables, layout: Layout, w: Workspace, ceiling: float, extrapolate: bool) -> LayoutStep:
    """Return the step under the fastest policy allowed; its seconds are infinite where they reach ``ceiling``.

    The K_i of that policy are left in ``w.best_warm_up``. Contention does not count; see ``add_contention``.

    ``extrapolate``: see ``early_backward_seconds``. GPipe is hardly ever the fastest policy, so it is then
    simulated only where the schedule names it.
    """
    return simulate_costs(t, layout, w, fill_costs(t, layout, w), ceiling, extrapolate)


@compiled_part
def simulate_costs(
    t: LayoutTables, layout: Layout, w: Workspace, lacking: float, ceiling: float, extrapolate: bool
) -> LayoutStep:
    """Return ``simulate_layout`` of stages whose costs are in ``w.costs`` already; ``lacking``: bytes of memory."""
    if lacking > 0:
        return LayoutStep(UNFIT * (1 + lacking / t.memory_bytes), 0, -1)
    stages, m = layout.shape[0], t.micro_batches[layout.shape[1]]
    best, events, fastest = np.inf, 0, -1
    bound = least_seconds(w.costs, stages, m)
    if bound >= ceiling:
        return LayoutStep(np.inf, 0, -1)
    c, warm_up = w.costs[:, :stages], w.warm_up[:stages]
    for policy in t.policies[::-1]:
        if extrapolate and policy == _GPIPE and len(t.policies) > 1:
            continue
        limit = set_warm_up(t, c, policy, m, warm_up)
        if limit < 1 or (limit < m and policy == _GPIPE):
            continue
        reach = min(ceiling, best)
        seconds = early_backward_seconds(warm_up, m, c[0], c[1], c[2], c[3], reach, w.arrival, extrapolate)
        events += 2 * stages * m
        if seconds < best:
            best, fastest = seconds, policy
            w.best_warm_up[:stages] = warm_up
            if seconds <= bound * (1 + 1e-9):
                break
    return LayoutStep(best, events, fastest)


@compiled_part
def set_warm_up(t: LayoutTables, costs: Floats, policy: int, micro_batches: int, warm_up: Integers) -> int:
    """Write K_i under a policy, within the memory; return D, the most in flight.

    D is M where memory does not limit it, and below 1 where not even one micro-batch fits.
    """
    stages, limit = len(warm_up), micro_batches
    for s in range(stages):
        k = micro_batches if policy == _GPIPE else stages - s if policy == 0 else 2 * (stages - s) - 1
        warm_up[s] = min(k, micro_batches)
        room = t.memory_bytes - costs[4, s] - costs[6, s]
        if room < warm_up[s] * costs[5, s]:
            limit = min(limit, int(room / costs[5, s]))
    for s in range(stages):
        warm_up[s] = min(warm_up[s], limit)
    return limit
