"""Shared by the planning benchmarks: problems, compared candidates, and plans in the paper's notation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.papers.published import Model, count_units
from dapple_tf.errors import PlanError
from dapple_tf.planner.api import predict_plan, run_planner
from dapple_tf.planner.explain import describe_result
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.search.dapple import formula_latency
from dapple_tf.plans import StagePlan
from dapple_tf.timeline.timeline import Timeline


@dataclass(frozen=True)
class WholeSlices(PlanningProblem):
    """A problem whose replicas each get at least the batch that the profile was measured with.

    The paper plans with the time of that one batch (Table II) and asks for micro-batches "large enough to ensure device
    efficiency" (section V.B.2). For smaller slices one must guess that time is proportional to their size.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "least_rows", self.profile.batch_size)


@dataclass(frozen=True)
class Choice:
    """A candidate, its simulated step, and its plan and split in the paper's notation."""

    candidate: Candidate
    timeline: Timeline
    name: str
    split: str

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.timeline.step_seconds

    def __str__(self) -> str:
        m = self.timeline.plan.micro_batches
        return f"{self.name}{' ' + self.split if self.split else ''} ({self.seconds * 1e3:.0f} ms, M = {m})"


def describe(model: Model, problem: PlanningProblem, candidate: Candidate) -> Choice:
    """Simulate the candidate, and return it with its notation."""
    plan, timeline = predict_plan(problem, candidate, candidate.origin)
    units = ":".join(map(str, count_units(model, problem.profile, plan.stages)))
    name = plan.notation
    return Choice(candidate, timeline, name, units if 1 < len(plan.stages) <= 8 else "")


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate, or None if there is none."""
    return min(candidates, key=lambda c: c.seconds, default=None)


def compare_latencies(problem: PlanningProblem, ours: Candidate, stages: Sequence[StagePlan]) -> str:
    """Return the latencies by formulas 1 to 3 of planner "dapple"'s plan and of printed stages at their best size.

    The formulas do not know that memory limits K_i: as in the planner, sizes at which the stages do not hold the
    warm-up of policy A are left out where others do.
    """
    fractions = replace(problem, whole_rows=False)
    found = problem.evaluate_all_sizes(stages, "printed")
    unlimited = [candidate for candidate in found if ":D=" not in candidate.schedule]
    fitting = [candidate.micro_batch_size for candidate in unlimited or found]
    least, size = min((formula_latency(fractions, stages, size), size) for size in fitting)
    own = formula_latency(fractions, ours.stages, ours.micro_batch_size)
    return f"L {own * 1e3:.1f} ms, of the printed plan {least * 1e3:.1f} ms, M = {problem.global_batch_size // size}"


def explain(problem: PlanningProblem, ours: Choice, other: Choice) -> str:
    """Return why ``other`` is slower than ``ours``, as the planner explains it."""
    decision = PlannerResult(ours.candidate, (other.candidate,))
    text = describe_result(
        problem, decision, (ours.timeline.plan, ours.timeline), [(other.timeline.plan, other.timeline)]
    )
    return text.splitlines()[0].split(": ", 1)[1]


def plan_or_none(problem: PlanningProblem, planner: str, **options: bool) -> Candidate | None:
    """Return the planner's choice; None where nothing fits."""
    try:
        return run_planner(problem, planner, **options).chosen
    except PlanError:
        return None
