"""``stages="auto"``: profile the model on the device at hand, and let planner "best" choose stages and replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dapple_tf.autoplan.decision import PlanDecision, decide_on
from dapple_tf.autoplan.measured_problem import PlanningInputs, choose_cluster, measure_problem, usable_devices
from dapple_tf.autoplan.options import Options
from dapple_tf.autoplan.schedule_auto import choose_profiled_schedule
from dapple_tf.errors import PlanError, warn_user
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.planner.api import plan_windows, predict_plan, run_planner
from dapple_tf.planner.asynchronous import rank_windows
from dapple_tf.planner.baselines import baseline_candidates, fitted_baseline_candidates
from dapple_tf.planner.explain import describe_loss
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.search.chunk_search import plan_chunked
from dapple_tf.planner.search.chunk_shapes import least_stages, list_shapes
from dapple_tf.planner.search.fit_cuts import fit_cuts
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.units import format_samples, format_seconds_fixed
from dapple_tf.simulator.interrupts import interruptible
from dapple_tf.window_plan import WindowPlan
from dapple_tf.wording import format_count


def choose_stages(inputs: PlanningInputs) -> PlanDecision:
    """Return the fastest plan that planner "best" finds for the model; in a job, the fastest that uses every rank.

    Without a cluster the plan uses the devices of this process that can run at the same time. Raises PlanError where
    the cluster has more devices than this process, or not as many as there are ranks, where the links between servers
    are unknown, and where no plan fits the memory or uses all ranks.
    """
    cluster = choose_cluster(inputs, usable_devices(inputs.devices))
    problem = measure_problem(inputs, cluster, (2, cluster.devices) if inputs.replicable else ())
    if inputs.options.window is not None:
        return _choose_window(inputs, problem, inputs.options.window)
    candidates = _list_candidates(problem, replicable=inputs.replicable, all_devices=inputs.ranks)
    chosen = _fastest_on_all_ranks(problem, candidates, inputs.replicable) if inputs.ranks else _fastest(candidates)
    if len(chosen.stages) == 1 and cluster.devices > 1:
        warn_user(_explain_one_stage(problem, chosen, candidates))
    if inputs.options.spec is not None:
        return decide_on(problem, chosen, "best", inputs.samples, None)
    if ScheduleSpec.parse(chosen.schedule).runs_several_stages:  # other policies are for one stage per device
        problem = dataclasses.replace(problem, schedule=chosen.schedule)
    recomputing = dataclasses.replace(problem, recompute=chosen.recompute)
    choice = choose_profiled_schedule(recomputing, chosen.stages, (chosen.micro_batch_size,), chosen.schedule)
    return decide_on(problem, dataclasses.replace(chosen, schedule=choice.schedule), "best", inputs.samples, choice)


def predict_seconds(problem: PlanningProblem, cluster: Cluster, *, replicable: bool) -> float:
    """Return the simulated seconds of a step of the plan that ``choose_stages`` would choose for a job on ``cluster``.

    Raises PlanError where no plan fits and uses all its devices.
    """
    problem = dataclasses.replace(problem, cluster=cluster)
    candidates = _list_candidates(problem, replicable=replicable, all_devices=True)
    return _fastest_on_all_ranks(problem, candidates, replicable).seconds


def _list_candidates(problem: PlanningProblem, *, replicable: bool, all_devices: bool) -> list[Candidate]:
    """Return the plans that planner "best" finds, the best first; without ``replicable`` those without replicas."""
    if problem.shares_devices:
        return _plan_shared_devices(problem, replicable=replicable, all_devices=all_devices)
    if not replicable:
        return _plan_without_replicas(problem)
    result = run_planner(problem, "best")
    return [result.chosen, *result.runners_up]


def _explain_one_stage(problem: PlanningProblem, chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """Return why the plan is no pipeline: what the fastest plan of two stages, or of more, would take."""
    known = [candidate for candidate in candidates if len(candidate.stages) > 1]
    if not known and len(problem.chain.parameter_bytes) > 1:
        devices = range(problem.cluster.devices)
        for size in problem.micro_batch_sizes:
            stages = fit_cuts(problem, [devices[:1], devices[1:2]], size)
            known += [found] if stages and (found := problem.evaluate(stages, size, "straight")) else []
    one = "one device" if chosen.device_count == 1 else f"one stage on {chosen.device_count} devices"
    if not known:
        alone = format_seconds_fixed(chosen.seconds)
        return f"the plan is {one}, at {alone} per step: no plan of two stages was found that fits"
    other = _fastest(known)
    seconds, longer = chosen.seconds, other.seconds
    text = f"the plan is {one}, at {format_seconds_fixed(seconds, longer)} per step"
    plans = [predict_plan(problem, candidate, "best") for candidate in (chosen, other)]
    other_form = format_count(len(other.stages), "stage")
    then = format_seconds_fixed(longer, seconds)
    return f"{text}: {other_form} would take {then}, {describe_loss(plans[0], plans[1])}"


def _choose_window(inputs: PlanningInputs, problem: PlanningProblem, window: WindowPlan) -> PlanDecision:
    """Return the plan of windows with the least simulated seconds of a minibatch; in a job, one that uses all ranks."""
    if inputs.replicable:
        choices = plan_windows(problem, "best", window)
    else:
        choices = rank_windows(problem, window, _plan_without_replicas(problem), "best")
    if inputs.ranks:
        devices = problem.cluster.devices
        choices = tuple(choice for choice in choices if choice.plan.device_count == devices)
        if not choices:
            raise PlanError(
                f"no plan of asynchronous windows that fits uses all {devices} ranks of the job: start fewer "
                "processes, or give stages and replicas"
            )
    chosen, samples = choices[0], inputs.samples
    size = -(-samples // chosen.plan.micro_batches)
    plan = dataclasses.replace(chosen.plan, global_batch_size=samples, micro_batch_size=size)
    return PlanDecision(plan, None, chosen.timeline)


def check_enough_layers(options: Options, layers: Layers) -> None:
    """Raise PlanError if the schedule of the options runs more stages on a device than the model can be cut into.

    Planning raises it too, but only after the model has been profiled.
    """
    if options.spec is None or not options.spec.runs_several_stages:
        return
    least, most = least_stages(options.spec), len(layers.positions()) + 1
    if most < least:
        raise PlanError(
            f"schedule {options.spec.short!r} needs at least {least} stages, but "
            f"{layers.graph.name} can be cut into {most}: choose a schedule with fewer stages per device"
        )


@interruptible
def _plan_shared_devices(problem: PlanningProblem, *, replicable: bool, all_devices: bool) -> list[Candidate]:
    """Return the plans that planner "best" finds under a schedule with several stages per device, the best first.

    Without ``replicable`` a worker is one device. With ``all_devices`` only plans on all of them are tried.
    """
    shapes = [shape for shape in list_shapes(problem) if replicable or shape.replicas == 1]
    shapes = [shape for shape in shapes if not all_devices or shape.device_count == problem.cluster.devices]
    result = plan_chunked(problem, shapes) or run_planner(problem, "best" if replicable else "gpipe")
    return [result.chosen, *result.runners_up]


@interruptible
def _plan_without_replicas(problem: PlanningProblem) -> list[Candidate]:
    """Return pipelines of one device per stage."""
    size = problem.micro_batch_sizes[0]
    found = []
    for stages in range(1, problem.cluster.devices + 1):
        cuts = fit_cuts(problem, [(device,) for device in range(stages)], size)
        candidate = cuts and problem.evaluate(cuts, size, "straight")
        if candidate:
            found.append(candidate)
    return found or [run_planner(problem, "gpipe").chosen]


def _fastest_on_all_ranks(problem: PlanningProblem, candidates: Sequence[Candidate], replicable: bool) -> Candidate:
    """Return the fastest plan that uses all devices; warn where a plan with fewer devices is faster.

    The user started that many processes, so none may be left out. Raises PlanError where no plan uses all.
    """
    devices = problem.cluster.devices
    known = list(candidates)
    if replicable:
        known += [*baseline_candidates(problem), *fitted_baseline_candidates(problem)]
    on_all = [candidate for candidate in known if candidate.device_count == devices]
    fastest = _fastest(candidates)
    fewer = fastest.device_count
    if not on_all:
        reason = (
            f"a micro-batch has {format_samples(problem.micro_batch_sizes[0])}"
            if replicable
            else "the model's result depends on how samples are divided (random numbers, batch norm), so stages are "
            "not replicated"
        )
        raise PlanError(
            f"no plan that fits uses all {devices} ranks of the job: {reason}, and "
            f"{len(problem.chain.parameter_bytes)} blocks of {problem.profile.model!r} can be stages; start {fewer} "
            f"process{'es' * (fewer > 1)}, or give stages and replicas"
        )
    chosen = _fastest(on_all)
    if chosen.seconds > fastest.seconds:
        warn_user(
            f"{fewer} of the job's {devices} ranks would be faster, at "
            f"{format_seconds_fixed(fastest.seconds, chosen.seconds)} per step, than all of them, at "
            f"{format_seconds_fixed(chosen.seconds)}: start fewer processes, or make batches larger"
        )
    return chosen


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda candidate: candidate.seconds)
