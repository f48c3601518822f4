"""``dapple.plan``: from a profile and a cluster to a plan, by any planner."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan
from dapple_tf.plan_check import check_inputs, check_optimizer_slots
from dapple_tf.planner.alpa_inter import plan_alpa_inter
from dapple_tf.planner.arguments import check_flags, check_options, check_sizes
from dapple_tf.planner.asynchronous import WindowChoice, check_window_batch, more_candidates, rank_windows
from dapple_tf.planner.autopipe import plan_autopipe
from dapple_tf.planner.bapipe import plan_bapipe
from dapple_tf.planner.best import plan_best
from dapple_tf.planner.chunk_shapes import least_stages
from dapple_tf.planner.dapple import plan_dapple
from dapple_tf.planner.dp import plan_dp
from dapple_tf.planner.even import plan_even
from dapple_tf.planner.gpipe import plan_gpipe
from dapple_tf.planner.hetpipe import plan_hetpipe
from dapple_tf.planner.memory_fit import fits_memory
from dapple_tf.planner.memory_shortage import describe_shortage
from dapple_tf.planner.micro_batch_sizes import list_micro_batch_sizes
from dapple_tf.planner.pipedream import plan_pipedream
from dapple_tf.planner.pipedream_formula import PipedreamPrediction
from dapple_tf.planner.piper import plan_piper
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.searched_order import search_plan_order, with_order
from dapple_tf.planner.spp import plan_spp
from dapple_tf.planner.torchgpipe import plan_torchgpipe
from dapple_tf.simulator.interrupts import interruptible
from dapple_tf.simulator.named_orders import check_plannable
from dapple_tf.simulator.virtual_workers import predict_workers
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.window_plan import USUAL_MINIBATCHES, WindowPlan
from graph_passes.schedules.policies import (
    abbreviate_schedule,
    build_schedule,
    check_schedule_name,
    chunked_policy,
    count_micro_batches,
    count_stages,
    is_searched,
    worker_map_of,
)
from graph_passes.schedules.policies import check_schedule as check_schedule_of
from profiler.cluster import Cluster
from profiler.device_costs import profiles_on
from profiler.profile import Profile
from profiler.quote import quote
from profiler.units import format_bytes, format_samples

# A planner takes a problem and options of its own; it returns None if nothing that it may choose fits the memory.
PLANNERS: Mapping[str, Callable[..., PlannerResult | None]] = {
    "best": plan_best,
    "dapple": plan_dapple,
    "dp": plan_dp,
    "gpipe": plan_gpipe,
    "pipedream": plan_pipedream,
    "spp": plan_spp,
    "autopipe": plan_autopipe,
    "bapipe": plan_bapipe,
    "even": plan_even,
    "torchgpipe": plan_torchgpipe,
    "alpa-inter": plan_alpa_inter,
    "piper": plan_piper,
    "hetpipe": plan_hetpipe,
}
# Planners for devices of different kinds, and planners for schedules with several stages per device.
_OF_UNEQUAL_DEVICES = ("best", "dapple", "dp", "gpipe", "bapipe", "even", "torchgpipe", "hetpipe")
_OF_SHARED_DEVICES = ("best", "even", "gpipe")
_AMPLE = 1e30  # bytes of a device that holds any model


@interruptible
def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    planner: str = "best",
    schedule: str = "auto",
    recompute: bool = False,
    overlap: bool = False,
    optimizer_slots: int = 2,
    mode: str = "sync",
    minibatches: int | None = None,
    contention: bool = True,
    **options: Any,
) -> Plan:
    """Return the plan of ``planner`` for ``profile`` on ``cluster``, with prediction.

    ``planner``: a name of ``PLANNERS``. Sizes are in samples; without ``micro_batch_size`` every divisor of the
    global batch is tried. ``schedule``: a name, or "auto" for the fastest policy. ``recompute``:
    stages stash only their inputs. ``overlap``: AllReduce runs during the last backward. ``optimizer_slots``: values
    that the optimizer keeps of each weight (Adam: 2). ``mode``: "sync", or "async" for windows of ``minibatches``
    minibatches (by default 64), of which ``global_batch_size`` is then the samples of one; see ``plan_windows``.
    ``contention``: as in ``dapple.simulate``.
    ``options``: of the planner ("gpipe": ``stages``; "best": ``chunks``, the numbers of stages per device to try beside
    one; for those of another planner NAME see ``plan_NAME``). Raises PlanError for invalid arguments,
    and if nothing fits the memory: which stage lacks how many bytes, and what would fit.
    """
    if mode != "sync" or minibatches is not None:
        others = {"micro_batch_size": micro_batch_size, "schedule": schedule, "overlap": overlap}
        window = make_window(mode, minibatches, others)
        size = check_window_batch(global_batch_size, window.minibatches)
        problem = make_problem(
            profile,
            cluster,
            global_batch_size=global_batch_size,
            micro_batch_size=size,
            recompute=recompute,
            optimizer_slots=optimizer_slots,
            contention=contention,
        )
        return plan_windows(problem, planner, window, **options)[0].plan
    problem = make_problem(
        profile,
        cluster,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        recompute=recompute,
        overlap=overlap,
        optimizer_slots=optimizer_slots,
        contention=contention,
    )
    result = run_planner(problem, planner, **options)
    return predict_plan(problem, result.chosen, planner, pipedream=result.pipedream)[0]


@interruptible
def plan_windows(
    problem: PlanningProblem, planner: str, window: WindowPlan, **options: Any
) -> tuple[WindowChoice, ...]:
    """Return plans of asynchronous windows of ``problem.global_batch_size`` samples, the fastest first.

    Planners choose stages for a synchronous step of as many micro-batches as the window has minibatches. "best" ranks
    what it finds with PipeDream's plan, DP, one device, and straight pipelines, by the simulated seconds of a minibatch
    in the steady state; another planner has its own plan only. Raises what ``run_planner`` and ``rank_windows`` raise.
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


