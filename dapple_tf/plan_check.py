"""Check that a plan fits a profile and a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.analysis.row_bounds import least_rows
from dapple_tf.plans import Plan, check_workers
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile
from dapple_tf.profiler.quote import quote
from dapple_tf.profiler.units import format_samples

_KINDS: Mapping[str, type] = {"plan": Plan, "profile": Profile, "cluster": Cluster}


def check_inputs(**inputs: object) -> None:
    """Raise PlanError for an argument that is no Plan, Profile or Cluster; each has the name of one of them."""
    for name, value in inputs.items():
        kind = _KINDS[name]
        if not isinstance(value, kind):
            raise PlanError(f"{name} is a {type(value).__name__}: read a file with dapple.{kind.__name__}.load(path)")


def check_optimizer_slots(value: object) -> None:
    """Raise PlanError unless ``value`` is a finite number of at least 0."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise PlanError(f"optimizer_slots is {quote(value)}, not a finite number of at least 0")
    if value < 0:
        raise PlanError(f"optimizer_slots is {value}; it must be at least 0")


def check_plan(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """Raise PlanError, naming the stage, where the plan does not fit the profile's layers or the cluster's devices."""
    if plan.virtual_workers:
        _check_part_of_batch(plan)
        for part in plan.virtual_workers:
            check_plan(part, profile, cluster)
        return
    _check_batch(plan)
    _check_layers(plan, profile)
    _check_devices(plan, cluster)
    _check_positions(plan, profile)


def _check_part_of_batch(plan: Plan) -> None:
    count = len(plan.virtual_workers)
    if plan.micro_batch_size * plan.micro_batches * count != plan.global_batch_size or plan.sizes or plan.window:
        raise PlanError(
            f"micro_batch_size {plan.micro_batch_size} x micro_batches {plan.micro_batches} x {count} virtual workers "
            f"is not global_batch_size {plan.global_batch_size}: virtual workers take equal parts of the batch, in "
            "equal micro-batches, and have no asynchronous windows"
        )


def _check_batch(plan: Plan) -> None:
    equal = plan.training.cuts_evenly(plan.global_batch_size, plan.micro_batches, plan.micro_batch_size)
    if not (equal or plan.sizes) or plan.global_batch_size < 1:
        raise PlanError(
            f"micro_batch_size {plan.micro_batch_size} x micro_batches {plan.micro_batches} is not global_batch_size "
            f"{plan.global_batch_size}: choose micro-batches that divide the batch"
        )
    least = min(plan.sizes, default=plan.micro_batch_size)
    for index, replicas in enumerate(plan.sharing):
        if replicas > least:
            raise PlanError(
                f"stage {index} has {replicas} replicas, but a micro-batch has "
                f"{format_samples(least)}: use larger micro-batches or fewer replicas"
            )
    check_shares(plan, least)


def check_shares(plan: Plan, least: int) -> None:
    """Raise PlanError if a replica gets no row of a micro-batch of ``least`` samples because its share is too small."""
    for index, stage in enumerate(plan.stages):
        if stage.row_shares and least_rows(stage.replicas, stage.row_shares) > least:
            place = stage.fractions.index(min(stage.fractions))
            raise PlanError(
                f"stage {index}: device {stage.devices[place]} has the share {stage.fractions[place]:.4g} of the rows, "
                f"and would get none of a micro-batch of {format_samples(least)}: use micro-batches of at least "
                f"{least_rows(stage.replicas, stage.row_shares)}, or leave the device out"
            )


def _check_layers(plan: Plan, profile: Profile) -> None:
    count, end = len(profile.layers), plan.stages[-1].last_layer
    if end != count - 1:
        raise PlanError(
            f"the stages end at layer {end} (stage {len(plan.stages) - 1}), but the profile of {profile.model!r} has "
            f"the layers 0 to {count - 1}: give the profile that the plan was made for, or plan again"
        )


def _check_devices(plan: Plan, cluster: Cluster) -> None:
    for index, stage in enumerate(plan.stages):
        for device in stage.devices:
            if device >= cluster.devices:
                raise PlanError(
                    f"stage {index} is on device {device}, but the cluster has the devices 0 to "
                    f"{cluster.devices - 1}: give the cluster that the plan was made for, such as "
                    f"config-a:{len(plan.device_numbers)}, or plan again"
                )
    check_workers(plan)


def _check_positions(plan: Plan, profile: Profile) -> None:
    for index, start in enumerate(plan.starts, 1):
        name = profile.layers[start].name
        if start in profile.uncuttable:
            raise PlanError(
                f"stage {index} starts at layer {start} ({name}), where the model cannot be cut: start it at one of "
                f"{_list_some(profile, start)}"
            )
        before, after = plan.replicas[index - 1], plan.replicas[index]
        if start not in profile.unsplittable:
            continue
        if plan.stages[index - 1].row_shares != plan.stages[index].row_shares:
            raise PlanError(
                f"stages {index - 1} and {index} have unequal shares, but what crosses the cut at layer {start} "
                f"({name}) cannot be split: give both stages the same shares, or cut elsewhere"
            )
        if before != after:
            raise PlanError(
                f"stages {index - 1} and {index} have {before} and {after} replicas, but what crosses the cut at layer "
                f"{start} ({name}) cannot be split: give both stages the same number of replicas, or cut elsewhere"
            )


def _list_some(profile: Profile, start: int) -> str:
    """Return the positions nearest to ``start`` where a stage may start, as text."""
    nearest = sorted(sorted(profile.positions(), key=lambda p: abs(p - start))[:4])
    return ", ".join(f"{p} ({profile.layers[p].name})" for p in nearest) or "none (use one stage)"
