"""A decision in words: the plan as the paper writes it, what it will cost, and why the others lost."""

from __future__ import annotations

from dapple_tf.plan import Plan
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.timeline.timeline import Timeline
from graph_passes.schedules.policies import abbreviate_schedule
from profiler.profile import Profile


def notation(plan: Plan) -> str:
    """``DP``, ``straight``, ``one device``, or the replicas of each stage such as ``8:8`` (DAPPLE, section VI.B)."""
    if len(plan.stages) == 1:
        return "DP" if plan.replicas[0] > 1 else "one device"
    if set(plan.replicas) == {1}:
        return "straight"
    return ":".join(map(str, plan.replicas))


def split_positions(plan: Plan) -> str:
    """How many layers each stage has, such as ``23:25``."""
    return ":".join(str(stage.last_layer - stage.first_layer + 1) for stage in plan.stages)


def describe_plan(plan: Plan, profile: Profile, timeline: Timeline) -> str:
    """The plan and its prediction in a few lines."""
    lines = [
        f"plan {notation(plan)}, layers {split_positions(plan)}, {plan.micro_batches} micro-batches of "
        f"{plan.micro_batch_size} samples, schedule {abbreviate_schedule(plan.schedule)}"
        + _recomputed(plan)
        + (", AllReduce overlaps backward" if plan.overlap else ""),
        str(timeline),
    ]
    for index, stage in enumerate(plan.stages):
        first, last = profile.layers[stage.first_layer].name, profile.layers[stage.last_layer].name
        lines.append(f"stage {index}: {_short(first)} .. {_short(last)}")
    return "\n".join(lines)


def _recomputed(plan: Plan) -> str:
    if isinstance(plan.recompute, bool):
        return ", recompute" if plan.recompute else ""
    return f", recompute of {len(plan.recompute)} layers" if plan.recompute else ""


def describe_result(
    problem: PlanningProblem,
    decision: PlannerResult,
    planned: tuple[Plan, Timeline],
    others: list[tuple[Plan, Timeline]],
) -> str:
    """Why the runners-up lost, and whether anything better can be."""
    lines = []
    for candidate, (plan, timeline) in zip(decision.runners_up, others, strict=True):
        lines.append(f"{_name(candidate, plan)}: {_difference(planned, (plan, timeline))}")
    if decision.formula_seconds is not None:
        lines.append(f"latency by the paper's formulas 1 to 3: {_ms(decision.formula_seconds)}")
    if decision.proven_optimal:
        lines.append("no plan of the search space is faster in the simulator")
    if not problem.profile.timings and planned[0].micro_batch_size < problem.profile.batch_size * max(
        planned[0].replicas
    ):
        lines.append(
            f"the profile has one batch size ({problem.profile.batch_size}); smaller slices were taken as "
            "proportionally faster: profile at several batch sizes for a surer choice of the micro-batch"
        )
    return "\n".join(lines)


def _name(candidate: Candidate, plan: Plan) -> str:
    kind = notation(plan)
    origin = "" if candidate.origin in (kind, "search", "two stages", "one device") else f" ({candidate.origin})"
    return f"runner-up {kind}{origin}, {plan.micro_batches} micro-batches, {abbreviate_schedule(plan.schedule)}"


def _difference(planned: tuple[Plan, Timeline], other: tuple[Plan, Timeline]) -> str:
    """By how much the other is slower, and the part of the step where it loses most."""
    ours, theirs = _parts(*planned), _parts(*other)
    seconds, least = other[1].step_seconds, planned[1].step_seconds
    if seconds - least <= least * 1e-6:
        return f"{_ms(seconds)}, as fast"
    part = max(theirs, key=lambda name: theirs[name] - ours[name])
    more = f"{seconds / least - 1:.1%} " if least else ""  # a model whose layers take no time can have a step of none
    return f"{_ms(seconds)}, {more}slower: {part} {_ms(theirs[part])} against {_ms(ours[part])}"


def _parts(plan: Plan, timeline: Timeline) -> dict[str, float]:
    """The step's seconds shared out over what makes it long."""
    compute = [plan.micro_batches * (c.forward_seconds + c.backward_seconds) for c in timeline.costs]
    exposed = max(c.exposed_seconds for c in timeline.costs)
    return {
        "computing in the busiest stage takes": max(compute),
        "AllReduce after the last backward takes": exposed,
        "waiting for other stages and transfers takes": max(0.0, timeline.step_seconds - max(compute) - exposed),
    }


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."


def _ms(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
