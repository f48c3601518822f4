"""Stages that the user gives by number or by layer names: their plan, and M and schedule where these are "auto"."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence

from dapple_tf.autoplan.batch_fit import check_batch_size
from dapple_tf.autoplan.decision import PlanDecision, decide_on
from dapple_tf.autoplan.layer_estimates import EstimatedCosts
from dapple_tf.autoplan.measured_problem import PlanningInputs, choose_cluster, measure_problem
from dapple_tf.autoplan.options import Options, check_worker_count
from dapple_tf.autoplan.recompute_option import choose_recompute
from dapple_tf.autoplan.schedule_auto import choose_profiled_schedule
from dapple_tf.autoplan.slice_option import slice_plan
from dapple_tf.distributed.membership import describe_missing_init
from dapple_tf.errors import PlanError, warn_user
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.passes.partition import balance
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.planner.planning_problem import Candidate
from dapple_tf.plans import MORE_DEVICES, REQUESTED, Plan, StagePlan
from dapple_tf.profiler.detect import job_size
from dapple_tf.wording import format_count

_MORE_RANKS = "start more processes, one for each device (mpirun -np n)"


def plan_requested_stages(
    options: Options, layers: Layers, costs: EstimatedCosts, global_batch_size: int, devices: int
) -> Plan:
    """Return the plan that ``options`` describes, for a batch of ``global_batch_size`` samples on ``devices`` devices.

    A number of stages is cut so that they balance in estimated ``costs``. Worker by worker, devices are taken in order.
    If the schedule is "auto", it is dapple-a here, and if M is "auto", it is the result of ``count_micro_batches``: the
    caller chooses them later. Raises PlanError (counts that do not fit), PartitionError (cuts that cannot be made) or
    ScheduleError (a schedule for another number of stages or micro-batches).
    """
    starts = _find_starts(options, layers, costs)
    count = len(starts) + 1
    workers = WorkerMap.one_per_stage(count) if options.spec is None else options.spec.worker_map(count)
    replicas = tuple(options.replicas) if options.replicas is not None else (1,) * workers.workers
    check_worker_count(replicas, count, workers.workers)
    if min(replicas) < 1:
        what = "stage" if workers.has_one_stage_per_worker else "worker"
        raise PlanError(f"replicas={list(replicas)}: every {what} needs at least one device")
    if sum(replicas) > devices:
        raise PlanError(
            f"{format_count(count, 'stage')} with replicas {list(replicas)} need "
            f"{format_count(sum(replicas), 'device')}, but there are {devices}: "
            + (
                describe_missing_init()
                or f"ask for fewer, or {_MORE_RANKS if job_size(os.environ) > 1 else MORE_DEVICES}"
            )
        )
    micro_batches = options.count_micro_batches(global_batch_size, max(replicas))
    sizes = options.sizes(global_batch_size)
    check_batch_size(global_batch_size, micro_batches, replicas, sizes)
    _check_schedule(options, count, micro_batches, global_batch_size // max(replicas))
    bounds = [0, *starts, len(layers.layers)]
    first_device = [0, *itertools.accumulate(replicas)]
    own = [tuple(range(*pair)) for pair in itertools.pairwise(first_device)]  # the devices of each worker
    stages = [
        StagePlan(first, end - 1, own[worker])
        for (first, end), worker in zip(itertools.pairwise(bounds), workers.worker_of, strict=True)
    ]
    plan = Plan(
        model=layers.graph.name,
        planner=REQUESTED,
        global_batch_size=global_batch_size,
        micro_batch_size=max(sizes, default=-(-global_batch_size // micro_batches)),
        micro_batches=micro_batches,
        schedule="dapple-a" if options.spec is None else str(options.spec),
        recompute=choose_recompute(options.recompute, layers, stages),
        stages=tuple(stages),
        micro_batch_sizes=sizes or None,
    )
    return plan if options.slice is None else slice_plan(plan, options.slice, costs.layers)


def _check_schedule(options: Options, stages: int, micro_batches: int, largest: int) -> None:
    """Raise ScheduleError where the given schedule cannot run on ``stages`` stages with ``micro_batches``.

    Where M is "auto", try the M that the schedule is written for, or else the ``largest`` possible.
    """
    spec = options.spec
    if spec is None:
        return
    if not options.micro_batches_are_auto:
        spec.build(stages, micro_batches)
    elif spec.stages or spec.chunks:
        spec.build(stages, spec.micro_batches_within(range(1, largest + 1)))


def _find_starts(options: Options, layers: Layers, costs: EstimatedCosts) -> list[int]:
    """Return the first layer of every stage but the first."""
    wanted = options.stages
    if wanted == "auto":
        wanted = _count_stages(options)
    if isinstance(wanted, int):
        return _balance(wanted, options, layers, costs)
    starts = [layers.find(name) for name in wanted]
    for before, after, earlier, name in zip(starts, starts[1:], wanted, wanted[1:], strict=False):
        if after == before:
            twice = "is given twice" if name == earlier else f"and {earlier!r} are the same layer"
            raise PlanError(f"stages={list(wanted)}: {name!r} {twice}: name each layer that starts a stage once")
        if after < before:
            raise PlanError(f"stages={list(wanted)}: {name!r} does not come after {earlier!r} in the model")
    if starts == [0]:
        warn_user(
            f"stages={list(wanted)}: {wanted[0]!r} starts at the model's first layer, so there is one stage: name the "
            "layers that start the other stages, or give stages=1"
        )
    return [start for start in starts if start > 0]  # the first stage's first layer may be named, but needs not be


def _count_stages(options: Options) -> int:
    """Return how many stages a worker for each entry of ``replicas`` runs under the schedule of the options."""
    workers = len(options.replicas or (1,))
    if options.spec is None:
        return workers
    if options.spec.chunks:
        return workers * options.spec.chunks
    given = options.spec.stages if options.spec.runs_several_stages else None
    return given or workers


def _balance(count: int, options: Options, layers: Layers, costs: EstimatedCosts) -> list[int]:
    """Return the starts of ``count`` stages of balanced work; for unequal replicas only at splittable cuts."""
    if count < 1:
        raise PlanError(f"stages={count}: there must be at least one")
    positions = list(layers.positions())
    if options.replicas is not None and len(set(options.replicas)) > 1:
        positions = [p for p in positions if layers.cut(p).splittable]
        if len(positions) < count - 1 <= len(layers.positions()):
            raise PlanError(
                f"{count} stages with different replicas {list(options.replicas)} are wanted. Such stages can meet "
                "only where every tensor that crosses has a batch axis, and the model has only "
                f"{format_count(len(positions), 'such cut')}: give all stages equal replicas, or name the layers that "
                "start them"
            )
    problems = [cut.problem for cut in layers.cuts if cut.problem]
    return balance(costs.layers, positions, [costs.cuts[p - 1] for p in positions], count, problems)


def choose_micro_batches(inputs: PlanningInputs, plan: Plan) -> PlanDecision:
    """Return ``plan`` with M, policy and D chosen, as far as they are "auto".

    The model is profiled, and each M and policy simulated. M is a divisor of the batch that gives every replica a
    sample. Micro-batches of given sizes all count as the largest while the schedule is chosen. Without a cluster the
    plan's own devices are taken to run at the same time, even if there are more than cores: the user asked for them.
    Raises PlanError where no schedule fits the cluster's memory, or the cluster does not fit the devices.
    """
    problem = measure_problem(inputs, choose_cluster(inputs, plan.device_count), [r for r in plan.replicas if r > 1])
    problem = dataclasses.replace(problem, recompute=plan.recompute)
    sizes = [size for size in problem.micro_batch_sizes if size >= plan.least_samples]
    choice = choose_profiled_schedule(problem, plan.stages, sizes)
    size = problem.global_batch_size // choice.micro_batches
    chosen = Candidate(plan.stages, size, choice.schedule, 0.0, "requested")
    return decide_on(problem, chosen, "requested", inputs.samples, choice, plan.micro_batch_sizes)


# --- Move cuts of a later phase of a step, so that layers run on the devices of the variables that they change


def stages_at_home(plan: Plan, homes: Mapping[int, int], positions: Sequence[int]) -> tuple[StagePlan, ...] | None:
    """Return the stages of ``plan`` with cuts moved as little as needed, so that layers are on the devices ``homes``.

    ``homes``: by the position of a layer, the device on which a stage begins; a layer whose device has no stage does
    not count. ``positions``: the layers before which the model can be cut. None where no cuts fulfil this.
    """
    of_device: dict[int, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        of_device.setdefault(stage.devices[0], []).append(number)
    count = len(plan.stages)
    least, most = [1] * count, [plan.stages[-1].last_layer] * count  # of the first layer of each stage
    for layer, device in homes.items():
        if device not in of_device:
            continue
        present = bisect.bisect_right(plan.starts, layer)
        home = min(of_device[device], key=lambda number: abs(number - present))
        for number in range(1, count):
            if number <= home:
                most[number] = min(most[number], layer)
            else:
                least[number] = max(least[number], layer + 1)
    first, stages = 0, list(plan.stages)
    for number in range(1, count):
        possible = [start for start in positions if max(least[number], first + 1) <= start <= most[number]]
        if not possible:
            return None
        wanted = plan.stages[number].first_layer
        first = min(possible, key=lambda start: abs(start - wanted))
        stages[number] = dataclasses.replace(stages[number], first_layer=first)
        stages[number - 1] = dataclasses.replace(stages[number - 1], last_layer=first - 1)
    return tuple(stages)
