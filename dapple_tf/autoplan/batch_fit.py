"""Fit micro-batches and replicas to the number of samples in a batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Sequence
from typing import cast

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.analysis.row_bounds import fit_micro_batches, fit_sizes
from dapple_tf.plan_check import check_shares
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.units import format_samples
from dapple_tf.wording import format_count

GivenSizes = Sequence[int] | Sequence[float]
"""For each micro-batch its number of samples (whole numbers), or its share of the samples (floats)."""


def check_batch_size(samples: int, micro_batches: int, replicas: Sequence[int], sizes: Sequence[int] = ()) -> None:
    """Raise PlanError unless every replica gets at least one sample of every micro-batch.

    ``replicas``: the number of replicas of each stage. ``sizes``: the samples of each micro-batch, if they are given.
    """
    if sizes and min(sizes) < max(replicas):
        index = sizes.index(min(sizes))
        raise PlanError(
            f"micro-batch {index} has {format_samples(sizes[index])}, too few for {max(replicas)} replicas: make it "
            "larger, or use fewer replicas"
        )
    if micro_batches < 1:
        raise PlanError(f"micro_batches={micro_batches}: it must be at least 1")
    if micro_batches > samples:
        raise PlanError(
            f"micro_batches={micro_batches} is more than the {format_samples(samples)} of the batch: "
            f"use at most {samples}"
        )
    if samples // micro_batches < max(replicas):
        raise PlanError(
            f"a batch of {format_samples(samples)} in {format_count(micro_batches, 'micro-batch')} gives some only "
            f"{format_samples(samples // micro_batches)}, too few for {max(replicas)} replicas: use fewer "
            "micro-batches or a larger batch"
        )


def check_plan_fits(plan: Plan, layers: Layers, samples: int) -> None:
    """Raise PlanError unless the plan is for this number of layers, and the batch is large enough for it."""
    planned = plan.stages[-1].last_layer + 1
    if planned != len(layers.layers):
        raise PlanError(
            f"the plan is for {format_count(planned, 'layer')}, but {layers.graph.name} has {len(layers.layers)}: it "
            "was made for another model, or for other options of it: give those, on the command line by --set"
        )
    try:
        sizes = plan.sizes if samples == plan.global_batch_size else ()  # another batch may get equal micro-batches
        check_batch_size(samples, plan.micro_batches, plan.sharing, sizes)
        check_shares(plan, min(sizes, default=samples // plan.micro_batches))
    except PlanError as error:
        if samples == plan.global_batch_size:
            raise
        raise PlanError(
            f"the plan is for batches of {format_samples(plan.global_batch_size)}, and the first batch has {samples}, "
            f"too few for it ({error}): begin with a batch of {plan.global_batch_size}, or make a plan for {samples}"
        ) from error


def fit_plan(plan: Plan, samples: int) -> Plan:
    """Return ``plan`` for a batch of ``samples``: with fewer micro-batches, then fewer replicas, where it is too small.

    Micro-batches of given sizes keep their proportion, or become equal where one would be too small. Every replica of
    every stage then gets at least one sample of every micro-batch. A batch too small for the shares of some replica is
    shared equally. An asynchronous window keeps its plan; raises PlanError where the batch is too small for it.
    """
    if plan.window is not None:
        plan.window.check_samples(samples, plan.micro_batches, plan.sharing)
        return plan
    if fit_sizes(samples, plan.sizes, plan.least_samples):
        return plan
    if plan.sizes:
        equal = -(-plan.global_batch_size // plan.micro_batches)
        plan = dataclasses.replace(plan, micro_batch_size=equal, micro_batch_sizes=None)
    if samples < plan.least_samples and plan.shares:
        plan = dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, shares=None) for s in plan.stages))
    replicas = min(max(plan.replicas), samples)
    micro_batches = fit_micro_batches(samples, plan.micro_batches, plan.least_samples)
    if micro_batches == plan.micro_batches and replicas == max(plan.replicas):
        return plan
    stages = plan.stages
    if replicas < max(plan.replicas):
        stages = tuple(
            StagePlan(s.first_layer, s.last_layer, s.devices[: min(s.replicas, replicas)]) for s in plan.stages
        )
    schedule = str(plan.spec.truncate(micro_batches))
    return dataclasses.replace(plan, micro_batches=micro_batches, stages=stages, schedule=schedule)


# --- ``micro_batches=[2, 2, 4]`` or ``[0.25, 0.25, 0.5]``: micro-batches of given sizes, counts or shares of samples

# Shares such as 1/3 are rounded; they are divided by their sum.
_SUM_TOLERANCE = 1e-6


def check_given_sizes(given: Sequence[object]) -> None:
    """Raise PlanError unless ``given`` are counts of samples (whole numbers), or shares (floats) that add up to 1."""
    shown = f"micro_batches={list(given)}"
    if not given:
        raise PlanError(f"{shown}: name the samples, or the share, of at least one micro-batch")
    if any(isinstance(item, bool) for item in given) or not (are_counts(given) or _are_all(float, given)):
        raise PlanError(
            f"{shown}: give samples of each micro-batch (all whole numbers, such as [2, 2, 4]) or shares (all floats, "
            "such as [0.25, 0.25, 0.5])"
        )
    sizes = cast(GivenSizes, given)
    for index, item in enumerate(sizes):
        if not 0 < item < math.inf:
            raise PlanError(f"{shown}: micro-batch {index} is {item}; every one must be larger than 0")
    if not are_counts(given) and abs(math.fsum(sizes) - 1) > _SUM_TOLERANCE:
        raise PlanError(f"{shown}: the shares add up to {math.fsum(sizes):g}, not to 1")


def are_counts(given: Sequence[object]) -> bool:
    """Return whether ``given`` are counts of samples, not shares."""
    return _are_all(numbers.Integral, given)


def _are_all(kind: type, given: Sequence[object]) -> bool:
    return all(isinstance(item, kind) for item in given)


def count_samples(given: GivenSizes, samples: int) -> tuple[int, ...]:
    """Return the number of samples of each micro-batch of a batch of ``samples``.

    The sums of the first shares are multiplied by ``samples`` and rounded, so that each micro-batch is within one
    sample of its share. Raises PlanError where counts do not add up to ``samples``, or a share is less than a sample.
    """
    if are_counts(given):
        sizes = tuple(map(int, given))
        if sum(sizes) != samples:
            raise PlanError(
                f"micro_batches={list(given)} add up to {format_samples(sum(sizes))}, but the first batch has "
                f"{samples}: give sizes that add up to {samples}, or shares (floats that add up to 1)"
            )
        return sizes
    sums = [0.0, *itertools.accumulate(given)]
    rows = [round(samples * each / sums[-1]) for each in sums]
    found = tuple(end - first for first, end in itertools.pairwise(rows))
    if min(found) < 1:
        index = found.index(0)
        raise PlanError(
            f"micro_batches={list(given)}: share {given[index]} of {format_samples(samples)} is no sample for "
            f"micro-batch {index}: use larger shares, or a larger batch"
        )
    return found
