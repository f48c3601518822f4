"""``schedule="auto"``: choose the schedule of given stages by simulating each policy (DAPPLE, sections V.C and VI.D).

D, the number of micro-batches that memory holds, and M are chosen with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dapple_tf.errors import NoFitError
from dapple_tf.graph_passes.schedules.spec import HANDCRAFTED_ZERO_BUBBLE, ScheduleSpec
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.graph_passes.schedules.zero_bubble import ZERO_BUBBLE_AUTO
from dapple_tf.plan_check import check_plan
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.step_simulation import POLICIES, WORTH_MEMORY, fastest_schedule, stage_cost_arrays
from dapple_tf.plans import REQUESTED, StagePlan
from dapple_tf.profiler.units import format_bytes
from dapple_tf.simulator.contention import Flows
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.interrupts import interruptible
from dapple_tf.simulator.order import encode
from dapple_tf.simulator.order_search import FoundOrder, search_order
from dapple_tf.timeline.stage_costs import StageCosts, activation_communication_ratio, usable_bytes

# Steps count as equally fast if their seconds differ by less than this share.
_ALIKE = 1e-3


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule, and why it was chosen.

    ``micro_batches``: M. ``acr``: see ``activation_communication_ratio``. ``seconds``: the step's under each policy
    that fits the memory, by the policy's name. ``measured``: whether costs come from a profile, and not from an
    estimate. ``memory``: bytes of a device. ``max_in_flight``: for each stage, how many micro-batches its memory holds.
    ``found``: where the schedule is ``zb-auto``, the order that was found.
    """

    schedule: str
    micro_batches: int
    acr: float
    seconds: Mapping[str, float]
    measured: bool
    memory: float
    max_in_flight: tuple[int, ...]
    found: FoundOrder | None = None

    @property
    def plan_schedule(self) -> str:
        """The schedule as a plan states it: by name, or for an order that was found by all of its actions."""
        return self.schedule if self.found is None else str(self.found.schedule)

    def __str__(self) -> str:
        base = "" if self.measured else " (estimated)"
        text = f"schedule {ScheduleSpec.parse(self.schedule).short}, M = {self.micro_batches}: ACR {self.acr:.3f}{base}"
        chosen = self.seconds[self.schedule]
        others = [
            f"{name} {_compare(seconds, chosen)}" for name, seconds in self.seconds.items() if name != self.schedule
        ]
        if others:
            text += f"; {', '.join(others)}"
        if self.found is not None:
            text += f"; {self.found}"
        limit = ScheduleSpec.parse(self.schedule).limit
        if limit is not None:
            stage = min(range(len(self.max_in_flight)), key=lambda s: self.max_in_flight[s])
            text += f"; D = {limit}: a device's {format_bytes(self.memory)} hold no more micro-batches of stage {stage}"
        return text


@interruptible
def choose_schedule(
    costs: Mapping[int, Sequence[StageCosts]],
    memory: float,
    *,
    policies: Sequence[str] = (),
    more: Sequence[str] = (),
    measured: bool,
    flows: Flows | None = None,
) -> ScheduleChoice:
    """Return the first of ``policies`` within 2% of the fastest of them, for the fastest number of micro-batches M.

    ``costs``: the costs of each stage, by M. ``memory``: bytes of a device. ``policies``: the most wanted one first. If
    there are none, those of DAPPLE, those in ``more`` and the K_i of ``hiding_warm_up`` are tried, the one that holds
    the fewest bytes of stashes first. ``flows``: the links that stages share. D is the number of micro-batches that the
    memory holds (DAPPLE, V.C). Raises NoFitError where no M fits the memory, naming the stage, the missing bytes and
    the remedies; and ScheduleError for explicit K_i, or explicit actions, that cannot run.
    """
    for policy in (*policies, *more):
        spec = ScheduleSpec.parse(policy)
        if spec.stages:
            spec.build(len(costs[max(costs)]), spec.micro_batches_within(costs))
    best: ScheduleChoice | None = None
    for m, stages in sorted(costs.items()):
        rows = stage_cost_arrays(stages, flows)
        max_in_flight = tuple(_count_in_flight(stage, memory, m) for stage in stages)
        tried = policies or _by_stashes([*POLICIES, *more], stages, m, max_in_flight)
        found = [fastest_schedule(rows, m, usable_bytes(memory), policy) for policy in tried]
        seconds = {entry.schedule: entry.seconds for entry in found if entry.seconds < float("inf")}
        if not seconds:
            continue
        least = min(seconds.values())
        name = next(name for name, value in seconds.items() if value <= least * (1 + WORTH_MEMORY))
        if best is None or seconds[name] < best.seconds[best.schedule] * (1 - _ALIKE):
            acr = activation_communication_ratio(stages)
            best = ScheduleChoice(name, m, acr, seconds, measured, memory, max_in_flight)
    if best is None:
        raise NoFitError(_explain_shortage(costs, memory, policies or POLICIES))
    return best