def make_window(mode: str, minibatches: int | None, others: Mapping[str, object]) -> WindowPlan:
    """Return the window of asynchronous training; PlanError for options that it does not have."""
    if mode not in ("sync", "async"):
        raise PlanError(f"mode={mode!r}: give 'sync' or 'async'")
    if mode == "sync":
        raise PlanError(f"minibatches={minibatches!r} is for asynchronous windows: give mode='async' too")
    defaults = {"schedule": "auto", "overlap": False}
    for name, value in others.items():
        if value != defaults.get(name):
            raise PlanError(f"{name}={value!r} with mode='async': the window's order is its own; leave it out")
    return WindowPlan(USUAL_MINIBATCHES if minibatches is None else minibatches)


def make_problem(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    schedule: str = "auto",
    recompute: bool = False,
    overlap: bool = False,
    optimizer_slots: int = 2,
    contention: bool = True,
) -> PlanningProblem:
    """Return the planning problem of the arguments of ``plan``; PlanError or ScheduleError for invalid ones.

    Raises ProfileError for a kind of devices without costs. Where all devices are of one kind, the problem is that of
    the profile on this kind.
    """
    check_inputs(profile=profile, cluster=cluster)
    check_sizes(global_batch_size=global_batch_size)
    if micro_batch_size is not None:
        check_sizes(micro_batch_size=micro_batch_size)
    check_flags(recompute=recompute, overlap=overlap, contention=contention)
    check_optimizer_slots(optimizer_slots)
    if not isinstance(schedule, str):
        raise PlanError(f"schedule is {quote(schedule)}, not a string: give 'auto' or the name of a schedule")
    micro_batch_sizes = list_micro_batch_sizes(global_batch_size, micro_batch_size)
    if schedule != "auto":
        check_schedule(schedule, cluster.devices, [global_batch_size // size for size in micro_batch_sizes])
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
        recompute,
        optimizer_slots,
        overlap,
        contention,
    )
    _check_blocks(problem)
    return problem


def _check_blocks(problem: PlanningProblem) -> None:
    """Raise PlanError if the schedule runs several stages on a device, and the model has too few layers for them."""
    if not problem.shares_devices:
        return
    blocks, least = len(problem.chain.parameter_bytes), least_stages(problem.schedule)
    if blocks < least:
        raise PlanError(
            f"schedule {abbreviate_schedule(problem.schedule)!r} needs at least {least} stages, but the "
            f"{len(problem.profile.layers)} layers of {problem.profile.model!r} form {blocks} blocks that can be a "
            "stage: choose a schedule with fewer stages per device"
        )


def check_schedule(name: str, devices: int, micro_batches: Sequence[int]) -> None:
    """Raise PlanError or ScheduleError if no plan on ``devices`` devices can have the schedule called ``name``.

    ``micro_batches``: the numbers of micro-batches that the plan may have.
    """
    check_schedule_name(name)
    check_plannable(name)
    stages = count_stages(name)
    if stages is None:
        if chunked := chunked_policy(name):
            check_schedule_of(name, chunked[1], max(micro_batches))
        return
    workers = worker_map_of(name, stages).workers
    if workers > devices:
        on = f" on {workers} devices" if workers < stages else ""
        raise PlanError(
            f"schedule {abbreviate_schedule(name)!r} is for {stages} stages{on}, but the cluster has {devices} devices"
        )
    build_schedule(name, stages, count_micro_batches(name, micro_batches) or max(micro_batches))


def check_planner(name: str) -> None:
    """Raise PlanError, with the names that there are, if no planner is called ``name``."""
    text = str(name)
    if text not in PLANNERS or text != name:
        near = difflib.get_close_matches(text, PLANNERS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise PlanError(f"no planner is called {quote(name)}{hint}; there are {', '.join(PLANNERS)}")


@interruptible
def run_planner(problem: PlanningProblem, planner: str, **options: Any) -> PlannerResult:
    """Return the result of ``planner``.

    Raises PlanError if there is no such planner, if it does not have one of the ``options``, or if nothing fits.
    """
    result = find_result(problem, planner, **options)
    if result is None:
        raise PlanError(_explain_failure(problem, planner, options))
    return result


@interruptible
def find_result(problem: PlanningProblem, planner: str, **options: Any) -> PlannerResult | None:
    """Return the result of ``planner``; None if nothing that it may choose fits.

    Raises PlanError if there is no such planner, or if it does not have one of the ``options``.
    """
    check_planner(planner)
    function = PLANNERS[planner]
    check_options(planner, function, options)
    if problem.shares_devices and planner not in _OF_SHARED_DEVICES:
        raise PlanError(
            f"schedule {abbreviate_schedule(problem.schedule)!r} runs several stages on a device, and planner "
            f"{planner!r} makes plans of one stage per device: use planner {_list(_OF_SHARED_DEVICES)}"
        )
    if not problem.cluster.is_uniform and planner not in _OF_UNEQUAL_DEVICES:
        kinds = ", ".join(str(kind or "no kind") for kind in dict.fromkeys(problem.cluster.device_kinds))
        raise PlanError(
            f"the cluster has devices of different kinds ({kinds}), and planner {planner!r} makes plans for equal "
            f"devices: use planner {_list(_OF_UNEQUAL_DEVICES)}"
        )
    return function(problem, **options) if may_fit(problem) else None


def may_fit(problem: PlanningProblem) -> bool:
    """Return False where it is known at once that no plan fits the memory, which a search takes long to find out."""
    return problem.shares_devices or not problem.cluster.is_uniform or fits_memory(problem)


def _list(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


@interruptible
def lacks_memory(problem: PlanningProblem, planner: str, **options: Any) -> bool:
    """Return whether ``planner``, which found nothing, would have a plan if the devices had unlimited memory."""
    kinds = {name: replace(kind, memory=None) for name, kind in problem.cluster.kinds.items()}
    ample = replace(problem.cluster, device_memory=_AMPLE, kinds=kinds)
    return PLANNERS[planner](replace(problem, cluster=ample), **options) is not None


def describe_other_reason(problem: PlanningProblem, **options: Any) -> str:
    """Return why a planner found nothing where memory is not the reason."""
    given = [f"{name}={value!r}" for name, value in options.items()]
    if problem.schedule != "auto":
        given.append(f"schedule {abbreviate_schedule(problem.schedule)!r}")
    given.append(f"micro-batches of at most {format_samples(max(problem.micro_batch_sizes))}")
    return (
        f"has no plan on {problem.cluster.devices} devices with {', '.join(given)}, in which each replica gets at "
        "least one sample"
    )


def _explain_failure(problem: PlanningProblem, planner: str, options: Mapping[str, Any]) -> str:
    """Return why ``planner`` found nothing, and what would help."""
    if not problem.cluster.is_uniform:
        if planner != "best" and plan_best(problem) is not None:
            return _explain_choice(problem, planner, options)
        return _explain_unequal(problem)
    if problem.schedule == "auto" and not fits_memory(problem):
        return describe_shortage(problem)
    if planner != "best" and (problem.schedule == "auto" or plan_best(problem) is not None):
        return _explain_choice(problem, planner, options)
    # Under schedule "auto" stages hold fewest micro-batches.
    auto, again = replace(problem, schedule="auto"), replace(problem, recompute=True)
    remedies = ["schedule 'auto'"] if fits_memory(auto) else []
    if problem.shares_devices and plan_best(again) is not None:
        remedies.append("recompute")
    if remedies:
        return f"no plan fits the devices' memory under schedule {problem.schedule!r}: use {' or '.join(remedies)}"
    return f"under schedule 'auto', which needs the least memory, {describe_shortage(problem)}"


def _explain_choice(problem: PlanningProblem, planner: str, options: Mapping[str, Any]) -> str:
    """Return why ``planner`` found nothing where planner "best" has a plan."""
    if lacks_memory(problem, planner, **options):
        why = "has no plan that fits the devices' memory with at least one sample for each replica"
    else:
        why = describe_other_reason(problem, **options)
    return f"planner {planner!r} {why}: use planner 'best', which has one"


def _explain_unequal(problem: PlanningProblem) -> str:
    """Return that no plan fits unequal devices, and what would help."""
    memories = Counter(problem.cluster.memories)
    devices = ", ".join(f"{count} of {format_bytes(memory)}" for memory, count in memories.items())
    return (
        f"no plan of {problem.profile.model!r} was found that fits the memory of the devices ({devices}), each with "
        "its share of the rows: give more devices or devices with more memory, a smaller micro_batch_size, or recompute"
    )


def _refuse_virtual_workers(candidate: Candidate, planner: str, feature: str) -> None:
    """Raise PlanError if the candidate has virtual workers; ``feature``: what needs a single pipeline, and its verb."""
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
) -> tuple[Plan, Timeline]:
    """Return the candidate as a plan with its prediction, and the simulated step; ``planner``: its name.

    ``sizes``: the samples of each micro-batch of the plan, where they are given. Where the schedule is ``zb-auto``, the
    plan has the order that is found for its stages. ``pipedream``: goes into the plan's prediction, where it is given.
    """
    bare = problem.plan_of(candidate, planner)
    note = ""
    if is_searched(candidate.schedule):
        _refuse_virtual_workers(candidate, planner, f"schedule {candidate.schedule!r} needs")
        found = search_plan_order(problem, bare)
        bare, note = with_order(bare, found), str(found)
    if sizes is not None:
        bare = replace(bare, global_batch_size=sum(sizes), micro_batch_sizes=sizes)
    timeline = problem.simulate(bare)
    timeline = Timeline(title=timeline.title, simulation=timeline.simulation, note=note) if note else timeline
    prediction: dict[str, Any] = {
        "step_seconds": timeline.step_seconds,
        "speedup": timeline.speedup,
        "bubble": timeline.bubble,
        "peak_memory_bytes": list(timeline.peak_memory_bytes),
    }
    if bare.virtual_workers:
        prediction |= predict_workers(bare, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots)
    if pipedream is not None:
        prediction["pipedream"] = asdict(pipedream)
    return replace(bare, predicted=prediction), timeline
