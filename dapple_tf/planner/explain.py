"""Text for users: a plan in the paper's notation, its prediction, and why the runners-up are slower."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from dapple_tf.errors import PlanError
from dapple_tf.planner.best import least_plan_seconds
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.step_simulation import POLICIES, WORTH_MEMORY
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile
from dapple_tf.profiler.units import (
    format_bytes,
    format_devices,
    format_difference,
    format_samples,
    format_seconds_fixed,
    format_slower,
)
from dapple_tf.timeline.timeline import SimulatedTimeline, Timeline
from dapple_tf.wording import format_count


def describe_task(model: str, devices: int, samples: int) -> str:
    """Return what is planned for: the model, the devices and the batch of ``samples``."""
    return f"{model} on {format_devices(devices)}, a batch of {format_samples(samples)}"


def describe_plan(plan: Plan, profile: Profile, cluster: Cluster, timeline: Timeline) -> str:
    """Return what was planned for, the plan and its predicted step in a few lines."""
    task = describe_task(profile.model, cluster.devices, plan.global_batch_size)
    if plan.device_count < cluster.devices:
        task += f"; the plan uses {plan.device_count} of the devices"
    lines = [
        task,
        plan.headline,
        str(timeline),
    ]
    for index, stage in enumerate(plan.stages):
        first, last = profile.layers[stage.first_layer].name, profile.layers[stage.last_layer].name
        lines.append(f"stage {index}: {_short(first)} .. {_short(last)}{_rows(stage, plan.micro_batch_size)}")
    return "\n".join(lines)


def _rows(stage: StagePlan, samples: int) -> str:
    """Return the rows of a micro-batch of ``samples`` that each device of a stage takes, where they are unequal."""
    rows = stage.in_rows(samples).shares
    if rows is None or len(set(rows)) == 1:
        return ""
    return f", rows {':'.join(f'{row:.0f}' for row in rows)} on devices {', '.join(map(str, stage.devices))}"


FRACTIONS = (
    "counted with fractions of rows, as in the papers: in a run each replica takes whole rows, and the step takes "
    "longer if the number of replicas does not divide the rows of a micro-batch"
)


def describe_result(
    problem: PlanningProblem,
    result: PlannerResult,
    chosen: tuple[Plan, Timeline],
    runners_up: Sequence[tuple[Plan, Timeline]],
) -> str:
    """Return by how much and why the runners-up are slower, and whether a faster plan can exist.

    ``chosen``, ``runners_up``: the plans of ``result`` with their simulated steps (``predict_plan``).
    """
    lines = []
    for candidate, (plan, timeline) in zip(result.runners_up, runners_up, strict=True):
        seconds, loss = format_seconds_fixed(timeline.step_seconds), describe_loss(chosen, (plan, timeline))
        lines.append(f"{_name(candidate, plan)}: {seconds}, {loss}")
    if result.formula_seconds is not None:
        lines.append(f"{result.formula}: {format_seconds_fixed(result.formula_seconds)}")
    if (found := result.pipedream) is not None:
        lines.append(
            f"asynchronously, by PipeDream's formulas: {format_seconds_fixed(found.minibatch_seconds)} a minibatch of "
            f"{format_samples(found.minibatch_size)}, {found.samples_per_second:.4g} samples/s, NOAM {found.noam}"
        )
    if chosen[0].recompute and not problem.recompute:
        lines.append("recompute was chosen, not asked for: in this memory no plan was found without it that is as fast")
    if not problem.whole_rows:
        lines.append(FRACTIONS)
    if not chosen[0].virtual_workers:
        lines += _compare_with_bound(least_plan_seconds(problem), chosen[1].step_seconds)
    batch_size, plan = problem.profile.batch_size, chosen[0]
    if not problem.profile.timings and plan.micro_batch_size < batch_size * max(plan.replicas):
        lines.append(
            f"the profile has times of one batch size ({batch_size}); times of smaller slices were assumed "
            "proportional: profile several batch sizes to choose the micro-batch size more reliably"
        )
    return "\n".join(lines)


def _compare_with_bound(least: float, seconds: float) -> list[str]:
    """Return a line that compares a step with the lower bound of all plans; none if layers take no time."""
    if least <= 0:
        return []
    computing = format_seconds_fixed(least)
    if seconds <= least * (1 + 1e-6):
        return [f"proven: no plan is faster, because devices must compute for {computing}"]
    more = format_difference(seconds / least - 1)
    return [f"at most {more} above any plan: devices must compute for {computing}"]


def describe_moves(problem: PlanningProblem, plan: Plan, timeline: SimulatedTimeline) -> list[str]:
    """Return a line for each change that may help most: the simulated step of the same stages with it.

    The changes are links twice as fast, one more device for the stage that gains most from it, and re-computation, if
    nothing is re-computed yet. For a plan whose schedule lists its K_i, the schedule of policy A or B is a change too,
    if it needs less memory and its step is at most 2% longer. A plan of virtual workers has no such lines.
    """
    if plan.virtual_workers:
        return []
    now, lines = timeline.step_seconds, list[str]()

    def describe(change: str, changed: SimulatedTimeline, more: str = "") -> str:
        seconds = changed.step_seconds
        if abs(seconds - now) <= now * 5e-4:
            effect = "as long"
        else:
            effect = f"{abs(seconds - now) / (now or seconds):.1%} {'less' if seconds < now else 'more'}"
        return f"with {change} these stages would take {format_seconds_fixed(seconds)}, {effect}{more}"

    if plan.device_count > 1:
        faster = problem.cluster.with_faster_links(2.0)
        lines.append(describe("links twice as fast", dataclasses.replace(problem, cluster=faster).simulate(plan)))
    larger, device = problem.cluster.with_another_device()
    trials = list[tuple[float, int, SimulatedTimeline]]()
    for index, stage in enumerate(plan.stages):
        if plan.worker_map.has_one_stage_per_worker and stage.shares is None and stage.replicas < plan.micro_batch_size:
            stages = list(plan.stages)
            stages[index] = dataclasses.replace(stage, devices=(*stage.devices, device))
            grown = dataclasses.replace(plan, stages=tuple(stages))
            with contextlib.suppress(PlanError):  # what crosses a cut of this stage cannot be split
                changed = dataclasses.replace(problem, cluster=larger).simulate(grown)
                trials.append((changed.step_seconds, index, changed))
    if trials:
        _, index, changed = min(trials, key=lambda trial: trial[:2])
        lines.append(describe(f"one more device, for stage {index},", changed))

    def memory(changed: SimulatedTimeline) -> str:
        held, before = (format_bytes(max(found.peak_memory_bytes)) for found in (changed, timeline))
        return f", and hold up to {held} on a device where this plan holds {before}" if held != before else ""

    if not plan.recompute:
        changed = problem.simulate(dataclasses.replace(plan, recompute=True))
        lines.append(describe("re-computation", changed, memory(changed)))
    for policy in POLICIES[:2] if plan.schedule.startswith("K=") else ():
        changed = problem.simulate(dataclasses.replace(plan, schedule=policy))
        saves = max(changed.peak_memory_bytes) < max(timeline.peak_memory_bytes)
        if saves and changed.step_seconds < now * (1 + WORTH_MEMORY):
            lines.append(describe(f"schedule {policy}", changed, memory(changed)))
            break
    return lines


def _name(candidate: Candidate, plan: Plan) -> str:
    """Return a runner-up's notation, origin, micro-batches and schedule."""
    kind = plan.notation
    origin = "" if candidate.origin in (kind, "one device") else f" ({candidate.origin})"
    return f"runner-up {kind}{origin}, {format_count(plan.whole_micro_batches, 'micro-batch')}, {plan.short_schedule}"


