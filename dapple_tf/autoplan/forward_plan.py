"""The plan of a function that only runs forward: its stages are where training has the same layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from dapple_tf.autoplan.layer_estimates import EstimatedCosts
from dapple_tf.autoplan.options import Options
from dapple_tf.autoplan.stages_requested import plan_requested_stages
from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.passes.partition import balance
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.plans import Plan, StagePlan


def follow_plan(plan: Plan, names: Sequence[str], layers: Layers, costs: EstimatedCosts, *, all_devices: bool) -> Plan:
    """Return ``plan`` for the ``layers`` of another function of the same model.

    ``names``: the names of the layers that ``plan`` counts; without any the stages are balanced by ``costs``. A stage
    starts at its first layer that the other function has too, so that its variables stay on its devices. A stage that
    has no such layer (only dropout, for example) is left out. With ``all_devices`` the devices of a worker that keeps
    no stage become replicas of the worker of the stage before. The rows of an asynchronous window are a batch here.
    """
    found = list(zip(plan.stages, _find_starts(plan, names, layers, costs), strict=True))
    devices = _keep_devices(found, all_devices=all_devices)
    kept = []
    for stage, start in found:
        if start is not None:  # it keeps its shares with its own devices
            own = devices[stage.devices]
            kept.append(StagePlan(start, start, own, stage.shares if own == stage.devices else None))
    return dataclasses.replace(plan, stages=_until_next(kept, layers), recompute=False, predicted=None, window=None)


def without_cuts(plan: Plan) -> Plan:
    """Return ``plan`` for the batch as one micro-batch, for a function that combines the samples of its batch."""
    return dataclasses.replace(plan, micro_batches=1, micro_batch_size=plan.global_batch_size, schedule="gpipe")


def plan_forward(options: Options, layers: Layers, costs: EstimatedCosts, devices: int, *, all_devices: bool) -> Plan:
    """Return a plan for ``layers`` before training has one: as requested, or one stage per device for "auto".

    There are fewer stages if the function can be cut in fewer places, or lacks layers that should start a stage; with
    ``all_devices`` the last stage then has more replicas. Raises the errors of ``plan_requested_stages``.
    """
    options = options.forward_only()
    count = options.count_micro_batches(8)
    enough = max(options.replicas or (1,)) * count  # the plan is fitted to each batch later
    if options.stages_are_auto:  # the planner of training may share devices; this plan is only for until then
        options = dataclasses.replace(options, schedule="gpipe")
    if options.given_sizes:  # those of the first batch of training
        options = dataclasses.replace(options, micro_batches=count)
    if options.spec is not None and options.spec.runs_several_stages:
        with contextlib.suppress(PartitionError):  # it has fewer places to cut, or other layers: see below
            return plan_requested_stages(dataclasses.replace(options, recompute=False), layers, costs, enough, devices)
        options = _one_stage_per_worker(options, options.spec)
    stages, most = options.stages, len(layers.positions()) + 1
    if options.stages_are_auto:
        stages = min(devices, most)
    elif options.replicas is None:
        stages = min(stages, most) if isinstance(stages, int) else [name for name in stages if _has(layers, name)]
    wanted = dataclasses.replace(options, stages=stages, schedule="gpipe", recompute=False)
    plan = plan_requested_stages(wanted, layers, costs, enough, devices)
    used = plan.device_count
    if all_devices and used < devices:
        last = dataclasses.replace(plan.stages[-1], devices=(*plan.stages[-1].devices, *range(used, devices)))
        plan = dataclasses.replace(plan, stages=(*plan.stages[:-1], last))
    return plan


def _one_stage_per_worker(options: Options, spec: ScheduleSpec) -> Options:
    """Return the options with as many stages as the schedule ``spec`` has workers, each on one worker's devices."""
    if options.replicas is not None:
        workers = len(options.replicas)
    else:
        stages = options.stages if isinstance(options.stages, int) else len(options.stages) + 1
        workers = spec.worker_map(stages).workers
    return dataclasses.replace(options, stages=workers, schedule="gpipe")


def _has(layers: Layers, name: str) -> bool:
    return any(name == layer.name or f"/{name}/" in f"/{layer.name}/" for layer in layers.layers)


def _find_starts(plan: Plan, names: Sequence[str], layers: Layers, costs: EstimatedCosts) -> list[int | None]:
    """Return the first layer of every stage, None for one without a layer in common."""
    if not names:
        possible = layers.positions()
        count = min(len(plan.stages) - 1, len(possible))
        found = balance(costs.layers, possible, [costs.cuts[p - 1] for p in possible], count + 1)
        return [0, *found, *[None] * (len(plan.stages) - 1 - count)]
    positions = {layer.name: index for index, layer in enumerate(layers.layers)}
    starts: list[int | None] = [0]
    last = 0
    for stage in plan.stages[1:]:
        common = (positions.get(name, 0) for name in names[stage.first_layer : stage.last_layer + 1])
        start = next((p for p in common if p > last and not layers.cut(p).problem), None)
        starts.append(start)
        last = last if start is None else start
    return starts


def _keep_devices(
    found: Sequence[tuple[StagePlan, int | None]], *, all_devices: bool
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the devices of each worker that keeps a stage, by those that it has in training.

    ``found``: the stages of training, each with its start, None where it is left out; see ``follow_plan``.
    """
    kept = {stage.devices: stage.devices for stage, start in found if start is not None}
    idle = {stage.devices for stage, _ in found if all_devices} - kept.keys()
    before = found[0][0].devices
    for stage, start in found:
        if start is not None:
            before = stage.devices
        elif stage.devices in idle:
            kept[before] += stage.devices
            idle.remove(stage.devices)
    return kept


def _until_next(stages: Sequence[StagePlan], layers: Layers) -> tuple[StagePlan, ...]:
    """Return the stages, each of which ends before the next one starts."""
    ends = [*(stage.first_layer for stage in stages[1:]), len(layers.layers)]
    return tuple(dataclasses.replace(stage, last_layer=end - 1) for stage, end in zip(stages, ends, strict=True))
