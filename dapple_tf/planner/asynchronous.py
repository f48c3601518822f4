"""Plans of asynchronous training: stages ranked by the simulated seconds of a minibatch in the steady state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.planner.baselines import baseline_candidates, fitted_baseline_candidates
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.planner.systems.pipedream import plan_pipedream
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_seconds_fixed, format_slower
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.window_plan import WindowPlan


@dataclass(frozen=True)
class WindowChoice:
    """A plan of windows with its simulated window; ``origin``: see ``Candidate``."""

    plan: Plan
    timeline: Timeline
    origin: str

    @property
    def minibatch_seconds(self) -> float:
        """Seconds of a minibatch in the steady state."""
        assert self.timeline.phases is not None, "plans of windows only"
        return self.timeline.phases.minibatch_seconds


def more_candidates(problem: PlanningProblem) -> list[Candidate]:
    """Return the candidates that planner "best" ranks with those of its search.

    They are PipeDream's plan, data parallelism, one device, and straight pipelines.
    """
    found = plan_pipedream(problem, minibatch_size=problem.micro_batch_sizes[0])
    return [*([found.chosen] if found else []), *baseline_candidates(problem), *fitted_baseline_candidates(problem)]


def rank_windows(
    problem: PlanningProblem, window: WindowPlan, candidates: Iterable[Candidate], planner: str
) -> tuple[WindowChoice, ...]:
    """Return the candidates' stages as plans of ``window``, those with the fewest seconds of a minibatch first.

    Of equally fast plans the one with the shorter window is first, then the one with fewer devices. Plans that do not
    fit the memory are left out. So are plans that cannot have the window, since their replicas do not divide its
    minibatches or their stages share devices. ``planner``: the name in the plans. Raises PlanError where none is left.
    """
    found: dict[Any, WindowChoice] = {}
    reasons: list[str] = []
    for candidate in candidates:
        bare = problem.make_plan(candidate.stages, candidate.micro_batch_size, "dapple-a", planner)
        if bare.stages in found:
            continue
        try:
            plan = window_plan(bare, window, problem.global_batch_size)
        except (PlanError, ScheduleError) as error:
            reasons.append(str(error))
            continue
        timeline = problem.simulate(plan)
        if not all(timeline.fits):
            reasons.append("the versions of the weights and the stashes of a window do not fit the devices' memory")
            continue
        found[bare.stages] = WindowChoice(
            replace(plan, predicted=predicted_figures(timeline)), timeline, candidate.origin
        )
    if not found:
        raise PlanError(f"no plan can train in windows of {window.minibatches} minibatches: {reasons[0]}")
    return tuple(
        sorted(found.values(), key=lambda c: (c.minibatch_seconds, c.timeline.step_seconds, c.plan.device_count))
    )


def predicted_figures(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a simulated step or window that ``Plan.predicted`` has."""
    return {
        "step_seconds": timeline.step_seconds,
        "speedup": timeline.speedup,
        "bubble": timeline.bubble,
        "peak_memory_bytes": list(timeline.peak_memory_bytes),
        **({} if timeline.phases is None else asdict(timeline.phases)),
    }


def describe_runners_up(choices: Sequence[WindowChoice], names: Sequence[str]) -> list[str]:
    """Return a line for the fastest choice of each origin, except the origin of the first choice.

    ``names``: the notation of each choice.
    """
    lines, seen = [], {choices[0].origin}
    least = choices[0].minibatch_seconds
    for choice, name in zip(choices, names, strict=True):
        if choice.origin not in seen:
            seen.add(choice.origin)
            slower = f", {format_slower(choice.minibatch_seconds / least)}" if least else ""
            seconds = format_seconds_fixed(choice.minibatch_seconds)
            lines.append(f"runner-up {name} ({choice.origin}): {seconds} a minibatch{slower}")
    return lines


# --- Stages as the plan of an asynchronous window


def window_plan(plan: Plan, window: WindowPlan, samples: int) -> Plan:
    """Return the plan of asynchronous windows of ``samples`` samples that has the stages of ``plan``.

    Raises PlanError for stages that share devices and for too few samples, and what ``WindowPlan.versions`` raises.
    """
    if not plan.worker_map.has_one_stage_per_worker:
        raise PlanError("mode='async' with several stages on one device: give each stage devices of its own")
    found = window.versions(plan.replicas).window
    total, warm_up = found.size, found.warm_up
    window.check_samples(samples, total, found.sharing)
    return replace(
        plan,
        global_batch_size=samples,
        micro_batch_size=-(-samples // total),
        micro_batches=total,
        micro_batch_sizes=None,
        schedule="K=" + ",".join(str(min(k, total)) for k in warm_up),
        overlap=False,
        predicted=None,
        window=window,
    )
