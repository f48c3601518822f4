"""The plan of a pipelined step, with the reasons for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dapple_tf.autoplan.schedule_auto import ScheduleChoice
from dapple_tf.planner.api import predict_plan
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.plans import Plan
from dapple_tf.timeline.timeline import Timeline


@dataclass(frozen=True)
class PlanDecision:
    """A plan and how it was decided.

    ``choice``: why the plan has its schedule and M, where the simulator chose them. ``simulated``: the simulated step
    of the plan, and ``problem``: what the planner was given, where the plan was made from a profile.
    """

    plan: Plan
    choice: ScheduleChoice | None = None
    simulated: Timeline | None = None
    problem: PlanningProblem | None = None

    def with_schedule(self, choice: ScheduleChoice) -> PlanDecision:
        """Return this decision with the schedule of ``choice`` in its plan."""
        return dataclasses.replace(
            self, plan=dataclasses.replace(self.plan, schedule=choice.plan_schedule), choice=choice
        )

    def with_recompute(self, recompute: bool | tuple[int, ...]) -> PlanDecision:
        """Return this decision with ``recompute`` in its plan, and no prediction if it was made for another."""
        if self.plan.recompute == recompute:
            return self
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, recompute=recompute, predicted=None))


def decide_on(
    problem: PlanningProblem,
    candidate: Candidate,
    planner: str,
    samples: int,
    choice: ScheduleChoice | None,
    sizes: tuple[int, ...] | None = None,
) -> PlanDecision:
    """Return the decision for ``candidate``, with its simulated step.

    The plan is for a whole batch of ``samples`` (the simulated micro-batches may leave out a few of them), or for
    micro-batches of given ``sizes``.
    """
    plan, simulated = predict_plan(problem, candidate, planner, sizes)
    if sizes is not None:
        return PlanDecision(plan, choice, simulated, problem)
    micro_batch_size = -(-samples // plan.micro_batches)
    plan = dataclasses.replace(plan, global_batch_size=samples, micro_batch_size=micro_batch_size)
    return PlanDecision(plan, choice, simulated, problem)
