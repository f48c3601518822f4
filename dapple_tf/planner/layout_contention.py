"""The seconds of a layout whose transfers and AllReduces share the servers' interfaces (``simulator.contention``)."""

from __future__ import annotations

import numpy as np

from dapple_tf.planner.layout import Layout, LayoutStep, LayoutTables, Workspace
from dapple_tf.planner.step_simulation import CONTENTION_FACTOR
from dapple_tf.simulator.compiled import Floats, Integers, compiled_part
from dapple_tf.simulator.contention import measure_flows
from dapple_tf.simulator.order import early_backward_order
from dapple_tf.simulator.rings import Rings, layer_rings, whole_rings
from dapple_tf.simulator.shared_engine import shared_step_seconds
from dapple_tf.simulator.transfer import measure_allreduce


@compiled_part
def add_contention_of_equals(
    t: LayoutTables, layout: Layout, w: Workspace, alone: LayoutStep, ceiling: float, extrapolate: bool
) -> LayoutStep:
    """Return ``add_contention`` of a layout of equal devices, whose replicas have equal shares of the rows."""
    stages = layout.shape[0]
    servers, offsets = w.servers[: w.offsets[stages]], w.offsets[: stages + 1]
    cuts = np.empty(len(servers) + stages, np.int64)  # the replicas of a stage have equal shares of the rows
    for s in range(stages):
        for i in range(offsets[s], offsets[s + 1] + 1):
            cuts[i + s] = i - offsets[s]
    gradients = np.empty((stages, t.layer_backward.shape[1]))
    for s in range(stages) if t.layer_backward.size else range(0):
        r = offsets[s + 1] - offsets[s]
        gradients[s] = t.layer_backward[t.row[layout.shape[1], r]] * t.factor[layout.shape[1], r]
    return add_contention(t, layout, w, alone, cuts, gradients, ceiling, extrapolate)


@compiled_part
def add_contention(
    t: LayoutTables,
    layout: Layout,
    w: Workspace,
    alone: LayoutStep,
    cuts: Integers,
    gradients: Floats,
    ceiling: float,
    extrapolate: bool,
) -> LayoutStep:
    """Return the step with contention of a layout that was simulated last, without it: ``alone``.

    At least ``ceiling``, perhaps infinite, where it reaches ``ceiling`` seconds. Contention never makes a step shorter,
    so a layout that reaches ``ceiling`` without it is not simulated again. Only the policy that is the fastest without
    contention is simulated with it.
    ``cuts``: as in ``measure_flows``. ``gradients`` [S, L]: seconds of each layer's backward on the replica of each
    stage that takes longest; not read without overlap.
    """
    if alone.seconds >= ceiling or alone.policy < 0:
        return alone
    stages, m = layout.shape[0], t.micro_batches[layout.shape[1]]
    servers, offsets = w.servers[: w.offsets[stages]], w.offsets[: stages + 1]
    flows = measure_flows(servers, offsets, cuts, np.ones(stages - 1, np.bool_), t.links)
    if flows.directions == 0:
        return alone
    forward, backward, send = w.costs[0][:stages], w.costs[1][:stages], w.costs[2][:stages]
    order, rings = early_backward_order(w.best_warm_up[:stages], m), _rings(t, layout, w, offsets, gradients)
    seconds, actions = shared_step_seconds(
        order, forward, backward, backward[:0], send, send, rings, flows, ceiling, extrapolate
    )
    return LayoutStep(seconds, alone.events + CONTENTION_FACTOR * actions, alone.policy)


@compiled_part
def _rings(t: LayoutTables, layout: Layout, w: Workspace, offsets: Integers, gradients: Floats) -> Rings:
    """Return the rings of the stages of a layout whose costs are in ``w``."""
    stages = layout.shape[0]
    if t.layer_backward.size == 0:
        return whole_rings(w.costs[3][:stages])
    bounds = np.empty(stages + 1, np.int64)
    latency, per_byte = np.empty(stages), np.empty(stages)
    for s in range(stages):
        latency[s], per_byte[s] = measure_allreduce(w.servers[offsets[s] : offsets[s + 1]], t.links)
        bounds[s] = t.positions[layout.starts[s]]
    bounds[stages] = t.positions[layout.starts[stages]]
    return layer_rings(gradients, t.layer_parameters, bounds, latency, per_byte, w.costs[3][:stages])
