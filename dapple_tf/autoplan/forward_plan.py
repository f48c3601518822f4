"""The plan of a function that only runs forward: its stages are where training has the same layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dapple_tf.autoplan.layer_estimates import EstimatedCosts
from dapple_tf.autoplan.request import Request
from dapple_tf.autoplan.stages_requested import plan_requested_stages
from dapple_tf.plan import Plan, StagePlan
from graph_passes.analysis.layers import Layers


def follow_plan(plan: Plan, names: Sequence[str], layers: Layers, costs: EstimatedCosts) -> Plan:
    """Return ``plan`` for the ``layers`` of another function of the same model.

    ``names``: of the layers that ``plan`` counts. A stage starts at its first layer that the other function has too, so
    that its variables stay on its devices; dropout, say, is no layer of a function that does not train. Where a stage
    has no such layer, as many stages are balanced by ``costs``.
    """
    starts = _find_starts(plan, names, layers)
    if starts is None:
        request = Request(len(plan.stages), plan.replicas, plan.micro_batches, "gpipe")
        balanced = plan_requested_stages(request, layers, costs, _enough(request), sum(plan.replicas))
        starts = list(balanced.starts)
    bounds = [0, *starts, len(layers.layers)]
    stages = (
        StagePlan(first, end - 1, stage.devices)
        for stage, first, end in zip(plan.stages, bounds, bounds[1:], strict=False)
    )
    return dataclasses.replace(plan, stages=tuple(stages), recompute=False, predicted=None)


def plan_forward(request: Request, layers: Layers, costs: EstimatedCosts, devices: int) -> Plan:
    """Return a plan for ``layers`` before training has one: as requested, or one stage a device where that is "auto".

    Raises what ``plan_requested_stages`` raises.
    """
    stages = request.stages
    if request.stages_are_auto:
        stages = min(devices, len(layers.positions()) + 1)
    wanted = dataclasses.replace(request, stages=stages, schedule="gpipe", recompute=False)
    return plan_requested_stages(wanted, layers, costs, _enough(wanted), devices)


def _enough(request: Request) -> int:
    """Return a number of samples that is enough for the request: the plan is fitted to each batch later."""
    replicas = max(request.replicas or (1,))
    return replicas * request.count_micro_batches(8 * replicas, replicas)


def _find_starts(plan: Plan, names: Sequence[str], layers: Layers) -> list[int] | None:
    """Return the first layer of every stage but the first; None where a stage has no layer in common."""
    positions = {layer.name: index for index, layer in enumerate(layers.layers)}
    starts = [0]
    for stage in plan.stages[1:]:
        found = (positions.get(name, 0) for name in names[stage.first_layer : stage.last_layer + 1])
        start = next((p for p in found if p > starts[-1] and not layers.cut(p).problem), None)
        if start is None:
            return None
        starts.append(start)
    return starts[1:]
