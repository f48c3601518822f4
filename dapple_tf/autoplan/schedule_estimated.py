"""``schedule="auto"`` for given stages without a profile: from estimated seconds and exact bytes.

Profiling a model takes about ten seconds. The choice between policies depends only on the ratio of compute to transfer
time, for which an estimate is enough; D depends on bytes, which are known exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

from dapple_tf import variable_values
from dapple_tf.autoplan.layer_estimates import BACKWARD_OVER_FORWARD, EstimatedCosts
from dapple_tf.autoplan.schedule_auto import ScheduleChoice, choose_schedule, with_found_order
from dapple_tf.compiler import PlannedModel
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import Port, Shape
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.memory.meter import packs_operands
from dapple_tf.memory.predict import StageMemory, predict_plan_memory
from dapple_tf.planner.step_simulation import POLICIES
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster, Link
from dapple_tf.simulator.contention import plan_flows
from dapple_tf.simulator.memory import values_per_weight
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, ring_seconds, transfer_cost
from dapple_tf.staged_model import StagedModel
from dapple_tf.timeline.stage_costs import StageCosts

# Assumed between the servers of a job where no cluster is given: 10 Gbps Ethernet.
_ETHERNET_10 = Link(bandwidth=1.25e9, latency=50e-6)
# Between processes a transfer takes longer while they compute than a link's figures say: among equally fast policies,
# the one that hides transfers best comes first.
_POLICIES_OF_RANKS = ("dapple-b", "dapple-a", "gpipe")
# A rough count of bytes is enough where a device has at least this many times as much memory.
_AMPLE_MEMORY = 3.0


def detect_cluster(plan: Plan, *, ranks: bool) -> Cluster:
    """Return the cluster of the devices of this process that ``plan`` uses, or of all ``ranks`` of the job.

    There may be more devices than cores. Raises ClusterError where the job's environment cannot be read.
    """
    return Cluster.detect(None if ranks else plan.device_count, inter_server=_ETHERNET_10)


def choose_estimated_schedule(
    planned: PlannedModel,
    costs: EstimatedCosts,
    shapes: Mapping[str, Sequence[Shape]],
    slots: int,
    cluster: Cluster,
    *,
    ranks: bool = False,
) -> ScheduleChoice:
    """Return policy and D for the stages and M of a plan, on the devices of ``cluster``; for ``zb-auto`` the order too.

    ``costs``: estimates for one micro-batch over all replicas. ``shapes``: those of forward's values for a micro-batch.
    ``slots``: values that the optimizer keeps per weight. ``ranks``: whether the devices are the processes of a job.
    Raises PlanError where no schedule fits the memory.
    """
    stages = _estimate_stage_costs(planned.plan, planned.model, costs, cluster, slots, shapes)
    m = planned.plan.micro_batches
    largest = max(stage.fixed_bytes + stage.working_bytes + m * stage.stash_bytes for stage in stages)
    if largest * _AMPLE_MEMORY >= cluster.least_memory:
        stages = _with_predicted_memory(stages, predict_plan_memory(planned, ranks=ranks, packs=packs_operands()))
    flows = plan_flows(planned.plan.stages, cluster)
    if planned.plan.spec.is_searched:
        # W is estimated to take as long as F: half of a backward without re-computation.
        split = [dataclasses.replace(stage, weights_seconds=stage.forward_seconds) for stage in stages]
        policy = (planned.plan.schedule,)
        choice = choose_schedule({m: split}, cluster.least_memory, policies=policy, measured=False, flows=flows)
        return with_found_order(choice, planned.plan.stages, {m: split}, flows)
    policies = _POLICIES_OF_RANKS if ranks else POLICIES
    return choose_schedule({m: stages}, cluster.least_memory, policies=policies, measured=False, flows=flows)


def _estimate_stage_costs(
    plan: Plan,
    model: StagedModel,
    costs: EstimatedCosts,
    cluster: Cluster,
    slots: int,
    shapes: Mapping[str, Sequence[Shape]],
) -> tuple[StageCosts, ...]:
    """Return rough costs: seconds from each layer's arithmetic, bytes from the ports of the stage functions."""
    tables, variables = link_tables(cluster), find_variables(model.graph)
    homes = [[cluster.homes[d] for d in stage.devices] for stage in plan.stages]
    port_bytes = partial(_count_port_bytes, shapes=shapes, samples=plan.micro_batch_size)
    found = []
    for index, stage in enumerate(plan.stages):
        forward_function, backward_function = (
            model.graph.function(at(index, what=what)) for what in ("forward", "backward")
        )
        send = 0.0
        if index + 1 < len(plan.stages) and plan.stages[index + 1].devices != stage.devices:
            latency, per_byte = transfer_cost(homes[index], homes[index + 1], tables)
            send = latency + per_byte * sum(port_bytes(port) for _, port in forward_function.output_ports("boundary"))
        forward = sum(costs.layers[stage.first_layer : stage.last_layer + 1]) / stage.replicas
        recomputed = sum(costs.layers[layer] for run in plan.runs(index) for layer in run) / stage.replicas
        stashed = [port for _, port in backward_function.input_ports("stash", "boundary")]
        stash = sum(port_bytes(port) for port in stashed) / stage.replicas
        owned = variables.owned(index)
        sizes = {name: variable_values.variable_bytes(model.variables[name]) for name in owned}
        held, trained = sum(sizes.values()), sum(size for name, size in sizes.items() if name in model.trained)
        allreduce = ring_seconds(*allreduce_cost(homes[index], tables), trained)
        found.append(
            StageCosts(
                forward_seconds=forward,
                backward_seconds=BACKWARD_OVER_FORWARD * forward + recomputed,
                send_forward_seconds=send,
                send_backward_seconds=send,
                allreduce_seconds=allreduce,
                exposed_seconds=allreduce,
                fixed_bytes=held + (values_per_weight(slots, plan.slot_replicas(stage)) - 1) * trained,
                stash_bytes=stash,
                working_bytes=stash,
            )
        )
    return tuple(found)


def _with_predicted_memory(costs: Sequence[StageCosts], memory: Sequence[StageMemory]) -> tuple[StageCosts, ...]:
    """Return the costs with the bytes of a memory prediction."""
    return tuple(
        dataclasses.replace(
            cost,
            fixed_bytes=float(found.fixed),
            stash_bytes=float(found.stash),
            working_bytes=float(max(0, found.in_step - found.in_flight * found.stash)),
        )
        for cost, found in zip(costs, memory, strict=True)
    )


def _count_port_bytes(port: Port, shapes: Mapping[str, Sequence[Shape]], samples: int) -> int:
    """Return the bytes of a port's tensor for ``samples`` samples, by its inferred shape where that is known."""
    node, _, index = port.name.removeprefix("%").rpartition(":")
    known = shapes.get(node, ())
    if index.isdecimal() and int(index) < len(known):
        return port.type.dtype.size * known[int(index)].elements(samples)
    return port.type.bytes(samples)