def hiding_warm_up(stages: Sequence[StageCosts], micro_batches: int, most: Sequence[int]) -> tuple[int, ...]:
    """Return the least K_i with which no stage waits for a gradient, at most M and what memory holds (``most``).

    A micro-batch stays in stage i from its forward to the end of its backward: the F and B of this stage and the later
    ones, and all transfers between them, there and back. The pipeline completes one in the seconds of the slowest stage
    or link. So many micro-batches stay in stage i at a time (Little's law). Where transfers take no time, equal stages
    get the K_i of DAPPLE's policy A, and with transfers as long as compute those of policy B.
    """
    compute = np.array([stage.forward_seconds + stage.backward_seconds for stage in stages])
    sending = np.array([stage.send_forward_seconds + stage.send_backward_seconds for stage in stages])
    one_way = np.array([(stage.send_forward_seconds, stage.send_backward_seconds) for stage in stages])
    slowest = max(float(compute.max()), float(one_way.max()))
    stays = np.cumsum((compute + sending)[::-1])[::-1]
    wanted = np.ceil(stays / slowest - 1e-9) if slowest else np.ones(len(stages))
    held = np.minimum(wanted, [min(micro_batches, holds) for holds in most])
    return tuple(max(1, int(k)) for k in np.minimum.accumulate(held))


def _by_stashes(
    policies: Sequence[str], stages: Sequence[StageCosts], micro_batches: int, most: Sequence[int]
) -> list[str]:
    """Return the policies and ``hiding_warm_up``, by the bytes of their stashes; of equal K_i only the first one."""
    hiding = "K=" + ",".join(map(str, hiding_warm_up(stages, micro_batches, most)))
    names: dict[tuple[int, ...] | str, str] = {}
    for name in (*policies, hiding):
        names.setdefault(ScheduleSpec.parse(name).warm_up(len(stages), micro_batches) or name, name)

    def stashes(kept: tuple[int, ...] | str) -> float:
        counts = [*most] if isinstance(kept, str) else np.minimum(kept, most)
        return float(sum(count * stage.stash_bytes for count, stage in zip(counts, stages, strict=True)))

    return [names[kept] for kept in sorted(names, key=stashes)]


@interruptible
def choose_profiled_schedule(
    problem: PlanningProblem, stages: tuple[StagePlan, ...], micro_batch_sizes: Sequence[int], planned: str = "auto"
) -> ScheduleChoice:
    """Return ``choose_schedule`` of the problem's profile, for these stages, over all ``micro_batch_sizes`` (samples).

    ``planned``: a schedule that a planner has found for them, which is tried too. Raises PlanError where the stages do
    not fit the profile or the cluster, and NoFitError and ScheduleError as ``choose_schedule`` does.
    """
    memory, flows = problem.cluster.least_memory, problem.find_flows(stages)
    if problem.schedule != "auto":
        costs = _costs_by_micro_batches(problem, stages, micro_batch_sizes, problem.schedule)
        choice = choose_schedule(costs, memory, policies=(problem.schedule,), measured=True, flows=flows)
        return with_found_order(choice, stages, costs, flows) if problem.searches_order else choice
    costs = _costs_by_micro_batches(problem, stages, micro_batch_sizes, POLICIES[0])
    more = () if planned == "auto" else (planned,)
    choice = choose_schedule(costs, memory, more=more, measured=True, flows=flows)
    if len(stages) == 1:
        return choice
    size = problem.global_batch_size // choice.micro_batches
    split = _costs_by_micro_batches(problem, stages, [size], HANDCRAFTED_ZERO_BUBBLE[0])
    return _with_split_backward(choice, split, flows)


def with_found_order(
    choice: ScheduleChoice,
    stages: Sequence[StagePlan],
    costs: Mapping[int, Sequence[StageCosts]],
    flows: Flows | None = None,
) -> ScheduleChoice:
    """Return a choice of ``zb-auto`` with the order found for the chosen M; the search knows no contention of links."""
    workers, own = ScheduleSpec.parse(choice.schedule).worker_map(len(stages)), costs[choice.micro_batches]
    found = search_order(workers, choice.micro_batches, own, choice.memory)
    seconds = {**choice.seconds, choice.schedule: _seconds_of(found, own, flows)}
    return dataclasses.replace(choice, seconds=seconds, found=found)