def describe_loss(chosen: tuple[Plan, Timeline], other: tuple[Plan, Timeline]) -> str:
    """Return by how much the other plan is slower, and the part of the step where it loses most."""
    parts, other_parts = step_parts(*chosen), step_parts(*other)
    least, seconds = chosen[1].step_seconds, other[1].step_seconds
    if seconds - least <= least * 1e-6:
        return "as fast"
    part = max(other_parts, key=lambda name: other_parts[name] - parts[name])
    # The step of a model whose layers take no time can be 0 s.
    slower = format_slower(seconds / least) if least else "slower"
    more, before = other_parts[part], parts[part]
    against = format_seconds_fixed(before, more)
    return f"{slower}: {_PARTS[part]} takes {format_seconds_fixed(more, before)} against {against}"


def step_parts(plan: Plan, timeline: Timeline) -> dict[str, float]:
    """Return the seconds of the step, divided among "compute", "allreduce" and "wait"."""
    costs = timeline.costs
    compute = [
        plan.micro_batches * sum(costs[s].forward_seconds + costs[s].backward_seconds for s in stages)
        for stages in timeline.plan.worker_map.stages_of  # of the last one of virtual workers
    ]
    # In plans of virtual workers these seconds include waiting for other workers, which the last worker does not do.
    exposed = (min if plan.virtual_workers else max)(c.exposed_seconds for c in costs)
    wait = max(0.0, timeline.step_seconds - max(compute) - exposed)
    return {"compute": max(compute), "allreduce": exposed, "wait": wait}


_PARTS = {
    "compute": "computing on the busiest device",
    "allreduce": "AllReduce after the last backward",
    "wait": "waiting for other stages and transfers",
}


def _short(name: str) -> str:
    """Return the first 60 characters of a layer's name."""
    return name if len(name) <= 60 else name[:57] + "..."
