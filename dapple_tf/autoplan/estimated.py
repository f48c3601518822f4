"""The schedule of given stages where nothing was profiled: by an estimate of each layer's work, and exact bytes.

What it takes to profile a model is some ten seconds, and for the choice between policies only the ratio of computing to
sending counts; for D, bytes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial

import tensorflow as tf

from dapple_tf.autoplan.estimate import Costs
from dapple_tf.autoplan.schedule_choice import Choice, choose_schedule
from dapple_tf.compiler import PlannedModel, StagedModel
from dapple_tf.memory.predict import StageMemory, predict_plan_memory
from dapple_tf.plan import Plan
from dapple_tf.planner.pricing import POLICIES
from dapple_tf.simulator.costs import StageCosts
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, transfer_cost
from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.graph import Port, Shape
from graph_passes.ir.names import at
from profiler.cluster import Cluster, Link
from profiler.detect import detect

# What joins the servers of a job that nobody has described: 10 Gbps Ethernet.
_BETWEEN_SERVERS = Link(bandwidth=1.25e9, latency=50e-6)
# Forward's work once more for each of the two kinds of gradients.
_BACKWARD_OVER_FORWARD = 2.0
# An exchange of ranks takes longer while they compute than links are said to: of equals the policy that hides it.
_BETWEEN_RANKS = ("dapple-b", "dapple-a", "gpipe")
# Where a device has so many times the bytes of a rough count, no schedule can lack any.
_AMPLE = 3.0


def cluster_at_hand(plan: Plan, *, ranks: bool) -> Cluster:
    """The devices of this process that ``plan`` uses, or all of the job's, be they more than there are cores."""
    return detect(None if ranks else sum(plan.replicas), os.environ, inter_server=_BETWEEN_SERVERS)


def choose_for_stages(
    planned: PlannedModel,
    costs: Costs,
    shapes: Mapping[str, Sequence[Shape]],
    slots: int,
    cluster: Cluster,
    *,
    ranks: bool = False,
) -> Choice:
    """Policy and D for the stages of a plan whose M is given, on the devices of ``cluster``.

    ``costs``: estimated, of one micro-batch over all replicas. ``shapes``: of forward's values for a micro-batch.
    ``slots``: values that the optimizer keeps of each weight. ``ranks``: the devices are a job's processes. Raises
    PlanError where no schedule fits.
    """
    rough = _estimate(planned.plan, planned.model, costs, cluster, slots, shapes)
    m = planned.plan.micro_batches
    most = max(cost.fixed_bytes + cost.working_bytes + m * cost.stash_bytes for cost in rough)
    ample = most * _AMPLE < cluster.device_memory
    stages = rough if ample else _with_memory(rough, predict_plan_memory(planned, ranks=ranks))
    policies = _BETWEEN_RANKS if ranks else POLICIES
    return choose_schedule({m: stages}, cluster.device_memory, policies=policies, measured=False)


def _estimate(
    plan: Plan, model: StagedModel, costs: Costs, cluster: Cluster, slots: int, shapes: Mapping[str, Sequence[Shape]]
) -> tuple[StageCosts, ...]:
    """Rough costs: seconds by each layer's arithmetic, bytes of what the stage functions hand on."""
    tables, variables = link_tables(cluster), find_variables(model.graph)
    homes = [[cluster.homes[d] for d in stage.devices] for stage in plan.stages]
    count = partial(_count_bytes, shapes=shapes, samples=plan.micro_batch_size)
    found = []
    for index, stage in enumerate(plan.stages):
        ahead, back = (model.graph.function(at(index, what=what)) for what in ("forward", "backward"))
        send = 0.0
        if index + 1 < len(plan.stages):
            latency, per_byte = transfer_cost(homes[index], homes[index + 1], tables)
            send = latency + per_byte * sum(count(port) for _, port in ahead.output_ports("boundary"))
        forward = sum(costs.layers[stage.first_layer : stage.last_layer + 1]) / stage.replicas
        again = sum(costs.layers[layer] for run in plan.runs(index) for layer in run) / stage.replicas
        stash = sum(count(port) for _, port in back.input_ports("stash", "boundary")) / stage.replicas
        owned = variables.owned(index)
        trained = sum(_size(model.variables[name]) for name in owned if name in model.gradients)
        reduced = allreduce_cost(homes[index], tables) * trained
        found.append(
            StageCosts(
                forward_seconds=forward,
                backward_seconds=_BACKWARD_OVER_FORWARD * forward + again,
                send_forward_seconds=send,
                send_backward_seconds=send,
                allreduce_seconds=reduced,
                exposed_seconds=reduced,
                fixed_bytes=sum(_size(model.variables[name]) for name in owned) + (1 + slots) * trained,
                stash_bytes=stash,
                working_bytes=stash,
            )
        )
    return tuple(found)


def _with_memory(costs: Sequence[StageCosts], memory: Sequence[StageMemory]) -> tuple[StageCosts, ...]:
    """The costs with bytes from a prediction."""
    return tuple(
        dataclasses.replace(
            cost,
            fixed_bytes=float(found.fixed),
            stash_bytes=float(found.stash),
            working_bytes=float(max(0, found.in_step - found.most_held * found.stash)),
        )
        for cost, found in zip(costs, memory, strict=True)
    )


def _count_bytes(port: Port, shapes: Mapping[str, Sequence[Shape]], samples: int) -> int:
    """Bytes of what a port carries, by the shape at the micro-batch's size where that is known."""
    node, _, index = port.name.removeprefix("%").rpartition(":")
    known = shapes.get(node, ())
    if index.isdecimal() and int(index) < len(known):
        return port.type.dtype.size * known[int(index)].elements(samples)
    return port.type.bytes(samples)


def _size(variable: tf.Variable) -> float:
    return float(variable.shape.num_elements() or 0) * float(variable.dtype.size)