def _costs_by_micro_batches(
    problem: PlanningProblem, stages: tuple[StagePlan, ...], micro_batch_sizes: Sequence[int], schedule: str
) -> dict[int, Sequence[StageCosts]]:
    """Return the costs of the stages under ``schedule``, by M."""
    costs: dict[int, Sequence[StageCosts]] = {}
    for size in micro_batch_sizes:
        plan = problem.make_plan(stages, size, schedule, REQUESTED)
        check_plan(plan, problem.profile, problem.cluster)
        costs[plan.micro_batches] = stage_costs(
            plan, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots
        )
    return costs


def _seconds_of(found: FoundOrder, costs: Sequence[StageCosts], flows: Flows | None) -> float:
    """Return the seconds of a step in this order, with contention."""
    return execute(encode(found.schedule), costs, flows).step_seconds


def _with_split_backward(
    choice: ScheduleChoice, costs: Mapping[int, Sequence[StageCosts]], flows: Flows | None
) -> ScheduleChoice:
    """Return the choice, or the fastest schedule that splits backwards, for the same M, if that gains enough.

    ``costs``: the costs of each stage if backwards are split.
    """
    m = choice.micro_batches
    rows, memory = stage_cost_arrays(costs[m], flows), usable_bytes(choice.memory)
    tried = [fastest_schedule(rows, m, memory, policy) for policy in HANDCRAFTED_ZERO_BUBBLE]
    seconds = {**choice.seconds, **{entry.schedule: entry.seconds for entry in tried if entry.seconds < float("inf")}}
    found = None
    if any(entry.seconds < float("inf") for entry in tried):
        found = search_order(WorkerMap.one_per_stage(len(costs[m])), m, costs[m], choice.memory)
        seconds[ZERO_BUBBLE_AUTO] = _seconds_of(found, costs[m], flows)
    split = {name: value for name, value in seconds.items() if name not in choice.seconds}
    # Less is not worth it, since two calls of a stage's functions take a little longer than one.
    least = min(split.values(), default=float("inf"))
    if least > choice.seconds[choice.schedule] * (1 - WORTH_MEMORY):
        return dataclasses.replace(choice, seconds=seconds)
    name = next(name for name, value in split.items() if value <= least * (1 + _ALIKE))
    found = found if name == ZERO_BUBBLE_AUTO else None
    return dataclasses.replace(choice, schedule=name, seconds=seconds, found=found)


def _count_in_flight(stage: StageCosts, memory: float, micro_batches: int) -> int:
    """Return how many micro-batches' stashes fit beside the stage's weights and working set, at most M."""
    room = usable_bytes(memory) - stage.fixed_bytes - stage.working_bytes
    return micro_batches if room >= micro_batches * stage.stash_bytes else max(0, int(room / stage.stash_bytes))


def _explain_shortage(costs: Mapping[int, Sequence[StageCosts]], memory: float, policies: Sequence[str]) -> str:
    """Return which stage lacks most memory, with the largest M and one micro-batch in flight, and the remedies."""
    m, specs = max(costs), [ScheduleSpec.parse(policy) for policy in policies]
    if any(spec.runs_several_stages for spec in specs):
        names = " or ".join(spec.short for spec in specs)
        return (
            f"schedule {names}, under which devices run several stages, keeps more in flight than fits into a device's "
            f"{format_bytes(memory)}, with M = {m} too: use schedule 'auto', or more devices"
        )
    needs = [stage.fixed_bytes + stage.working_bytes + stage.stash_bytes for stage in costs[m]]
    worst = max(range(len(needs)), key=lambda s: needs[s])
    stage, missing = costs[m][worst], needs[worst] - memory
    if needs[worst] <= usable_bytes(memory):
        return (
            f"schedule {' or '.join(policies)} keeps more micro-batches of stage {worst} in flight, "
            f"{format_bytes(stage.stash_bytes)} each with M = {m}, than fit into a device's {format_bytes(memory)}: "
            "use schedule 'auto'"
        )
    text = (
        f"no schedule fits: with M = {m} and one micro-batch in flight, stage {worst} needs "
        f"{format_bytes(needs[worst])} (weights, gradients and optimizer slots {format_bytes(stage.fixed_bytes)}, "
        f"stash {format_bytes(stage.stash_bytes)}, working set {format_bytes(stage.working_bytes)}) and lacks "
        f"{format_bytes(missing)} of a device's {format_bytes(memory)}"
    )
    if stage.fixed_bytes > memory:
        return f"{text}. Its weights alone do not fit: use more stages, or an optimizer with fewer slots"
    return (
        f"{text}. Use more micro-batches, or more stages: recompute=True saves nothing with one micro-batch in flight"
    )


def _compare(seconds: float, chosen: float) -> str:
    if not chosen or abs(seconds / chosen - 1) < _ALIKE / 2:
        return "takes as long"
    return f"takes {abs(seconds / chosen - 1):.1%} {'longer' if seconds > chosen else 'less, too little to choose it'}"
