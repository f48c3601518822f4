"""The seconds of a layout whose transfers and AllReduces share the servers' interfaces (``simulator.contention``)."""

from __future__ import annotations

import numpy as np

from dapple_tf.planner.layout import Layout, LayoutStep, LayoutTables, Workspace, simulate_layout
from dapple_tf.planner.step_simulation import SHARED_EVENTS
from dapple_tf.simulator.compiled import Integers, compiled, compiled_part
from dapple_tf.simulator.contention import measure_flows
from dapple_tf.simulator.order import early_backward_order
from dapple_tf.simulator.rings import Rings, layer_rings, whole_rings
from dapple_tf.simulator.shared_engine import shared_step_seconds
from dapple_tf.simulator.transfer import measure_allreduce


@compiled
def simulate_with_contention(
    t: LayoutTables, layout: Layout, w: Workspace, ceiling: float, extrapolate: bool
) -> LayoutStep:
    """Return the step with contention; its seconds are ``ceiling`` or more, perhaps infinite, where they reach it.

    See ``simulate_layout``. Contention never makes a step shorter, so a layout that reaches ``ceiling`` without it is
    not simulated again. Of the policies only the one that is the fastest without contention is simulated with it.
    """
    alone = simulate_layout(t, layout, w, ceiling, extrapolate)
    return add_contention(t, layout, w, alone, ceiling, extrapolate)


@compiled
def add_contention(
    t: LayoutTables, layout: Layout, w: Workspace, alone: LayoutStep, ceiling: float, extrapolate: bool
) -> LayoutStep:
    """Return the step with contention of a layout; ``alone``: what ``simulate_layout`` has just returned for it."""
    if alone.seconds >= ceiling or alone.policy < 0:
        return alone
    stages, m = layout.shape[0], t.micro_batches[layout.shape[1]]
    servers, offsets = w.servers[: w.offsets[stages]], w.offsets[: stages + 1]
    cuts = np.empty(len(servers) + stages, np.int64)  # the replicas of a stage have equal shares of the rows
    for s in range(stages):
        for i in range(offsets[s], offsets[s + 1] + 1):
            cuts[i + s] = i - offsets[s]
    flows = measure_flows(servers, offsets, cuts, np.ones(stages - 1, np.bool_), t.links)
    if flows.directions == 0:
        return alone
    forward, backward, send = w.costs[0][:stages], w.costs[1][:stages], w.costs[2][:stages]
    order, rings = early_backward_order(w.best_warm_up[:stages], m), _rings(t, layout, w, offsets)
    seconds, actions = shared_step_seconds(
        order, forward, backward, backward[:0], send, send, rings, flows, ceiling, extrapolate
    )
    return LayoutStep(seconds, alone.events + SHARED_EVENTS * actions, alone.policy)


@compiled_part
def _rings(t: LayoutTables, layout: Layout, w: Workspace, offsets: Integers) -> Rings:
    """Return the rings of the stages of a layout whose costs are in ``w``."""
    stages, z = layout.shape[0], layout.shape[1]
    if t.layer_backward.size == 0:
        return whole_rings(w.costs[3][:stages])
    gradients, bounds = np.empty((stages, t.layer_backward.shape[1])), np.empty(stages + 1, np.int64)
    latency, per_byte = np.empty(stages), np.empty(stages)
    for s in range(stages):
        r = offsets[s + 1] - offsets[s]
        gradients[s] = t.layer_backward[t.row[z, r]] * t.factor[z, r]
        latency[s], per_byte[s] = measure_allreduce(w.servers[offsets[s] : offsets[s + 1]], t.links)
        bounds[s] = t.positions[layout.starts[s]]
    bounds[stages] = t.positions[layout.starts[stages]]
    return layer_rings(gradients, t.layer_parameters, bounds, latency, per_byte, w.costs[3][:stages])
