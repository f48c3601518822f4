"""``dapple.plan``: from a profile and a cluster to a plan, by any planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dapple_tf.errors import NoFitError, PlanError
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.plan_check import check_inputs, check_optimizer_slots
from dapple_tf.planner.asynchronous import WindowChoice, more_candidates, predicted_figures, rank_windows
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem, list_micro_batch_sizes
from dapple_tf.planner.refusal import explain_failure
from dapple_tf.planner.registry import check_flags, check_sizes, find_result
from dapple_tf.planner.search.chunk_shapes import least_stages
from dapple_tf.planner.search.searched_order import search_plan_order, with_order
from dapple_tf.planner.systems.pipedream_formula import PipedreamPrediction
from dapple_tf.plans import Plan, RecomputeLevel, as_flag
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile, profiles_on
from dapple_tf.profiler.quote import quote
from dapple_tf.simulator.interrupts import interruptible
from dapple_tf.simulator.order import check_plannable
from dapple_tf.simulator.virtual_workers import predict_workers
from dapple_tf.timeline.timeline import SimulatedTimeline
from dapple_tf.window_plan import USUAL_MINIBATCHES, WindowPlan
from dapple_tf.wording import format_count


@interruptible
def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    planner: str = "best",
    schedule: str = "auto",
    recompute: RecomputeLevel = False,
    overlap: bool = False,
    shard_optimizer: bool = False,
    optimizer_slots: int = 2,
    mode: str = "sync",
    minibatches: int | None = None,
    contention: bool = True,
    whole_rows: bool = True,
    **options: Any,
) -> Plan:
    """Return the plan of ``planner`` for ``profile`` on ``cluster``, with its prediction.

    ``planner``: a name of ``PLANNERS``. Sizes are in samples; without ``micro_batch_size`` the planner chooses among
    the divisors of the global batch that make at most 16384 micro-batches. ``schedule``: a name, or "auto" for the
    fastest of dapple-a, dapple-b and gpipe; under "auto" planner "best" also chooses any K_i that memory allows, and
    interleaved 1F1B. ``recompute``: stages stash only their inputs. ``overlap``: AllReduce runs during the last
    backward. ``shard_optimizer``: the replicas of a stage share the optimizer's slots out among them.
    ``optimizer_slots``: values that the optimizer keeps of each weight (Adam: 2). ``mode``: "sync" or "async"; with
    "async", ``global_batch_size`` is the number of samples of a whole window of ``minibatches`` minibatches (by default
    64), see ``plan_windows``. ``contention``, ``whole_rows``: as in ``dapple.simulate``. ``options``: those of the
    planner. "gpipe" has ``stages``; "best" has ``chunks``, the numbers of stages per device to try in addition to one;
    for the options of another planner NAME see ``plan_NAME``. Raises PlanError for invalid arguments. It also raises
    PlanError if nothing fits the memory; the message then says which stage lacks how many bytes, and what would fit.
    """
    given: dict[str, Any] = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "schedule": schedule,
        "recompute": recompute,
        "overlap": overlap,
        "shard_optimizer": shard_optimizer,
        "optimizer_slots": optimizer_slots,
        "contention": contention,
        "whole_rows": whole_rows,
    }
    if mode != "sync" or minibatches is not None:
        window, given = cut_window(mode, minibatches, given)
        return plan_windows(make_problem(profile, cluster, **given), planner, window, **options)[0].plan
    problem = make_problem(profile, cluster, **given)
    result = run_planner(problem, planner, **options)
    return predict_plan(problem, result.chosen, planner, pipedream=result.pipedream)[0]


@interruptible
def plan_windows(
    problem: PlanningProblem, planner: str, window: WindowPlan, **options: Any
) -> tuple[WindowChoice, ...]:
    """Return plans of asynchronous windows of ``problem.global_batch_size`` samples, the fastest first.

    Planners choose stages for a synchronous step of as many micro-batches as the window has minibatches. "best" ranks
    what it finds together with PipeDream's plan, DP, one device, and straight pipelines, by the simulated seconds of a
    minibatch in the steady state. Other planners have only their own plan. Raises what ``run_planner`` and
    ``rank_windows`` raise.
    """
    if not problem.cluster.is_uniform:
        raise PlanError(
            "the cluster has devices of different kinds, and plans of asynchronous windows are for equal devices: "
            "leave out mode='async' (--async), or plan for the devices of one kind"
        )
    candidates: list[Candidate] = []
    if planner == "best":
        options = {"chunks": (), **options}  # no stages that share devices
        candidates = more_candidates(problem)
    if planner == "pipedream":
        options = {"minibatch_size": problem.micro_batch_sizes[0], **options}
    result = run_planner(problem, planner, **options)
    _refuse_virtual_workers(result.chosen, planner, "asynchronous windows need")
    return rank_windows(problem, window, [*candidates, result.chosen, *result.runners_up], planner)


def cut_window(mode: str, minibatches: int | None, given: Mapping[str, Any]) -> tuple[WindowPlan, dict[str, Any]]:
    """Return the window of asynchronous training, and the arguments ``given`` to ``make_problem`` for its minibatches.

    Raises PlanError for arguments that asynchronous training does not have, and for a batch that cannot be cut evenly.
    """
    if mode not in ("sync", "async"):
        raise PlanError(f"mode={mode!r}: give 'sync' or 'async'")
    if mode == "sync":
        raise PlanError(
            f"minibatches={minibatches!r} is for asynchronous windows: give mode='async' too (on the command line "
            "--async)"
        )
    defaults = {"micro_batch_size": None, "schedule": "auto", "overlap": False, "shard_optimizer": False}
    for name, default in defaults.items():
        if given[name] != default:
            raise PlanError(f"{name}={given[name]!r} with mode='async': windows do not have this option; leave it out")
    window = WindowPlan(USUAL_MINIBATCHES if minibatches is None else minibatches)
    return window, {**given, "micro_batch_size": window.minibatch_size(given["global_batch_size"])}


def make_problem(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    schedule: str = "auto",
    recompute: RecomputeLevel = False,
    overlap: bool = False,
    shard_optimizer: bool = False,
    optimizer_slots: int = 2,
    contention: bool = True,
    whole_rows: bool = True,
) -> PlanningProblem:
    """Return the planning problem of the arguments of ``plan``; PlanError or ScheduleError for invalid ones.

    Raises ProfileError for a kind of devices without costs. Where all devices are of one kind, the problem is that of
    the profile on this kind.
    """
    check_inputs(profile=profile, cluster=cluster)
    check_sizes(global_batch_size=global_batch_size)
    if micro_batch_size is not None:
        check_sizes(micro_batch_size=micro_batch_size)
    recomputes: bool = as_flag(recompute)
    check_flags(
        recompute=recomputes,
        overlap=overlap,
        shard_optimizer=shard_optimizer,
        contention=contention,
        whole_rows=whole_rows,
    )
    check_optimizer_slots(optimizer_slots)
    if not isinstance(schedule, str):
        raise PlanError(f"schedule is {quote(schedule)}, not a string: give 'auto' or the name of a schedule")
    micro_batch_sizes = list_micro_batch_sizes(global_batch_size, micro_batch_size)
    if schedule != "auto":
        check_schedule(
            ScheduleSpec.parse(schedule), cluster.devices, [global_batch_size // size for size in micro_batch_sizes]
        )
    if cluster.is_uniform:
        (profile,), (cluster, _) = profiles_on(profile, cluster), cluster.only_kind(cluster.kind_of(0))
    else:
        profiles_on(profile, cluster)
    problem = PlanningProblem(
        profile,
        cluster,
        global_batch_size,
        micro_batch_sizes,
        schedule,
        recomputes,
        optimizer_slots,
        overlap,
        contention,
        whole_rows=whole_rows,
        shard_optimizer=shard_optimizer,
    )
    _check_blocks(problem)
    return problem


def _check_blocks(problem: PlanningProblem) -> None:
    """Raise PlanError if the schedule runs several stages on a device, and the model has too few layers for them."""
    if not problem.shares_devices:
        return
    blocks, least = len(problem.chain.parameter_bytes), least_stages(problem.spec)
    if blocks < least:
        raise PlanError(
            f"schedule {problem.spec.short!r} needs at least {least} stages, but the "
            f"{format_count(len(problem.profile.layers), 'layer')} of {problem.profile.model!r} form "
            f"{format_count(blocks, 'block')} that can be a stage: choose a schedule with fewer stages per device"
        )


def check_schedule(spec: ScheduleSpec, devices: int, micro_batches: Sequence[int]) -> None:
    """Raise PlanError or ScheduleError if no plan on ``devices`` devices can have the schedule ``spec``.

    ``micro_batches``: the numbers of micro-batches that the plan may have.
    """
    check_plannable(spec)
    stages = spec.stages
    if stages is None:
        if spec.chunks:
            spec.check(spec.chunks, max(micro_batches))
        return
    workers = spec.worker_map(stages).workers
    if workers > devices:
        on = f" on {format_count(workers, 'device')}" if workers < stages else ""
        raise PlanError(
            f"schedule {spec.short!r} is for {format_count(stages, 'stage')}{on}, but the cluster has "
            f"{format_count(devices, 'device')}"
        )
    spec.build(stages, spec.micro_batches_within(micro_batches))


@interruptible
def run_planner(problem: PlanningProblem, planner: str, **options: Any) -> PlannerResult:
    """Return the result of ``planner``.

    Raises PlanError if there is no such planner, if it does not have one of the ``options``, or if nothing fits.
    """
    result = find_result(problem, planner, **options)
    if result is None:
        raise NoFitError(explain_failure(problem, planner, options))
    return result


def _refuse_virtual_workers(candidate: Candidate, planner: str, feature: str) -> None:
    """Raise PlanError if the candidate has virtual workers.

    ``feature``: subject and verb of the message, such as "asynchronous windows need".
    """
    if candidate.stages[0].worker is not None:
        raise PlanError(
            f"planner {planner!r} uses virtual workers, each with its own cuts of the model, but {feature} a single "
            "pipeline: use planner 'best'"
        )


@interruptible
def predict_plan(
    problem: PlanningProblem,
    candidate: Candidate,
    planner: str,
    sizes: tuple[int, ...] | None = None,
    pipedream: PipedreamPrediction | None = None,
) -> tuple[Plan, SimulatedTimeline]:
    """Return the candidate as a plan with its prediction, and the simulated step; ``planner``: its name.

    ``sizes``: the samples of each micro-batch of the plan, where they are given. If the schedule is ``zb-auto``, the
    plan has the order that is found for its stages. ``pipedream``: is added to the plan's prediction, if it is given.
    """
    bare = problem.plan_of(candidate, planner)
    note = ""
    if ScheduleSpec.parse(candidate.schedule).is_searched:
        _refuse_virtual_workers(candidate, planner, f"schedule {candidate.schedule!r} needs")
        found = search_plan_order(problem, bare)
        bare, note = with_order(bare, found), str(found)
    if sizes is not None:
        bare = replace(bare, global_batch_size=sum(sizes), micro_batch_sizes=sizes)
    timeline = problem.simulate(bare)
    timeline = timeline.with_note(note) if note else timeline
    prediction = predicted_figures(timeline)
    if bare.virtual_workers:
        prediction |= predict_workers(bare, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots)
    if pipedream is not None:
        prediction["pipedream"] = asdict(pipedream)
    return replace(bare, predicted=prediction), timeline
