"""What is left to "auto": profile the model on the device at hand, and plan it for the cluster at hand."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf.autoplan.request import Request, check_batch
from dapple_tf.autoplan.schedule_choice import Choice, choose_schedule
from dapple_tf.errors import ClusterError, DappleWarning, PlanError
from dapple_tf.frontend.batch import batch_size
from dapple_tf.plan import Plan, StagePlan
from dapple_tf.plan_check import check_plan
from dapple_tf.planner.api import check_schedule, make_problem, predict_plan, run_planner
from dapple_tf.planner.baselines import baseline_candidates, fitted_baseline_candidates
from dapple_tf.planner.fit_cuts import fit_cuts
from dapple_tf.planner.micro_batch_sizes import list_micro_batch_sizes
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.pricing import POLICIES
from dapple_tf.profiling.measured import profile
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.simulate import Timeline
from profiler.cluster import Cluster

_TRIED = (2, 8, 32)  # numbers of micro-batches at whose sizes times are taken where M is open


@dataclass(frozen=True)
class Decided:
    """A plan, why it has its schedule, where that was left open, and its step, where it was simulated for that."""

    plan: Plan
    choice: Choice | None = None
    simulated: Timeline | None = None


def plan_automatically(
    loss_fn: Callable[..., Any],
    batch: Sequence[Any],
    request: Request,
    *,
    slots: int,
    devices: int,
    cluster: Cluster | None,
    replicable: bool,
    ranks: bool = False,
) -> Decided:
    """Planner "best" on a profile taken now, for the request's number of micro-batches, on so many ``devices``.

    ``cluster``: the devices that the plan may use; by default those of this process that really run beside each other.
    ``slots``: values that the optimizer keeps of each weight.
    Not ``replicable``: the result depends on how samples are shared out (dropout, batch norm), so stages get one
    device each. ``ranks``: the devices are a job's processes, of which none may be left out; this is one of them.
    Raises PlanError where the cluster has more devices than there are (or fewer than ranks), several servers are joined
    by nobody knows what, nothing fits, or nothing uses all ranks.
    """
    where = _find_cluster(cluster, devices, ranks)
    problem = _measure(loss_fn, batch, request, where, (2, where.devices) if replicable else (), slots)
    candidates = _find(problem) if replicable else _straight(problem)
    found = _on_every_rank(problem, candidates, replicable) if ranks else _fastest(candidates)
    size = batch_size(batch)
    if not request.open_schedule:
        return _settle(problem, found, "best", size, None)
    choice = _choose(problem, found.stages, (found.micro_batch_size,))
    return _settle(problem, dataclasses.replace(found, schedule=choice.schedule), "best", size, choice)


def complete_plan(
    loss_fn: Callable[..., Any],
    batch: Sequence[Any],
    request: Request,
    plan: Plan,
    *,
    slots: int,
    devices: int,
    cluster: Cluster | None,
    ranks: bool = False,
) -> Decided:
    """The ``plan`` of given stages with policy, D and M by a profile taken now, as far as the request leaves them open.

    See ``plan_automatically``; raises PlanError where no schedule fits the cluster's memory.
    """
    # The user has said how many devices run, be they more than there are cores.
    known = cluster or (None if ranks else Cluster.detect(sum(plan.replicas)))
    where = _find_cluster(known, devices, ranks)
    problem = _measure(loss_fn, batch, request, where, [r for r in plan.replicas if r > 1], slots)
    problem = dataclasses.replace(problem, recompute=plan.recompute)
    sizes = [size for size in problem.micro_batch_sizes if size >= max(plan.replicas)]
    choice = _choose(problem, plan.stages, sizes)
    chosen = Candidate(
        plan.stages, problem.global_batch_size // choice.micro_batches, choice.schedule, 0.0, "requested"
    )
    return _settle(problem, chosen, "requested", batch_size(batch), choice)


def with_recompute(decided: Decided, recompute: bool | tuple[int, ...]) -> Decided:
    """What was decided, with this in the plan; a prediction for something else is dropped."""
    if decided.plan.recompute == recompute:
        return decided
    return dataclasses.replace(decided, plan=dataclasses.replace(decided.plan, recompute=recompute, predicted=None))


def _find_cluster(cluster: Cluster | None, devices: int, ranks: bool) -> Cluster:
    where = cluster or (_cluster_of_job() if ranks else Cluster.detect(usable_devices(devices)))
    if ranks and where.devices != devices:
        raise PlanError(
            f"the cluster has {where.devices} devices, but the job has {devices} ranks, a device each: start as many "
            "as the cluster has, or describe the servers that the job runs on"
        )
    if where.devices > devices:
        raise PlanError(f"the cluster has {where.devices} devices, but here are {devices}: make as many or use fewer")
    return where


def _measure(
    loss_fn: Callable[..., Any],
    batch: Sequence[Any],
    request: Request,
    where: Cluster,
    replicas: Sequence[int],
    slots: int,
) -> PlanningProblem:
    """What the simulator is asked: a profile of micro-batches, and of their shares for stages of so many replicas."""
    size = batch_size(batch)
    micro_batches = request.count_micro_batches(size)
    check_batch(size, micro_batches, (1,))
    samples = size // micro_batches
    if not request.open_schedule:  # before the profile, which takes its time
        sizes = list_micro_batch_sizes(size, None) if request.open_micro_batches else (samples,)
        check_schedule(request.schedule, where.devices, [size // each for each in sizes])
    tried = {max(1, size // m) for m in _TRIED} if request.open_micro_batches else {samples}
    slices = sorted((tried | {max(1, s // r) for s in tried for r in replicas}) - {samples})
    rows = tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[:samples], tuple(batch))
    return make_problem(
        profile(loss_fn, rows, batch_sizes=slices),
        where,
        global_batch_size=size if request.open_micro_batches else micro_batches * samples,
        micro_batch_size=None if request.open_micro_batches else samples,
        schedule=request.schedule,
        recompute=request.recompute is True,
        optimizer_slots=slots,
    )


def _choose(problem: PlanningProblem, stages: tuple[StagePlan, ...], sizes: Sequence[int]) -> Choice:
    """The simulator's choice for these stages among micro-batches of these sizes, on the problem's profile."""
    costs = {}
    for size in sizes:
        plan = problem.make_plan(
            stages, size, "dapple-a" if problem.schedule == "auto" else problem.schedule, "requested"
        )
        check_plan(plan, problem.profile, problem.cluster)
        found = stage_costs(plan, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots)
        costs[plan.micro_batches] = found
    policies = POLICIES if problem.schedule == "auto" else (problem.schedule,)
    return choose_schedule(costs, problem.cluster.device_memory, policies=policies, measured=True)


def _settle(problem: PlanningProblem, chosen: Candidate, planner: str, size: int, choice: Choice | None) -> Decided:
    """The plan with its prediction, for the whole batch of ``size`` samples."""
    plan, simulated = predict_plan(problem, chosen, planner)
    whole = dataclasses.replace(plan, global_batch_size=size, micro_batch_size=-(-size // plan.micro_batches))
    return Decided(whole, choice, simulated)


def usable_devices(devices: int) -> int:
    """Devices that can run at the same time: all GPUs; of logical CPU devices as many as there are cores."""
    if tf.config.list_logical_devices("GPU"):
        return devices
    return max(1, min(devices, len(os.sched_getaffinity(0))))


def count_slots(optimizer: Any, trained: Sequence[tf.Variable]) -> int:
    """Values that a built optimizer keeps of each of the ``trained`` weights; 2, as Adam does, before it is built."""
    weights = sum(math.prod(variable.shape) for variable in trained)
    if not weights or not getattr(optimizer, "built", False):
        return 2
    kept = sum(math.prod(variable.shape) for variable in optimizer.variables)  # and a few scalars, such as the rate
    return round(float(kept) / float(weights))


def _cluster_of_job() -> Cluster:
    try:
        return Cluster.detect()
    except ClusterError as error:
        raise PlanError(
            f'stages="auto" must know what joins the ranks: {error}. Give dapple.pipeline(cluster=...), or a plan made '
            "for the cluster (dapple plan)"
        ) from error


def _find(problem: PlanningProblem) -> list[Candidate]:
    """What planner "best" finds, the best first."""
    decision = run_planner(problem, "best")
    return [decision.chosen, *decision.runners_up]


def _straight(problem: PlanningProblem) -> list[Candidate]:
    """Pipelines of one device a stage."""
    size = problem.micro_batch_sizes[0]
    found = []
    for stages in range(1, problem.cluster.devices + 1):
        fitted = fit_cuts(problem, [(device,) for device in range(stages)], size)
        candidate = fitted and problem.evaluate(fitted, size, "straight")
        if candidate:
            found.append(candidate)
    return found or [run_planner(problem, "gpipe").chosen]


def _on_every_rank(problem: PlanningProblem, candidates: Sequence[Candidate], replicable: bool) -> Candidate:
    """The fastest that uses all devices; warns where one on fewer is faster, for the user started the job."""
    every = problem.cluster.devices
    known = (
        [*candidates, *baseline_candidates(problem), *fitted_baseline_candidates(problem)]
        if replicable
        else list(candidates)
    )
    whole = [candidate for candidate in known if _count_devices(candidate) == every]
    fastest = _fastest(candidates)
    fewer = _count_devices(fastest)
    if not whole:
        why = (
            f"a micro-batch has {problem.micro_batch_sizes[0]} samples"
            if replicable
            else "what the model computes depends on how samples are shared out (random numbers, batch norm), so "
            "stages are not replicated"
        )
        raise PlanError(
            f"no plan that fits uses all {every} ranks of the job: {why}, and {len(problem.chain.parameter_bytes)} "
            f"blocks of {problem.profile.model!r} can be stages; start {fewer} process{'es' * (fewer > 1)}, or give "
            "stages and replicas"
        )
    chosen = _fastest(whole)
    if chosen.seconds > fastest.seconds:
        warnings.warn(
            f"{fewer} of the job's {every} ranks would be faster, at {fastest.seconds:.3g} s a step, than all of them, "
            f"at {chosen.seconds:.3g} s: start fewer processes, or make batches larger",
            DappleWarning,
            stacklevel=3,
        )
    return chosen


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda candidate: candidate.seconds)


def _count_devices(candidate: Candidate) -> int:
    return sum(stage.replicas for stage in candidate.stages)
